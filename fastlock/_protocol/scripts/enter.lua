-- Acquire a contended lock, or join its queue; or look what became of an entry that has joined, and confirm a grant.
-- KEYS     1: name, 2: queue, 3: counter of fences (only if a fence is wanted)
-- ARGV     1: entry, which becomes the holder's token; 2: its address; 3: lease in milliseconds, 0 = without end; 4: how
--          long the queue is kept after its last use, in milliseconds; 5: the same of the counter; 6: '1' = it joins,
--          once in its life; '0' = it looks: nothing is queued or taken for an entry that is not there any more; '2' =
--          it looks as one that holds already: a lease whose end was moved since the grant stays as it is
-- returns  {1, waiting, fence}: acquired, so many others wait; {0, left, contended, ahead}: queued behind so many, the
--          holder's lease has so many milliseconds left (-1: without end), contended = 1: the holder's token is
--          contended now, 0: it cannot be; {-1, 0, 0}: the entry is not there any more
--          The client that keeps a lease is told that somebody waits
-- cost     5 commands when it was granted before, 6 or 7 when acquired (3 more for a fence), 9 when queued, 6 again; 1
--          more where the lease is a kept one
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local me = ARGV[2] .. ARGV[1]
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' then
  return held -- an error reply if the key holds something that is no lock
end
local granted = mine(held, ARGV[1])
local ahead = not granted and redis.call('ZRANK', KEYS[2], me)
if not granted and not ahead and ARGV[6] ~= '1' then
  return {-1, 0, 0}
end
if granted or (not held and not grant(me)) then
  local fence = 0
  if KEYS[3] then -- these may be refused, so they come before any write: nobody would know of a lock written before
    local time = redis.call('TIME')
    fence = math.max((tonumber(redis.call('GET', KEYS[3]) or 0) or 0) + 1, time[1] * 1000000 + time[2])
  end
  redis.call('ZREM', KEYS[2], me) -- also if it is not in there: a script that has begun to write is not refused memory
  local waiting, value = redis.call('ZCARD', KEYS[2]), ARGV[1]
  if waiting > 0 and can_be_contended(value) then
    value = as_contended(value)
  end
  local left = granted and ARGV[6] == '2' and redis.call('PTTL', KEYS[1])
  local _, _, moment = split(me)
  if left and (left == -1 or left > moment) then
    redis.call('SET', KEYS[1], value, 'KEEPTTL')
  elseif ARGV[3] == '0' then
    redis.call('SET', KEYS[1], value)
  else
    redis.call('SET', KEYS[1], value, 'PX', ARGV[3])
  end
  if KEYS[3] then
    redis.call('SET', KEYS[3], string.format('%.0f', fence), 'PX', ARGV[5])
  end
  return {1, waiting, fence}
end
if not ahead then
  redis.call('ZREM', KEYS[2], me) -- it is not in there: a user that may not acquire what is granted is not to join
  local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
  ahead = redis.call('ZCARD', KEYS[2])
  redis.call('ZADD', KEYS[2], (tonumber(last or 0) or 0) + 1, me)
end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
held = redis.call('GET', KEYS[1])
local contended = can_be_contended(held)
if contended then
  redis.call('SET', KEYS[1], as_contended(held), 'KEEPTTL')
end
contended = contended or can_be_contended(string.sub(held, 1, 2) .. ':' .. string.sub(held, 4))
if contended then
  recall(held)
end
return {0, redis.call('PTTL', KEYS[1]), contended and 1 or 0, ahead}
