-- Part of other scripts: tell a waiter that its entry was granted the name.
-- KEYS     none
-- ARGV     none
-- A member of the queue is the channel of a client, its moment (how many milliseconds it has to confirm a grant) as four
--          digits, 'f' if it wants a fence, else '-', and an entry; all but the last are the entry's address
-- returns  split(member): channel, entry, moment, whether it wants a fence; subscribers_of(channel): how many there
--          are, nil = that may not be asked; send(channel, message): whether anybody may have got it, also by a
--          pattern; publish(channel, message): the same, if the entry's client is there
-- cost     2 commands (3 where the user may not ask for subscribers)
local CHANNEL_SIZE = 41 -- bytes
local ADDRESS_SIZE = 46 -- bytes
local function split(member)
  local moment = tonumber(string.sub(member, CHANNEL_SIZE + 1, ADDRESS_SIZE - 1))
  local fenced = string.sub(member, ADDRESS_SIZE, ADDRESS_SIZE) == 'f'
  return string.sub(member, 1, CHANNEL_SIZE), string.sub(member, ADDRESS_SIZE + 1), moment, fenced
end
local function subscribers_of(channel)
  return redis.pcall('PUBSUB', 'NUMSUB', channel)[2]
end
local function send(channel, message)
  return redis.pcall('PUBLISH', channel, message) ~= 0 -- if it is refused, the waiter rechecks by itself
end
local function publish(channel, message)
  local subscribers = subscribers_of(channel)
  return subscribers ~= 0 and (send(channel, message) or subscribers)
end
