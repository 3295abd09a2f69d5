-- Keep a value for others, if the lock under which it was made is still the caller's.
-- KEYS     1: name of the lock, 2: key of the value, 3: its version (only for a value that can be discarded meanwhile)
-- ARGV     1: token, 2: value, 3: how long it is kept, in milliseconds, 4: the version that was found before the value
--          was made, empty = none
-- returns  1: kept; 2: not kept, as it was discarded meanwhile; 0: not kept, as the lock is somebody else's or nobody's.
--          An error: WRONGKIND and what the key holds
-- cost     3 commands, 4 with a version
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then
  return held
end
if not mine(held, ARGV[1]) then
  return 0
end
if KEYS[3] and (redis.call('GET', KEYS[3]) or '') ~= ARGV[4] then
  return 2
end
local wrong = no_value(KEYS[2])
if wrong then
  return wrong
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
