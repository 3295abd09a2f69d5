-- Part of other scripts: tell a waiter that its entry was granted the name.
-- KEYS     none
-- ARGV     none
-- A member of the queue is the channel of a client, its moment (how many milliseconds it has to confirm a grant) as four
--          digits, and an entry; the first two are the entry's address
-- returns  split(member): the channel, the entry and the moment; subscribers_of(channel): how many there are, nil =
--          that may not be asked; publish(channel, entry): whether the entry's client is there
-- cost     2 commands (3 where the user may not ask for subscribers)
local CHANNEL_SIZE = 41 -- bytes
local ADDRESS_SIZE = 45 -- bytes
local function split(member)
  local moment = tonumber(string.sub(member, CHANNEL_SIZE + 1, ADDRESS_SIZE))
  return string.sub(member, 1, CHANNEL_SIZE), string.sub(member, ADDRESS_SIZE + 1), moment
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
