-- Make a writer a reader, and grant the name to the readers who wait next.
-- KEYS     1: name; 2: queue
-- ARGV     1: the writer's token
-- returns  1: it reads now; 0: it does not hold the name
-- cost     8 commands when nobody waits
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local wrong = other_kind(ARGV[1])
if wrong then
  return string.find(wrong.err, 'WRONG', 1, true) and 0 or wrong
end
drop_ended()
local reader = other_form(ARGV[1])
local score = redis.call('ZSCORE', KEYS[1], ARGV[1])
if score then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('ZADD', KEYS[1], score, reader)
end
grant()
settle(KEYS[1])
return redis.call('ZSCORE', KEYS[1], reader) and 1 or 0 -- 1 also if it is sent again, as its reply was lost
