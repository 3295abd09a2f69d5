-- Part of other scripts: tokens, and the form in which a token tells its holder that somebody waits.
-- KEYS     none
-- ARGV     none
-- returns  markable(token); marked(token); mine(held, token): whether a name that is held so is held by this token
-- cost     no command
local function markable(token)
  return #token == 35 and string.sub(token, 1, 3) == 'fl:'
end
local function marked(token)
  return 'fl+' .. string.sub(token, 4)
end
local function mine(held, token)
  return held == token or (held and markable(token) and held == marked(token))
end
