-- Beginning of other scripts: acquire a name that several may hold, where nobody holds it and nobody waits. It stands
-- before their parts, as to define those costs more than this.
-- KEYS     1: name; 2: queue; 3: of a semaphore its size, of a read-write lock the counter of fences, if one is wanted
-- ARGV     1: token; 3: lease in milliseconds, 0 = without end
-- returns  {1, 0, 0}; nothing: the script goes on
-- cost     4 commands; 1 where somebody holds it
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local permits = string.match(ARGV[1], '|s(%d+)/')
if (permits or not KEYS[3]) and redis.call('EXISTS', unpack(KEYS)) == 0 then
  local time, ending = redis.call('TIME'), 'inf'
  if ARGV[3] ~= '0' then
    ending = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3] + 1)
  end
  if permits then
    redis.call('ZADD', KEYS[1], ending, ARGV[1], '-' .. permits, '|used')
  else
    redis.call('ZADD', KEYS[1], ending, ARGV[1])
  end
  if ending ~= 'inf' then
    redis.call('PEXPIREAT', KEYS[1], ending)
  end
  return {1, 0, 0}
end
