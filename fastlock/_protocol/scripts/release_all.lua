-- Release several locks, and grant each to the first entry in its queue, if there is one.
-- KEYS     1..n: names, n+1..2n: their queues
-- ARGV     1..n: their tokens
-- returns  a list of 1 (released) and 0 (somebody else's, nobody's, or not a lock), in order
-- cost     2 commands where nobody waits; else for each name 6 with waiters, 3 without
redis.replicate_commands() -- Redis 6.2 needs it to write after PUBSUB; since 7.0 it changes nothing
local queues, released = { unpack(KEYS, #ARGV + 1) }, {}
for i, name in ipairs(names) do
  local held = redis.pcall('GET', name)
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then
    return held
  end
  released[i] = 0
  if mine(held, ARGV[i]) then
    KEYS[1], KEYS[2] = name, queues[i] -- those that `grant` works on
    if not grant() then
      redis.call('DEL', name)
    end
    released[i] = 1
  end
end
return released
