-- Give several held locks a new lease each.
-- KEYS     1..n: names
-- ARGV     1..n: their tokens, n+1..2n: the new leases in milliseconds
-- returns  a list of 1 (renewed), 2 (renewed, and somebody waits for it) and 0 (somebody else's, nobody's, or not a
--          lock), in order
-- cost     2 commands a name
local renewed = {}
for i, name in ipairs(KEYS) do
  local held = redis.pcall('GET', name)
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then
    return held
  end
  if mine(held, ARGV[i]) then
    redis.call('PEXPIRE', name, ARGV[#KEYS + i])
    renewed[i] = held == ARGV[i] and 1 or 2
  else
    renewed[i] = 0
  end
end
return renewed
