-- Part of other scripts: a free name goes to the first waiter whose client is still there.
-- KEYS     1: name, 2: queue
-- ARGV     none
-- returns  grant(me): whether anybody got it, of those before `me` if that is given. It is theirs for a moment only, in
--          which their client has to come and enter.
-- cost     4 commands, and 2 for each waiter whose client is gone (3 where the user may not ask for subscribers)
local MOMENT = 1000 -- milliseconds
local INBOX = 41 -- bytes of an inbox's name, before the place in an entry of the queue
local function tell(inbox, place) -- PUBLISH counts those who subscribed to patterns as well, which hear everything
  local there = redis.pcall('PUBSUB', 'NUMSUB', inbox)[2]
  if there == 0 then
    return false
  end
  local heard = redis.pcall('PUBLISH', inbox, place)
  return there or heard ~= 0 -- may it not publish, the waiter comes to look by itself
end
local function grant(me)
  while true do
    if me and redis.call('ZRANGE', KEYS[2], 0, 0)[1] == me then
      return false
    end
    local first = redis.call('ZPOPMIN', KEYS[2])[1]
    if not first then
      return false
    end
    local inbox, place = string.sub(first, 1, INBOX), string.sub(first, INBOX + 1)
    if tell(inbox, place) then
      redis.call('SET', KEYS[1], place, 'PX', MOMENT)
      return true
    end
  end
end
