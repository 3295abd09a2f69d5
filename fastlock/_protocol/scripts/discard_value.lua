-- Discard a value, also one that is being made now: that will not be kept.
-- KEYS     1: key of the value, 2: its version, 3: name of the lock under which it is made
-- ARGV     1: how long the version is kept, in milliseconds
-- returns  1: there was a value; 0: there was none. An error: WRONGKIND and what the key holds
-- cost     3 commands, 5 while the value is being made
local wrong = no_value(KEYS[1])
if wrong then
  return wrong
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  redis.call('INCR', KEYS[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[1])
end
return redis.call('DEL', KEYS[1])
