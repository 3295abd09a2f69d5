-- Wait no longer for a lock; what was granted meanwhile goes to the next.
-- KEYS     1: name, 2: queue
-- ARGV     1: place, 2: the client's inbox
-- returns  1: the lock was given back; 0: it was not the caller's
-- cost     2 commands, and those of the grant
redis.replicate_commands() -- to ask for subscribers before a write needs it on Redis 6.2; since 7.0 it changes nothing
redis.call('ZREM', KEYS[2], ARGV[2] .. ARGV[1])
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' or not mine(held, ARGV[1]) then
  return 0
end
if not grant() then
  redis.call('DEL', KEYS[1])
end
return 1
