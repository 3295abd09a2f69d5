-- Take an entry out of a lock's queue; if it was granted the lock meanwhile, the next entry gets that.
-- KEYS     1: name, 2: queue
-- ARGV     1: entry, 2: its address
-- returns  1: the lock was granted to the entry, and is released; 0: it was not the entry's
-- cost     2 commands, and those of the grant
redis.replicate_commands() -- Redis 6.2 needs it to write after PUBSUB; since 7.0 it changes nothing
redis.call('ZREM', KEYS[2], ARGV[2] .. ARGV[1])
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' or not mine(held, ARGV[1]) then
  return 0
end
if not grant() then
  redis.call('DEL', KEYS[1])
end
return 1
