-- Acquire a lock together with a fencing token: greater than every one given for this name before, also after the
-- counter was lost (restart, failover, expiry), because it never falls behind the server's clock.
-- KEYS     1: name, 2: counter
-- ARGV     1: token, 2: lease in milliseconds, 0 = without end, 3: how long the counter is kept after its last use, in
--          milliseconds
-- returns  {nil, fence}: acquired; {token, fence}: held by token, fence is its holder's (an acquire that is sent again
--          gets its own back)
-- cost     4 commands
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
-- These may be refused, so they come before SET
local last, time = tonumber(redis.call('GET', KEYS[2]) or 0) or 0, redis.call('TIME')
local acquired
if ARGV[2] == '0' then
  acquired = redis.call('SET', KEYS[1], ARGV[1], 'NX')
else
  acquired = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
end
if not acquired then
  return {redis.call('GET', KEYS[1]), last}
end
local fence = math.max(last + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', ARGV[3])
return {false, fence}
