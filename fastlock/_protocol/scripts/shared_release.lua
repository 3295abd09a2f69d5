-- Release a name that several may hold, or leave its queue, and grant it to those whom it fits now.
-- KEYS     1: name; 2: queue; 3: of a semaphore its size
-- ARGV     1: token; 2: the client's channel, empty = the token is not in the queue
-- returns  1: released; 0: the token did not hold the name
-- cost     6 commands when nobody waits
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local wrong = other_kind(ARGV[1])
if wrong then
  return string.find(wrong.err, 'WRONG', 1, true) and 0 or wrong
end
if ARGV[2] ~= '' then
  redis.call('ZREM', KEYS[2], ARGV[2] .. ARGV[1])
end
drop_ended()
local other = other_form(ARGV[1])
local dropped = drop(ARGV[1]) or (other and drop(other))
grant()
settle(KEYS[1])
return dropped and 1 or 0
