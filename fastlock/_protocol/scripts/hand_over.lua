-- Release a contended lock, and grant it to the first entry in its queue, if there is one.
-- KEYS     1: name, 2: queue
-- ARGV     1: token
-- returns  1: released; 0: somebody else's, nobody's, or not a lock
-- cost     6 commands with waiters, 3 without
redis.replicate_commands() -- Redis 6.2 needs it to write after PUBSUB; since 7.0 it changes nothing
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
