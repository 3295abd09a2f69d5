"""A shop that never sells more than it has: stock is read, checked and written back under a lock.

The same in threads, as under Django or Celery, and in asyncio, as in a handler of FastAPI. Try it:

    python examples/shop.py redis://localhost:6379/0
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import redis
import redis.asyncio

import fastlock
import fastlock.asyncio

ITEM, STOCK, CUSTOMERS = "fountain-pen", 20, 100


def sell_in_threads(url: str) -> int:
    """A hundred customers in sixteen threads want one of twenty. Returns how many were sold."""
    database = redis.Redis.from_url(url)
    database.set(ITEM, STOCK)

    def buy(customer: int) -> bool:
        with locks.lock(f"stock:{ITEM}", timeout=10):
            left = int(database.get(ITEM) or 0)
            if left:
                database.set(ITEM, left - 1)
            return left > 0

    with fastlock.Client.from_url(url) as locks, ThreadPoolExecutor(16) as threads, database:
        return sum(threads.map(buy, range(CUSTOMERS)))


async def sell_in_tasks(url: str) -> int:
    """The same, as a service of asyncio handles requests. Returns how many were sold."""
    async with fastlock.asyncio.Client.from_url(url) as locks, redis.asyncio.Redis.from_url(url) as database:
        await database.set(ITEM, STOCK)

        @locks.locked("stock:{item}", timeout=10)
        async def buy(item: str, customer: int) -> bool:
            left = int(await database.get(item) or 0)
            if left:
                await database.set(item, left - 1)
            return left > 0

        return sum(await asyncio.gather(*(buy(ITEM, customer) for customer in range(CUSTOMERS))))


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/0"
    print(f"{sell_in_threads(url)} of {STOCK} sold by threads, {asyncio.run(sell_in_tasks(url))} by tasks")
