-- Give several held names a new lease each: plain locks, and names that several may hold.
-- KEYS     1..n: names
-- ARGV     1..n: their tokens, n+1..2n: the new leases in milliseconds
-- returns  a list of 1 (renewed), 2 (renewed, and somebody waits for it) and 0 (somebody else's, nobody's, or not a
--          lock), in order
-- cost     2 commands a name, 6 for one that several may hold
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local function renew_shared(name, token, ms)
  local score = redis.pcall('ZSCORE', name, token)
  if not score and other_form(token) then
    token = other_form(token)
    score = redis.call('ZSCORE', name, token)
  end
  if not score or type(score) == 'table' or (score ~= 'inf' and tonumber(score) <= clock()) then
    return 0
  end
  begin(name)
  redis.call('ZADD', name, end_in(ms), token)
  settle(name)
  return 1
end
local renewed = {}
for i, name in ipairs(KEYS) do
  local held = redis.pcall('GET', name)
  if type(held) == 'table' and not string.find(held.err, 'WRONGTYPE', 1, true) then
    return held
  end
  if mine(held, ARGV[i]) then
    redis.call('PEXPIRE', name, ARGV[#KEYS + i])
    renewed[i] = held == ARGV[i] and 1 or 2
  elseif type(held) == 'table' then
    renewed[i] = renew_shared(name, ARGV[i], ARGV[#KEYS + i])
  else
    renewed[i] = 0
  end
end
return renewed
