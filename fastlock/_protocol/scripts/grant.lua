-- Part of other scripts: grant a free name to the first entry in the queue whose client is still there.
-- KEYS     1: name, 2: queue
-- ARGV     none
-- returns  grant(me): whether an entry got it, of those before `me` if that is given. It gets the name for
--          its moment only, in which its client has to look. false: the caller sets or deletes the name. The message is the entry, and a fence behind '#' if it
--          wants one; it is none where the counter is gone or may not be used here, as its client asks for one then.
-- cost     5 commands, 2 more for a fence, and 2 for each entry whose client is gone (3 where the user may not ask for
--          subscribers)
local FENCE_KEPT = 3600000 -- milliseconds
local function next_fence()
  local counter = 'fastlock:fence:' .. string.sub(KEYS[2], #'fastlock:queue:' + 1) -- in the slot of the queue, too
  local last = redis.pcall('GET', counter)
  local fence = type(last) == 'string' and tonumber(last) and string.format('%.0f', last + 1)
  if fence and not redis.pcall('SET', counter, fence, 'PX', FENCE_KEPT).err then
    return '#' .. fence
  end
  return ''
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
    local channel, entry, moment, fenced = split(first)
    local subscribers = subscribers_of(channel)
    if subscribers ~= 0 then -- the message is the last of all: who gets it believes it
      local contended = can_be_contended(entry) and redis.call('ZCARD', KEYS[2]) > 0
      redis.call('SET', KEYS[1], contended and as_contended(entry) or entry, 'PX', moment)
      if send(channel, fenced and entry .. next_fence() or entry) or subscribers then
        return true
      end
    end
  end
end
