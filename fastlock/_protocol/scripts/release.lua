-- Release a lock that nobody waits for, where the server has no compare-and-delete command.
-- KEYS     1: name
-- ARGV     1: token
-- returns  1: released; 0: somebody else's, nobody's, or not a lock
-- cost     2 commands
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then
  return held
end
if held == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
