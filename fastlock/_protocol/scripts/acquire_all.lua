-- Acquire several locks, all or none. Sent again, it gives a new lease to what the caller holds already.
-- KEYS     1..n: names, in the order in which they are waited for
-- ARGV     1..n: their tokens, n+1: lease in milliseconds, 0 = without end, n+2: 1 = where somebody else holds one of
--          them, acquire those before it all the same, 0 = acquire none
-- returns  {0, nil, 0}: all acquired; {i, token, left}: the i-th is the first that somebody else holds, by this token,
--          and its lease has so many milliseconds left (-1: without end); {i, nil, 0}: it holds something that is no lock
-- cost     1 command, and 1 a name, where all are free; else 2 a name. (MSETEX takes 1 in all, but does not
--          say which of them is held)
local values, last, blocked = {}, #KEYS, {0, false, 0}
for i, name in ipairs(KEYS) do
  local held = redis.pcall('GET', name)
  if type(held) == 'table' then
    if not string.find(held.err, 'WRONGTYPE', 1, true) then
      return held
    end
    return {i, false, 0}
  end
  if held and not mine(held, ARGV[i]) then
    last, blocked = i - 1, {i, held, redis.call('PTTL', name)}
    break
  end
  values[i] = held or ARGV[i] -- a contended token stays one
end
if last < #KEYS and ARGV[#KEYS + 2] == '0' then
  return blocked
end
for i = 1, last do
  if ARGV[#KEYS + 1] == '0' then
    redis.call('SET', KEYS[i], values[i])
  else
    redis.call('SET', KEYS[i], values[i], 'PX', ARGV[#KEYS + 1])
  end
end
return blocked
