-- Change how many permits a semaphore has, grant those that are free now, and tell waiters that ask for too many.
-- KEYS     1: name; 2: queue; 3: size
-- ARGV     1: the new size, empty = as many as whoever acquires says
-- returns  1. An error: WRONGKIND and the kind of the name
-- cost     4 commands, and those of the grant
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local wrong = other_kind(USED)
if wrong then
  return wrong
end
if ARGV[1] == '' then
  redis.call('DEL', KEYS[3])
else
  redis.call('SET', KEYS[3], ARGV[1])
end
drop_ended()
for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local channel, entry = split(member)
  if mode(entry) == 's' and count(entry) > size(entry) then
    redis.call('ZREM', KEYS[2], member)
    publish(channel, entry)
  end
end
grant()
settle(KEYS[1])
return 1
