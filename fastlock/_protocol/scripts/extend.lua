-- Give a held lock a new lease, where the server has no compare-and-set command, or somebody waits for the lock.
-- KEYS     1: name
-- ARGV     1: token, 2: the new lease in milliseconds
-- returns  1: extended; 0: somebody else's, nobody's, or not a lock
-- cost     2 commands
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then
  return held
end
if not mine(held, ARGV[1]) then
  return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
