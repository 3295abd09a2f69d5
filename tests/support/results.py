"""Made-up results of a benchmark: documents with every kind of scenario, for tests of what reads them.

The numbers are drawn from a seeded generator, the histograms are real ones and the percentiles beside them are theirs,
so that a document is as consistent as that of a real run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdrh.histogram import HdrHistogram

SCHEMA = "fastlock-bench/2"

RIVALS = {
    "fastlock": 4.3,
    "fallback": 2.5,
    "redis-py": 1.0,
    "redis-py asyncio": 1.02,
    "python-redis-lock": 0.61,
    "pottery": 0.22,
    "valkey-glide": 1.9,
    "pipeline": 6.2,
    "ceiling": 9.0,
}
"""All rivals, and how many times as fast as redis-py they are in these documents."""

LOCKS = [name for name in RIVALS if name not in ("pipeline", "ceiling")]
BASE_RATE = 4333.0


def histogram(values: Sequence[float]) -> str:
    """Microseconds as an encoded histogram of nanoseconds."""
    recorded = HdrHistogram(1, 60_000_000_000, 3)
    for value in values:
        recorded.record_value(max(1, int(1000 * value)))
    return str(recorded.encode(), "ascii")


def times(encoded: str) -> dict[str, float]:
    """The percentiles of a histogram, as a row states them."""
    recorded = HdrHistogram.decode(encoded)
    parts = {"p50": 50, "p90": 90, "p99": 99, "p999": 99.9, "max": 100}
    values = recorded.get_percentile_to_value_dict(list(parts.values()))
    return {name: values[part] / 1e3 for name, part in parts.items()} | {"count": recorded.get_total_count()}


def draw(rng: random.Random, middle: float, count: int, tail: float = 0.004) -> list[float]:
    """Times with a long tail around ``middle``."""
    slow = (rng.lognormvariate(3.2, 0.7) for _ in range(count))
    return [
        middle * rng.lognormvariate(0, 0.18) * (each if rng.random() < tail else 1)
        for each in slow
    ]  # fmt: skip


def spread(median: float, rng: random.Random) -> dict[str, float]:
    return {"median": median, "low": median * rng.uniform(0.88, 0.98), "high": median * rng.uniform(1.02, 1.12)}


def fairness(rng: random.Random, clients: int, unfair: float) -> dict[str, Any]:
    grants = sorted((int(1000 * rng.lognormvariate(0, unfair)) for _ in range(clients)), reverse=True)
    total, squares = sum(grants), sum(each * each for each in grants)
    return {"jain": total**2 / (clients * squares), "min_over_max": grants[-1] / grants[0], "grants": grants}


def row(rival: str, rng: random.Random, middles: Mapping[str, float], count: int = 2400, **more: Any) -> dict[str, Any]:
    """A row with a histogram for each of ``middles``, {what is timed: microseconds}."""
    speed = RIVALS[rival]
    encoded = {of: histogram(draw(rng, middle, count)) for of, middle in middles.items()}
    return {
        "rival": rival,
        "rounds": 5,
        "grants": int(5 * BASE_RATE * speed),
        "rate": spread(BASE_RATE * speed, rng),
        "ratio": {"median": 1.0, "low": 1.0, "high": 1.0} if rival == "redis-py" else spread(speed, rng),
        "noisy": 1 / 1.04 <= speed <= 1.04,
        **{f"{of}_us": times(text) for of, text in encoded.items()},
        "histograms": encoded,
        "commands_per_grant": 2.0 if speed > 1 else 3.1,
        "server_cpu_us": 38 / speed**0.7,
        "server_cpu_ratio": speed**-0.7,
        "client_cpu_us": 190 / speed,
        "connections": 16,
        "failures": 0.0,
        "timeouts": 0.0 if speed > 0.5 else 0.0123,
        "violations": 0,
        "samples": [{"grants": int(BASE_RATE * speed), "seconds": 1.0}] * 5,
        **more,
    }


def pair(rng: random.Random, title: str, slower: float = 1.0) -> dict[str, Any]:
    rows = {
        name: row(name, rng, {"latency": slower * 220 / RIVALS[name], "release": 90 / RIVALS[name]}) for name in LOCKS
    }
    rows["pipeline"] = row("pipeline", rng, {}, violations=None)
    bare = {"rival": "ceiling", "rounds": 5, "grants": 100_000, "rate": spread(BASE_RATE * 9, rng), "ratio": None}
    return {
        "title": title,
        "kind": "pair",
        "unit": "pairs",
        "parameters": {"processes": 1, "lanes": 16, "api": "threads", "names": 16, "hold_ms": 0},
        "round_trip": {"p50_us": 97.0, "p99_us": 210.0, "pairs_per_s": 10_300.0},
        "rows": rows | {"ceiling": bare},
        "points": [],
    }


def contention(rng: random.Random, title: str, clients: int = 32) -> dict[str, Any]:
    rows = {}
    for name in LOCKS:
        speed, unfair = RIVALS[name], 0.06 if RIVALS[name] > 1.5 else 0.55
        middles = {"wait": 9000 / speed, "release": 80 / speed, "handover": 300 / speed**2}
        rows[name] = row(name, rng, middles, fairness=fairness(rng, clients, unfair))
    return {
        "title": title,
        "kind": "contention",
        "unit": "grants",
        "parameters": {
            "processes": 4,
            "lanes": clients,
            "api": "threads",
            "names": 1,
            "hold_ms": 0.2,
            "blocking": True,
        },
        "round_trip": {"p50_us": 99.0, "p99_us": 260.0, "pairs_per_s": 9_900.0},
        "rows": rows,
        "points": [],
    }


def crash(rng: random.Random) -> dict[str, Any]:
    rows = {}
    for name in LOCKS:
        recovery = {
            "p50": 4000 / RIVALS[name],
            "p99": 90_000 / RIVALS[name],
            "max": 101_000 / RIVALS[name],
            "count": 40,
        }
        rows[name] = row(name, rng, {"wait": 600_000.0}, count=200, recovery_us=recovery)
    return contention(rng, "") | {"title": "holders killed", "kind": "crash", "rows": rows}


def sweep(kind: str, xs: Sequence[float], title: str, make: Callable[[str, float], dict[str, Any]]) -> dict[str, Any]:
    points = [{"x": x, "rival": name, "row": make(name, x)} for name in LOCKS for x in xs]
    return {
        "title": title,
        "kind": kind,
        "unit": "grants",
        "parameters": {"processes": 4, "api": "threads", "names": 1, "hold_ms": 0},
        "round_trip": {"p50_us": 98.0, "p99_us": 230.0, "pairs_per_s": 10_100.0},
        "rows": {},
        "points": points,
    }


def waiters(rng: random.Random) -> dict[str, Any]:
    def make(name: str, x: float) -> dict[str, Any]:
        falling = RIVALS[name] / (1 + x / 300 / RIVALS[name])
        made = row(name, rng, {"wait": 230 * x / RIVALS[name]}, count=100)
        return made | {"rate": spread(BASE_RATE * falling, rng)}

    return sweep("waiters", [2**power for power in range(11)], "one name, more and more waiters", make)


def load(rng: random.Random) -> dict[str, Any]:
    def make(name: str, x: float) -> dict[str, Any]:
        capacity = BASE_RATE * RIVALS[name]
        busy = min(x / capacity, 0.999)
        wait = 220 / RIVALS[name] / (1 - busy) + (1e6 * (x / capacity - 1) if x > capacity else 0)
        return row(name, rng, {"wait": wait}, count=100) | {"rate": spread(min(x, capacity), rng)}

    return sweep("load", [500, 1000, 2000, 4000, 8000, 16000, 32000], "open loop, distinct names", make)


ENVIRONMENT = {
    "python": "CPython 3.11.7",
    "fastlock": "0.4.0",
    "build": "release",
    "commit": "0123456789abcdef",
    "uvloop": "0.23.0",
    "kernel": "Linux 6.1.0 x86_64",
    "cpus": 2,
    "cpu_model": "Some Processor at 2.6 GHz",
    "governor": None,
    "load": 0.42,
    "server": {"kind": "valkey", "version": "9.1.2", "mode": "standalone", "reached_by": "embedded, unix socket"},
    "rivals": {name: {"python": "3.11.7", name: "1.2.3"} for name in RIVALS},
}


def document(seed: int = 1) -> dict[str, Any]:
    """A complete, good result that covers every kind of scenario."""
    rng = random.Random(seed)
    scenarios = {
        "pair": pair(rng, "one thread"),
        "tasks": pair(rng, "1,000 tasks, distinct names, closed loop", slower=1000),
        "hot": contention(rng, "32 waiters, one name"),
        "zipf": contention(rng, "64 waiters, 1,000 names by Zipf", clients=64),
        "crash": crash(rng),
        "waiters": waiters(rng),
        "load": load(rng),
    }
    return {
        "schema": SCHEMA,
        "created": "2025-11-21T14:39:00+00:00",
        "interrupted": False,
        "command": "fastlock bench --url redis://:***@localhost:6379/0 --html report.html",
        "environment": ENVIRONMENT,
        "parameters": {"scenarios": list(scenarios), "rounds": 5, "seconds": 1.0, "quick": False, "rate": None},
        "noise": {name: {"spread": 0.04, "rival": "fastlock"} for name in scenarios},
        "skipped": {"tasks-uvloop": "uvloop is not installed"},
        "failures": [],
        "budgets": [
            {"name": "one thread, times redis-py", "bound": 4, "measured": 4.31, "met": True},
            {"name": "batch, part of the benchmark tool's ceiling", "bound": 0.9, "measured": None, "met": False},
        ],
        "scenarios": scenarios,
    }
