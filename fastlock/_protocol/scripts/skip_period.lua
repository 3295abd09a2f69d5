-- Claim the current period of a job for no run at all, as an earlier run went on into it.
-- KEYS     1: name of the lock, 2: end of the last period that was claimed
-- ARGV     1: token of that run, 2: period in milliseconds
-- returns  {1, left}: claimed, the period ends in so many milliseconds; {0, left}: the lock is not the run's any more
-- cost     3 commands, 4 when claimed
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local time, period = redis.call('TIME'), tonumber(ARGV[2])
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = period - now % period
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' or not mine(held, ARGV[1]) then
  return {0, left}
end
if (tonumber(redis.call('GET', KEYS[2]) or 0) or 0) < now + left then
  redis.call('SET', KEYS[2], string.format('%.0f', now + left), 'PX', string.format('%.0f', left + 2 * period))
end
return {1, left}
