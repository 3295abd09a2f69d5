-- Give a held lock a new lease, where the server has no compare-and-set of its own.
-- KEYS     1: name
-- ARGV     1: token, 2: milliseconds, 3: '1' = the new lease, '0' = to be added to what is left of the present one
-- returns  1: extended; 0: somebody else's, nobody's, not a lock, or one without end
-- cost     2 commands, 3 when added
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then
  return held
end
if held ~= ARGV[1] then
  return 0
end
local lease = tonumber(ARGV[2])
if ARGV[3] == '0' then
  local left = redis.call('PTTL', KEYS[1])
  if left < 0 then
    return 0
  end
  lease = lease + left
end
return redis.call('PEXPIRE', KEYS[1], string.format('%.0f', lease))
