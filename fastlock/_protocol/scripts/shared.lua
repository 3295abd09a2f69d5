-- Part of other scripts: a name that several may hold at once (read-write lock, semaphore), and whom it is granted to.
-- KEYS     1: name, a zset of tokens by the end of their leases in milliseconds; 2: queue; 3: of a semaphore: its size
-- ARGV     none
-- A token  is `fl:`, 32 hexadecimal digits, `|`, a mode: `r` (reads), `w` (writes), or `s` and, as `2/5`, how many
--          permits of how many
-- returns  other_kind(token): an error reply, if the name is of another kind than the token; hold(token, ms): give it a
--          lease of so many milliseconds from now, 0 = without end; drop(token): whether it held the name, and does no
--          more; drop_ended(); fits(token): whether it can hold the name beside those who do; grant(me, ms): grant the
--          name to those of the queue whom it fits, in order; whether `me` is among them, with a lease of `ms`
-- cost     3 commands each, and for each entry that is granted the name 6
local MODES = { r = 'a read-write lock', w = 'a read-write lock', s = 'a semaphore' }
local function mode(token)
  return token == USED and 's' or string.sub(token, 37, 37)
end
local function count(token)
  return tonumber(string.match(token, '(%d+)/%d+$'))
end
local function size(token)
  return tonumber(redis.call('GET', KEYS[3]) or string.match(token, '%d+$'))
end
local function other_kind(token)
  local first = redis.pcall('ZRANGE', KEYS[1], 0, 0)
  if first.err then
    local plain = string.find(first.err, 'WRONGTYPE', 1, true) and redis.call('TYPE', KEYS[1]).ok == 'string'
    return plain and redis.error_reply('WRONGKIND a lock') or first
  end
  local found = first[1] and (MODES[mode(first[1])] or 'something else')
  return found and found ~= MODES[mode(token)] and redis.error_reply('WRONGKIND ' .. found)
end
local function hold(token, ms)
  local added = redis.call('ZADD', KEYS[1], end_in(ms), token)
  if added == 1 and mode(token) == 's' then
    redis.call('ZINCRBY', KEYS[1], -count(token), USED)
  end
end
local function drop(token)
  local dropped = redis.call('ZREM', KEYS[1], token) == 1
  if dropped and mode(token) == 's' then
    redis.call('ZINCRBY', KEYS[1], count(token), USED)
  end
  return dropped
end
local function drop_ended()
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', clock())) do
    drop(token)
  end
end
local function knows_size() -- a script on a read-write lock has a counter of fences there, or nothing
  return KEYS[3] and string.find(KEYS[3], 'fastlock:size:', 1, true) == 1
end
local function fits(token)
  local first = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if first and MODES[mode(first)] ~= MODES[mode(token)] then
    return false
  end
  if mode(token) == 's' then
    return knows_size() and count(token) - (redis.call('ZSCORE', KEYS[1], USED) or 0) <= size(token)
  end
  return not first or (mode(token) == 'r' and mode(first) == 'r')
end
local function grant(me, ms)
  local mine = false
  while true do
    local first = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
    if not first then
      return mine
    end
    local channel, entry, moment = split(first)
    local known = MODES[mode(entry)]
    local fitting = known and fits(entry)
    if known and not fitting and (entry == me or subscribers_of(channel) ~= 0) then
      return mine -- it waits, and all others behind it; a client that is gone keeps nobody waiting
    end
    redis.call('ZREM', KEYS[2], first)
    if fitting and entry == me then
      mine = true
      hold(entry, ms)
    elseif fitting and publish(channel, entry) then
      hold(entry, moment)
    end
  end
end
