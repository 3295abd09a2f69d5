-- Beginning of other scripts: acquire several locks of which nobody holds any. It stands before their parts, as to
-- define those costs more than this.
-- KEYS     1..n: names
-- ARGV     1..n: their tokens, n+1: lease in milliseconds, 0 = without end
-- returns  {0, nil, 0}; nothing: the script goes on
-- cost     1 command, and 1 a name; 1 where somebody holds one of them
if redis.call('EXISTS', unpack(KEYS)) == 0 then
  for i, name in ipairs(KEYS) do
    if ARGV[#KEYS + 1] == '0' then
      redis.call('SET', name, ARGV[i])
    else
      redis.call('SET', name, ARGV[i], 'PX', ARGV[#KEYS + 1])
    end
  end
  return {0, false, 0}
end
