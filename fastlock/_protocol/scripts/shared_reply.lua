-- Part of other scripts: what somebody is told who wants a name that several may hold.
-- KEYS     1: name; 2: queue; 3: of a read-write lock: the counter of fences, if a fence is wanted
-- ARGV     those of the script
-- returns  next_fence(token): it, or 0; granted(fence, kept, waiting): the reply that the name was granted; queued(ahead):
--          that it was not, behind so many
-- cost     2 commands for each function
local function next_fence(token) -- these may be refused, so they come before any write
  if mode(token) == 's' or not KEYS[3] then
    return 0
  end
  local last, time = tonumber(redis.call('GET', KEYS[3]) or 0) or 0, redis.call('TIME')
  return math.max(last + 1, time[1] * 1000000 + time[2])
end
local function granted(fence, kept, waiting)
  if fence > 0 then
    redis.call('SET', KEYS[3], string.format('%.0f', fence), 'PX', kept)
  end
  return {1, waiting, fence}
end
local SOON = 200 -- milliseconds until who cannot hold the name, though nobody does, asks again
local function queued(ahead) -- with the time until the first lease ends
  local first = redis.call('ZRANGEBYSCORE', KEYS[1], '(0', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  return {0, first == 'inf' and -1 or first and math.max(0, first - clock()) or SOON, 1, ahead or 0}
end
