-- Acquire a name that several may hold, or join its queue. It is sent once in an entry's life.
-- KEYS     1: name; 2: queue; 3: of a semaphore its size, of a read-write lock the counter of fences, if one is wanted
-- ARGV     1: token, which is the entry in the queue; 2: its address, empty = do not queue; 3: lease in
--          milliseconds, 0 = without end; 4: how long the queue is kept after its last use, in milliseconds; 5: the
--          same of the counter; 6: '1' = before all in the queue that are not so themselves
-- returns  {1, waiting, fence}: acquired, so many others wait; or {0, left, 1, ahead}: not, behind so many, the first
--          lease ends in so many milliseconds (-1: without end). An error: WRONGKIND and the kind of the name; PERMITS
--          and how many there are
-- cost     4 commands when nobody holds it and nobody waits, else 10
local me, address, lease, kept = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local wrong = other_kind(me)
if wrong then
  return wrong
end
if mode(me) == 's' and count(me) > size(me) then
  return redis.error_reply('PERMITS ' .. size(me))
end
local fence = next_fence(me)
drop_ended()
local mine = redis.call('ZSCORE', KEYS[1], me) -- it acquired before, and that reply was lost
if mine then
  hold(me, lease)
elseif address ~= '' then
  local first, last = unpack(ARGV[6] == '1' and {'-inf', 0} or {0, '+inf'})
  local behind = redis.call('ZREVRANGEBYSCORE', KEYS[2], last, first, 'WITHSCORES', 'LIMIT', 0, 1)[2]
  local score = (tonumber(behind) or (ARGV[6] == '1' and -2 ^ 40 or 0)) + 1
  redis.call('ZADD', KEYS[2], string.format('%.0f', score), address .. me)
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  mine = grant(me, lease)
else
  grant()
  if redis.call('EXISTS', KEYS[2]) == 0 and fits(me) then
    hold(me, lease)
    mine = true
  end
end
settle(KEYS[1])
if not mine then
  return queued(redis.call('ZRANK', KEYS[2], address .. me))
end
return granted(fence, kept, redis.call('ZCARD', KEYS[2]))
