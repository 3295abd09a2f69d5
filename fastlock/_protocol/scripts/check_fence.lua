-- Refuse a write by a holder whose lock another one has had since: by its fence, which is older.
-- KEYS     1: the resource, 2: the newest fence that wrote it
-- ARGV     1: fence, 2: how long the newest fence is kept after its last use, in milliseconds, 3: value to set (only if
--          the resource is to be set), 4: its time to live in milliseconds (only if it has one)
-- returns  nil: accepted; else the newest fence, as a string
-- cost     2 commands, 3 where the resource is set
local newest = redis.call('GET', KEYS[2])
if newest and tonumber(newest) > tonumber(ARGV[1]) then
  return newest
end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
if ARGV[4] then
  redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
elseif ARGV[3] then
  redis.call('SET', KEYS[1], ARGV[3])
end
return false
