-- Part of other scripts: tell a waiter that its entry was granted the name.
-- KEYS     none
-- ARGV     none
-- returns  split(member): the channel and the entry of a member of the queue; subscribers_of(channel): how many there
--          are, nil = that may not be asked; publish(channel, entry): whether the entry's client is there; MOMENT: for so long it is granted the name, in which it has to confirm that
-- cost     2 commands (3 where the user may not ask for subscribers)
local MOMENT = 1000 -- milliseconds
local CHANNEL_SIZE = 41 -- bytes of a channel's name, which stands before the entry in a member of the queue
local function split(member)
  return string.sub(member, 1, CHANNEL_SIZE), string.sub(member, CHANNEL_SIZE + 1)
end
local function subscribers_of(channel)
  return redis.pcall('PUBSUB', 'NUMSUB', channel)[2]
end
local function publish(channel, entry)
  local subscribers = subscribers_of(channel)
  if subscribers == 0 then
    return false
  end
  local receivers = redis.pcall('PUBLISH', channel, entry) -- it also counts subscribers to patterns
  return subscribers or receivers ~= 0 -- if PUBLISH is refused, the waiter rechecks by itself
end
