-- Part of other scripts: tell the client that keeps a lease that somebody wants the name.
-- KEYS     1: name
-- ARGV     none
-- returns  recall(held): if the holder's token is one of a kept lease, it begins with 'fk', then comes the id of a process,
--          which is told "token name"; each time, as a message may be lost
-- cost     1 command where the lease is a kept one
local function recall(held)
  if #held == 35 and string.sub(held, 1, 2) == 'fk' then
    local plain = 'fk:' .. string.sub(held, 4)
    redis.pcall('PUBLISH', 'fastlock:keep:' .. string.sub(held, 4, 19), plain .. KEYS[1])
  end
end
