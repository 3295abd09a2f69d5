-- Part of other scripts: when the leases of a name end that several may hold, a zset of tokens by those times.
-- KEYS     none
-- ARGV     none
-- returns  begin(name): write nothing, by a command that is never refused memory: those that follow are not either;
--          clock(): milliseconds since 1970; end_in(ms): the time in so many milliseconds, as a score, 0 = never;
--          settle(name): let the key live as long as the longest lease, or delete it where nobody holds it any more;
--          other_form(token): a writer's token as the reader's that it becomes by a downgrade, and the reverse: the
--          holder may not know yet whether the downgrade was executed
-- cost     1 command for the first `clock`, 2 for `settle`
local USED = '|used' -- a member of a semaphore: its score is minus the number of permits that are held
local function begin(name)
  redis.call('ZREM', name, '')
end
local CLOCK = {} -- the time, once it was asked
local function clock()
  if not CLOCK.now then
    local time = redis.call('TIME')
    CLOCK.now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return CLOCK.now
end
local function end_in(ms)
  return tonumber(ms) == 0 and 'inf' or string.format('%.0f', clock() + ms + 1)
end
local function settle(name)
  local last = redis.call('ZRANGE', name, -1, -1, 'WITHSCORES')
  if last[1] == USED then
    redis.call('DEL', name)
  elseif last[2] == 'inf' then
    redis.call('PERSIST', name)
  elseif last[1] then
    redis.call('PEXPIREAT', name, last[2])
  end
end
local function other_form(token)
  local mode = ({ ['|w'] = 'r', ['|r'] = 'w' })[string.sub(token, -2)]
  return mode and string.sub(token, 1, -2) .. mode
end
