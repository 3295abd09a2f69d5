-- Beginning of other scripts: release several locks, if nobody waits for any of them. It stands before their parts, as
-- to define those costs more than this.
-- KEYS     1..n: names, n+1..2n: their queues
-- ARGV     1..n: their tokens
-- returns  a list of 1; nothing: the script goes on
-- cost     2 commands; 1 where it goes on
local names = { unpack(KEYS, 1, #ARGV) }
local held, mine_all, ones = redis.call('MGET', unpack(names)), true, {}
for i = 1, #ARGV do
  mine_all, ones[i] = mine_all and held[i] == ARGV[i], 1
end
if mine_all then -- a token that somebody waits for would be a contended one
  redis.call('DEL', unpack(names))
  return ones
end
