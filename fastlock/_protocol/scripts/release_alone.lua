-- Beginning of other scripts: release a name that several may hold, where nobody else holds it and nobody waits. It
-- stands before their parts, as to define those costs more than this.
-- KEYS     1: name; 2: queue
-- ARGV     1: token
-- returns  1: released; 0: the name is of another kind; nothing: the script goes on, with `dropped`
-- cost     2 commands, 4 of a semaphore
local dropped = redis.pcall('ZREM', KEYS[1], ARGV[1])
if type(dropped) == 'table' then
  return string.find(dropped.err, 'WRONGTYPE', 1, true) and 0 or dropped
end
if dropped == 1 then
  local permits = string.match(ARGV[1], '|s(%d+)/')
  if permits and tonumber(redis.call('ZINCRBY', KEYS[1], permits, '|used')) == 0 then
    redis.call('DEL', KEYS[1])
  end
  if redis.call('EXISTS', KEYS[1], KEYS[2]) == 0 then
    return 1
  end
end
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
