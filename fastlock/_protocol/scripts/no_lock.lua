-- Part of other scripts: a value must not take the place of a lock, or of anything else that is no value.
-- KEYS     none
-- ARGV     none
-- returns  no_value(key): an error reply if the key holds something that is no value; else nil
-- cost     1 command
local function no_value(key)
  local start = redis.pcall('GETRANGE', key, 0, 35)
  if type(start) == 'table' then
    local other = string.find(start.err, 'WRONGTYPE', 1, true)
    return other and redis.error_reply('WRONGKIND a lock, or something else that is no value') or start
  end
  return #start == 35 and string.find(start, '^fl[:+]%x+$') and redis.error_reply('WRONGKIND a lock') or nil
end
