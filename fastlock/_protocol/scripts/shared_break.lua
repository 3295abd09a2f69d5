-- Take a name that several may hold away from some of its holders, and grant it to those whom it fits now.
-- KEYS     1: name; 2: queue; 3: size of a semaphore
-- ARGV     1..n: the holders' tokens
-- returns  a list of 1 (it held the name) and 0 (it did not any more), in order
-- cost     6 commands, 2 for each holder, and those of the grant
redis.replicate_commands() -- Redis 6.2 needs it to write after TIME; since 7.0 it changes nothing
local broken, shared = {}, redis.call('TYPE', KEYS[1]).ok == 'zset'
for i, token in ipairs(ARGV) do
  local other = other_form(token)
  broken[i] = shared and (drop(token) or (other and drop(other))) and 1 or 0
end
if shared then
  drop_ended()
  grant()
  settle(KEYS[1])
end
return broken
