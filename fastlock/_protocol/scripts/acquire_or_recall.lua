-- Acquire a lock; if another process keeps it, that is told that somebody wants the name, though nobody waits yet.
-- KEYS     1: name
-- ARGV     1: token, 2: lease in milliseconds
-- returns  nil: acquired; else the holder's token (the caller's own: it acquired before, and that reply was lost)
-- cost     1 command when free, 2 when held; 1 more where the lease is a kept one
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return false
end
local held = redis.pcall('GET', KEYS[1])
-- Not from a caller of the same process: it may wait there
if type(held) == 'string' and string.sub(held, 4, 19) ~= string.sub(ARGV[1], 4, 19) then
  recall(held)
end
return held -- an error reply if the key holds something that is no lock
