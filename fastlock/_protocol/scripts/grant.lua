-- Part of other scripts: grant a free name to the first entry in the queue whose client is still there.
-- KEYS     1: name, 2: queue
-- ARGV     none
-- returns  grant(me): whether an entry got it, of those before `me` if that is given. It gets the name for
--          its moment only, in which its client has to look.
-- cost     4 commands, and 2 for each entry whose client is gone (3 where the user may not ask for subscribers)
local function grant(me)
  while true do
    if me and redis.call('ZRANGE', KEYS[2], 0, 0)[1] == me then
      return false
    end
    local first = redis.call('ZPOPMIN', KEYS[2])[1]
    if not first then
      return false
    end
    local channel, entry, moment = split(first)
    if publish(channel, entry) then
      redis.call('SET', KEYS[1], entry, 'PX', moment)
      return true
    end
  end
end
