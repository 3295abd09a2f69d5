"""The flash sale: many processes buy from one stock under a lock, and the books are audited afterwards.

`command` runs the sales, `shop` holds the stock, `buyers` is what a worker process runs, `workers` the parent's end
of those processes, `report` the results. Only the standard library, redis-py and fastlock are needed: the command
`fastlock flash-sale` runs where the other libraries of the benches are not installed.
"""
