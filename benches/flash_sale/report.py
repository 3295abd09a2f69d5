"""The results of a flash sale: an `Outcome` for each rival, judged, as a table and as JSON. No I/O.

A sale is fine if its books balance, nothing failed, no worker died and no lock key is left; `findings` says what is
not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..measures import jain, percentile
from .shop import Books

SCHEMA = 1  # of the JSON document; a change that could break a reader counts up

JSON_SHAPE = """\
The --json document, schema 1; what could not be measured is null:
  schema, kind ("flash-sale"), ok, fastlock, implementation, python, redis_py,
  server (what it says of itself), parameters, and runs, with for each rival:
    rival, ok, stopped (why it ended early, or null), findings (what is wrong),
    initial, sold, left, oversold, beyond_stock, seconds, per_second,
    wait: count, p50, p99, max (in seconds; of all locks that were waited for)
    fairness: buyers, jain, min, max (purchases of a buyer)
    errors: by class, count and example; lock_keys_left"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One rival's sale. Times are in seconds."""

    rival: str
    books: Books
    buyers: int
    began: float | None  # time.monotonic() when the buyers started; None if they never did
    waits: Sequence[float]  # in rising order
    errors: Counter[str]
    examples: dict[str, str]
    keys_left: int | None  # None: the server did not answer
    stopped: str | None  # why it ended before everything was sold, if it did
    accidents: tuple[str, ...]  # workers that died and the like

    @property
    def seconds(self) -> float:
        """Seconds from the start of the buyers to the last order."""
        return 0.0 if self.began is None or self.books.last is None else self.books.last - self.began

    @property
    def findings(self) -> list[str]:
        """All that is wrong with this sale, in words; empty if nothing is."""
        books = self.books
        return [
            *([f"{books.oversold} orders took nothing from the stock"] if books.oversold else []),
            *([f"{books.beyond} orders beyond the stock of {books.initial}"] if books.beyond else []),
            *(f"{count} x {kind}: {self.examples.get(kind, '')}" for kind, count in sorted(self.errors.items())),
            *([f"{self.keys_left} lock keys left behind"] if self.keys_left else []),
            *(["the lock keys could not be checked"] if self.keys_left is None else []),
            *self.accidents,
        ]

    @property
    def ok(self) -> bool:
        """True if nothing is wrong; a sale that the user stopped can be fine."""
        return not self.findings


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The "runs" entry of `outcome`; see `JSON_SHAPE`."""
    books, waits, counts = outcome.books, outcome.waits, _counts(outcome)
    return {
        "rival": outcome.rival,
        "ok": outcome.ok,
        "stopped": outcome.stopped,
        "findings": outcome.findings,
        "initial": books.initial,
        "sold": books.orders,
        "left": books.left,
        "oversold": books.oversold,
        "beyond_stock": books.beyond,
        "seconds": outcome.seconds,
        "per_second": books.orders / outcome.seconds if outcome.seconds else None,
        "wait": {
            "count": len(waits),
            "p50": percentile(waits, 0.50),
            "p99": percentile(waits, 0.99),
            "max": waits[-1] if waits else None,
        },
        "fairness": {"buyers": outcome.buyers, "jain": jain(counts), "min": min(counts), "max": max(counts)},
        "errors": {kind: {"count": n, "example": outcome.examples.get(kind)} for kind, n in outcome.errors.items()},
        "lock_keys_left": outcome.keys_left,
    }


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Rows of cells: a heading row with the rivals, then one row for each thing that was measured."""
    runs = [as_json(outcome) for outcome in outcomes]
    rows = [["", *(run["rival"] for run in runs)]]
    rows += [[label, *(_whole(run[key]) for run in runs)] for label, key in _COUNTS]
    rows.append(["purchases/s", *(_number(run["per_second"]) for run in runs)])
    rows += [
        [f"wait {which}, ms", *(_number(run["wait"][which], 1000.0) for run in runs)] for which in ("p50", "p99", "max")
    ]
    rows.append(["fairness (Jain)", *(_number(run["fairness"]["jain"], digits=3) for run in runs)])
    rows.append(["min/max per buyer", *(f"{run['fairness']['min']}/{run['fairness']['max']}" for run in runs)])
    rows.append(["errors", *(str(sum(outcome.errors.values())) for outcome in outcomes)])
    rows.append(["lock keys left", *(_whole(run["lock_keys_left"]) for run in runs)])
    rows.append(["books", *(_verdict(outcome) for outcome in outcomes)])
    return rows


_COUNTS = (("sold", "sold"), ("left", "left"), ("oversold", "oversold"), ("beyond the stock", "beyond_stock"))


def _counts(outcome: Outcome) -> list[int]:
    """The number of purchases of each buyer, also of those with none."""
    bought = list(outcome.books.by_buyer.values())
    return bought + [0] * (outcome.buyers - len(bought))


def _whole(value: int | None) -> str:
    return "?" if value is None else str(value)


def _number(value: float | None, factor: float = 1.0, digits: int = 1) -> str:
    return "-" if value is None else f"{value * factor:,.{digits}f}"


def _verdict(outcome: Outcome) -> str:
    if not outcome.books.balanced:
        return "WRONG"
    return "balance" if outcome.stopped is None else outcome.stopped
