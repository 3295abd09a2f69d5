-- Tell all that is known of a name.
-- KEYS     1: name; 2: queue; 3: counter of fences; 4: size of a semaphore
-- ARGV     none
-- returns  {type of the key, milliseconds since 1970, time left in milliseconds (-1: without end, -2: no such key),
--          the holders: the token, or a list of tokens, each followed by the end of its lease; the queue: a list of
--          channels, each with an entry; the last fence, or nil; the size, or nil}
-- cost     7 commands
local type = redis.call('TYPE', KEYS[1]).ok
local holders = {}
if type == 'string' then
  holders = {redis.call('GET', KEYS[1])}
elseif type == 'zset' then
  holders = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
end
local queue = redis.call('ZRANGE', KEYS[2], 0, -1)
return {type, clock(), redis.call('PTTL', KEYS[1]), holders, queue, redis.call('GET', KEYS[3]), redis.call('GET', KEYS[4])}
