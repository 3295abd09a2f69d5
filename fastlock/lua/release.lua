-- Release a lock, where the server has no compare-and-delete of its own.
-- KEYS     1: name
-- ARGV     1: token
-- returns  1: released; 0: somebody else's, nobody's, or not a lock
-- cost     2 commands
if redis.pcall('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
