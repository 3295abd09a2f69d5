-- Release a name that several may hold, or leave its queue, and grant it to those whom it fits now.
-- KEYS     1: name; 2: queue; 3: of a semaphore its size
-- ARGV     1: token; 2: its address, empty = the token is not in the queue
-- returns  1: released; 0: the token did not hold the name
-- cost     2 commands when nobody else holds it and nobody waits, 4 of a semaphore; else 8
local me, address = ARGV[1], ARGV[2]
dropped = dropped == 1 or (other_form(me) and drop(other_form(me)))
if address ~= '' then
  redis.call('ZREM', KEYS[2], address .. me)
end
drop_ended()
grant()
settle(KEYS[1])
return dropped and 1 or 0
