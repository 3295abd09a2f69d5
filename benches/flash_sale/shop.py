"""The shop of the flash sale: a stock and its orders in one SQLite file, and the audit of its books.

The race is real and lives here: a purchase reads the stock in one statement, and later writes "what I read, minus one"
with its order row in a transaction of its own. Nothing spans both, so SQLite never puts two purchases in order; only a
lock round the whole purchase does. No locks, no Redis and no threads in this file.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

BUSY_SECONDS = 60.0  # without a lock many writers queue up at SQLite; that is a wait, not an error

SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE stock (sku INTEGER PRIMARY KEY, pieces INTEGER NOT NULL);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    sku INTEGER NOT NULL,
    buyer TEXT NOT NULL,
    at REAL NOT NULL -- time.monotonic(), which all processes of one machine share
);
"""


def open_shop(path: str, *, skus: int, stock: int) -> None:
    """Make the file of a fresh shop with `stock` pieces of each of `skus` articles."""
    with closing(_connect(path)) as db:
        db.executescript(SCHEMA)
        db.executemany("INSERT INTO stock VALUES (?, ?)", ((sku, stock) for sku in range(skus)))


class Shop:
    """One connection to a shop, for one thread or for all tasks of one event loop; close it."""

    def __init__(self, path: str) -> None:
        self._db = _connect(path)

    def stock(self, sku: int) -> int:
        """Pieces left of `sku`, read in a statement of its own: no transaction stays open behind it."""
        (pieces,) = self._db.execute("SELECT pieces FROM stock WHERE sku = ?", (sku,)).fetchone()
        return int(pieces)

    def sell(self, sku: int, pieces: int, buyer: str) -> None:
        """Write `pieces` as the new stock of `sku` and an order of `buyer`, both or neither."""
        with self._transaction():
            self._db.execute("UPDATE stock SET pieces = ? WHERE sku = ?", (pieces, sku))
            self._db.execute("INSERT INTO orders (sku, buyer, at) VALUES (?, ?, ?)", (sku, buyer, time.monotonic()))

    def progress(self) -> tuple[int, int]:
        """Orders written and pieces left so far, cheap enough to be read while the sale runs."""
        (orders,) = self._db.execute("SELECT coalesce(max(id), 0) FROM orders").fetchone()
        (left,) = self._db.execute("SELECT sum(pieces) FROM stock").fetchone()
        return int(orders), int(left)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # IMMEDIATE: the write lock is taken at once and waited for, where a deferred one could fail half way.
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


@dataclass(frozen=True, slots=True)
class Books:
    """What the shop's file says after a sale."""

    initial: int  # pieces at the start, all articles
    left: int  # pieces at the end
    orders: int  # rows of orders
    oversold: int  # orders that took nothing from the stock: orders - (initial - left), summed by article
    beyond: int  # orders beyond the pieces there ever were
    by_buyer: dict[str, int]  # orders of each buyer that has any
    last: float | None  # time.monotonic() of the last order

    @property
    def balanced(self) -> bool:
        """True if every piece that went is an order and every order is a piece that went."""
        return self.oversold == 0 and self.beyond == 0


def audit(path: str, *, stock: int) -> Books:
    """Read the books of a shop that was opened with `stock` pieces of each article."""
    with closing(_connect(path)) as db:
        left = dict(db.execute("SELECT sku, pieces FROM stock"))
        sold = dict(db.execute("SELECT sku, count(*) FROM orders GROUP BY sku"))
        by_buyer = dict(db.execute("SELECT buyer, count(*) FROM orders GROUP BY buyer"))
        (last,) = db.execute("SELECT max(at) FROM orders").fetchone()
    return Books(
        initial=stock * len(left),
        left=sum(left.values()),
        orders=sum(sold.values()),
        # By article and without a sign, so that one article's gap cannot hide another's.
        oversold=sum(abs(sold.get(sku, 0) - (stock - pieces)) for sku, pieces in left.items()),
        beyond=sum(max(0, sold.get(sku, 0) - stock) for sku in left),
        by_buyer=by_buyer,
        last=last,
    )


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    # The file lives as long as the sale: what is measured is the lock, not the disk.
    db.execute("PRAGMA synchronous = OFF")
    return db
