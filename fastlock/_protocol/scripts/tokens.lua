-- Part of other scripts: plain tokens, and contended ones, which tell their holder that somebody waits.
-- KEYS     none
-- ARGV     none
-- returns  can_be_contended(token): whether it can become contended; as_contended(token): the token as a contended
--          one; mine(held, token): whether the value `held` is this token, plain or contended
-- cost     no command
local function can_be_contended(token)
  local prefix = string.sub(token, 1, 3)
  return #token == 35 and (prefix == 'fl:' or prefix == 'fk:')
end
local function as_contended(token)
  return string.sub(token, 1, 2) .. '+' .. string.sub(token, 4)
end
local function mine(held, token)
  return held == token or (held and can_be_contended(token) and held == as_contended(token))
end
