-- Release a contended lock: to the first who waits for it, if anybody does.
-- KEYS     1: name, 2: queue
-- ARGV     1: token
-- returns  1: released; 0: somebody else's, nobody's, or not a lock
-- cost     6 commands with waiters, 3 without
redis.replicate_commands() -- to ask for subscribers before a write needs it on Redis 6.2; since 7.0 it changes nothing
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then
  return held
end
if not mine(held, ARGV[1]) then
  return 0
end
if not grant() then
  redis.call('DEL', KEYS[1])
end
return 1
