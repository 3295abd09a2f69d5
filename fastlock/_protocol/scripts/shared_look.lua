-- Ask what became of an entry in the queue of a name that several may hold, and confirm a grant. It neither queues nor
-- takes anything for an entry that is not there.
-- KEYS     1: name; 2: queue; 3: of a semaphore its size, of a read-write lock the counter of fences, if one is wanted
-- ARGV     1: token, which is the entry in the queue; 2: its address; 3: lease in milliseconds, 0 = without
--          end; 4: how long the queue is kept after its last use, in milliseconds; 5: the same of the counter
-- returns  {1, waiting, fence}: acquired, so many others wait; {0, left, 1, ahead}: queued behind so many, the first lease
--          ends in so many milliseconds (-1: without end); {-1, 0, 0}: it is not there any more. An error: WRONGKIND and the kind of
--          the name
-- cost     8 commands
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local me = ARGV[1]
local wrong = other_kind(me)
if wrong then
  return wrong
end
local fence = next_fence(me)
drop_ended()
local mine = redis.call('ZSCORE', KEYS[1], me)
if mine then
  begin(KEYS[1])
  hold(me, ARGV[3])
else
  mine = grant(me, ARGV[3])
end
settle(KEYS[1])
if mine then
  return granted(fence, ARGV[5], redis.call('ZCARD', KEYS[2]))
end
local ahead = redis.call('PEXPIRE', KEYS[2], ARGV[4]) == 1 and redis.call('ZRANK', KEYS[2], ARGV[2] .. me)
return ahead and queued(ahead) or {-1, 0, 0}
