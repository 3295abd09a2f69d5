-- Claim the current period of a job, by the server's clock, and acquire the job's lock for its run. Sent again by the
-- same token it confirms the claim.
-- KEYS     1: name of the lock, 2: end of the last period that was claimed, 3: counter of fences
-- ARGV     1: token, 2: lease in milliseconds, 3: period in milliseconds, 4: how long the counter is kept after its last
--          use, in milliseconds, 5: the time before which nothing is claimed, in milliseconds
-- returns  {1, left, fence}: claimed, the period ends in so many milliseconds, or has ended since (0); {0, wait, 0}: it
--          was claimed before, or somebody holds the lock: ask again in so many milliseconds
-- cost     3 commands when it was claimed before, 4 when the lock is held, 7 when claimed
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' then
  return held -- an error reply if the key holds something that is no lock
end
local time, period = redis.call('TIME'), tonumber(ARGV[3])
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = period - now % period
if mine(held, ARGV[1]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  left = math.max(0, math.min(left, (tonumber(redis.call('GET', KEYS[2]) or 0) or 0) - now)) -- of the period claimed
  return {1, left, tonumber(redis.call('GET', KEYS[3]) or 0) or 0}
end
if now < tonumber(ARGV[5]) then
  return {0, ARGV[5] - now, 0}
end
-- A claim that ends later than any of this period and the next was made before the clock was set back, or the period cut
local ahead = (tonumber(redis.call('GET', KEYS[2]) or 0) or 0) - now
if ahead > 0 and ahead <= 2 * period then
  return {0, left, 0}
end
if held then
  local ends = redis.call('PTTL', KEYS[1])
  return {0, ends >= 0 and math.min(left, ends + 1) or left, 0}
end
local fence = math.max((tonumber(redis.call('GET', KEYS[3]) or 0) or 0) + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[3], string.format('%.0f', fence), 'PX', ARGV[4])
redis.call('SET', KEYS[2], string.format('%.0f', now + left), 'PX', string.format('%.0f', left + 2 * period))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {1, left, fence}
