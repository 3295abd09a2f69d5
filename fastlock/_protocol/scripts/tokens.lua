-- Part of other scripts: plain tokens, and contended ones, which tell their holder that somebody waits.
-- KEYS     none
-- ARGV     none
-- returns  markable(token): whether it can become contended; marked(token): the token as a contended one;
--          mine(held, token): whether the value `held` is this token, plain or contended
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
