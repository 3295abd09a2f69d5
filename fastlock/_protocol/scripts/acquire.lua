-- Acquire a lock where SET takes no NX with GET (before Redis 7.0).
-- KEYS     1: name
-- ARGV     1: token, 2: lease in milliseconds, 0 = without end
-- returns  nil: acquired; else the holder's token (the caller's own: it acquired before, and that reply was lost)
-- cost     1 command when free, 2 when held
local acquired
if ARGV[2] == '0' then
  acquired = redis.call('SET', KEYS[1], ARGV[1], 'NX')
else
  acquired = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
end
if acquired then
  return false
end
return redis.pcall('GET', KEYS[1]) -- an error reply if the key holds something that is no lock
