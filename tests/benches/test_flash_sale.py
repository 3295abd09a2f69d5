"""The flash sale on real servers, processes and SQLite files: books that balance, and how they fail to balance.

The first half runs the command as users do; the second plants the faults that the audit, the buyers and the parent of
the workers must notice.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from fastlock import embedded
from fastlock.benches.flash_sale import command
from fastlock.benches.flash_sale.buyers import Buyer, NoLock, Plan, Tally, run_steps
from fastlock.benches.flash_sale.report import JSON_SHAPE, Outcome, as_json, table
from fastlock.benches.flash_sale.shop import Books, Shop, audit, open_shop
from fastlock.benches.flash_sale.workers import Workers
from fastlock.benches.measures import percentile

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--stock", "120", "--processes", "2")
ENDLESS = ("--stock", "1000000", "--processes", "2", "--rivals", "fastlock,redis-py")


@pytest.fixture(scope="module")
def own() -> Iterator[embedded.Server]:
    with embedded.Server() as server:
        yield server


def start(*args: str, **env: str) -> subprocess.Popen[str]:
    """Start a flash sale in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fastlock", "flash-sale", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def sell(*args: str) -> tuple[int, dict[str, Any], str]:
    """Run a flash sale to its end: exit code, JSON document, stderr."""
    with start("--json", *args) as process:
        stdout, stderr = process.communicate(timeout=50)
    return process.returncode, json.loads(stdout), stderr


def await_purchases(client: redis.Redis, count: int = 20) -> None:
    """Return when the lock of a sale has been seen with `count` different tokens: buyers are at work."""
    tokens: set[bytes] = set()
    deadline = time.monotonic() + 20
    while len(tokens) < count:
        assert time.monotonic() < deadline, "no buyer buys"
        for key in client.scan_iter(match="flash-sale:*:0", count=1000):
            tokens |= {token for token in [client.get(key)] if token}  # the lock may be free again by now


def workers_of(pid: int) -> list[int]:
    """Process ids of the workers of a running sale."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in listed.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def nothing_is_left(server: embedded.Server, folder: Path) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert client.keys("*flash-sale*") == []
    assert [path.name for path in folder.glob("fastlock-flash-sale-*")] == []


class TestBooksBalance:
    @pytest.mark.parametrize(
        ("buyers", "rivals"),
        [
            (("--threads", "4"), ["fastlock", "redis-py", "mixed"]),
            (("--tasks", "8"), ["fastlock", "redis-py", "mixed"]),
            (("--tasks", "50", "--uvloop"), ["fastlock"]),
        ],
    )
    def test_under_every_lock(self, own: embedded.Server, buyers: tuple[str, ...], rivals: list[str]) -> None:
        code, document, stderr = sell(*SMALL, *buyers, "--rivals", ",".join(rivals), "--url", own.url)
        assert (code, document["ok"]) == (0, True), (document, stderr)
        assert document["parameters"]["uvloop"] == ("--uvloop" in buyers)
        for run in document["runs"]:  # one purchase at a time: no faster than each buyer thinks
            assert run["seconds"] >= 119 * document["parameters"]["think"]
        assert [run["rival"] for run in document["runs"]] == rivals
        for run in document["runs"]:
            assert (run["initial"], run["sold"], run["left"], run["oversold"]) == (120, 120, 0, 0)
            assert run["errors"] == {}
            assert run["lock_keys_left"] == 0
            assert run["wait"]["count"] >= 120
            assert 0 < run["wait"]["p50"] <= run["wait"]["p99"] <= run["wait"]["max"]
            assert 0 < run["fairness"]["jain"] <= 1
            assert run["fairness"]["min"] <= 120 // run["fairness"]["buyers"] <= run["fairness"]["max"]

    def test_with_several_articles_and_no_url(self) -> None:
        code, document, _ = sell(*SMALL, "--stock", "30", "--skus", "4", "--rivals", "fastlock")
        (run,) = document["runs"]
        assert (code, run["initial"], run["sold"], run["left"]) == (0, 120, 120, 0)

    def test_on_every_kind_of_server(
        self, server: embedded.Server, impl: str, monkeypatch: pytest.MonkeyPatch, no_leaks: object
    ) -> None:
        monkeypatch.setenv("FASTLOCK_IMPL", impl)
        code, document, stderr = sell(*SMALL, "--rivals", "fastlock", "--url", server.url)
        assert (code, document["implementation"]) == (0, impl), (document, stderr)
        assert document["runs"][0]["sold"] == 120

    def test_table(self, own: embedded.Server) -> None:
        with start(*SMALL, "--url", own.url) as process:
            stdout, stderr = process.communicate(timeout=50)
        assert process.returncode == 0, stderr
        progress = (  # shown if it takes long
            r"(fastlock|redis-py): (waiting for [0-9]+ of [0-9]+ workers|[0-9]+ of 120 sold, [0-9]+ left, [0-9]+ s)"
        )
        assert all(re.fullmatch(progress, line) for line in stderr.splitlines()), stderr
        rows = dict(re.findall(r"^(\S.*?)  +(\S.*)$", stdout, re.MULTILINE))
        assert rows["sold"].split() == ["120", "120"]
        assert rows["books"].split() == ["balance", "balance"]


class TestBooksDoNotBalance:
    def test_without_a_lock(self, own: embedded.Server) -> None:
        args = ("--stock", "100", "--processes", "4", "--think", "0.005", "--rivals", "fastlock", "--no-lock")
        code, document, stderr = sell(*args, "--url", own.url)
        locked, unlocked = document["runs"]
        assert code == 1, stderr
        assert locked["ok"]
        assert unlocked["rival"] == "no-lock"
        assert unlocked["oversold"] > 0
        assert unlocked["oversold"] == unlocked["sold"] - (unlocked["initial"] - unlocked["left"])
        assert f"{unlocked['oversold']} orders took nothing from the stock" in unlocked["findings"]

    @pytest.mark.parametrize("rival", ["fastlock", "redis-py"])
    def test_with_a_lease_that_runs_out(self, own: embedded.Server, rival: str) -> None:
        args = ("--stock", "20", "--processes", "1", "--threads", "2", "--timeout", "0.001", "--think", "0.02")
        code, document, _ = sell(*args, "--rivals", rival, "--url", own.url)
        (run,) = document["runs"]
        assert code == 1
        assert run["errors"]["LockNotOwnedError"]["count"] > 0
        assert any("LockNotOwnedError" in finding for finding in run["findings"])


class TestEndedEarly:
    @pytest.mark.parametrize("buyers", [("--threads", "4"), ("--tasks", "20")])
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_keeps_its_measurements_and_leaves_nothing(
        self, own: embedded.Server, tmp_path: Path, buyers: tuple[str, ...], number: signal.Signals, code: int
    ) -> None:
        args = ("--json", *ENDLESS, *buyers, "--url", own.url)
        with redis.Redis.from_url(own.url) as client, start(*args, TMPDIR=str(tmp_path)) as process:
            await_purchases(client)
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=30)
        assert process.returncode == code, stderr
        (run,) = json.loads(stdout)["runs"]  # runs that had not begun are not there
        assert run["stopped"] == "interrupted"
        assert run["findings"] == []
        assert run["sold"] + run["left"] == run["initial"]
        assert run["sold"] >= 19
        nothing_is_left(own, tmp_path)

    def test_a_worker_that_dies_is_reported(self, own: embedded.Server, tmp_path: Path) -> None:
        args = ("--json", "--stock", "3000", "--processes", "2", "--rivals", "fastlock", "--timeout", "1")
        with redis.Redis.from_url(own.url) as client, start(*args, "--url", own.url, TMPDIR=str(tmp_path)) as process:
            await_purchases(client)
            os.kill(workers_of(process.pid)[0], signal.SIGKILL)
            stdout, stderr = process.communicate(timeout=40)
        assert process.returncode == 1, stderr
        (run,) = json.loads(stdout)["runs"]
        assert [finding for finding in run["findings"] if re.fullmatch(r"worker \d ended by SIGKILL", finding)]
        assert (run["sold"], run["left"], run["oversold"]) == (3000, 0, 0)  # the other worker sold the rest
        nothing_is_left(own, tmp_path)

    def test_no_worker_outlives_its_parent(self, own: embedded.Server, tmp_path: Path) -> None:
        args = (*ENDLESS, "--url", own.url)
        with redis.Redis.from_url(own.url) as client, start(*args, TMPDIR=str(tmp_path)) as process:
            await_purchases(client)
            orphans = workers_of(process.pid)
            process.kill()
            process.communicate()  # ends when the last worker has closed the pipes that it inherited
            for pid in orphans:
                _await_end(pid)
            for key in client.scan_iter(match="*flash-sale:*"):
                client.delete(key)

    def test_a_server_that_dies_is_reported(self, tmp_path: Path) -> None:
        args = ("--json", *ENDLESS, "--rivals", "fastlock")
        with (
            embedded.Server() as server,
            redis.Redis.from_url(server.url) as client,
            start(*args, "--url", server.url, TMPDIR=str(tmp_path)) as process,
        ):
            await_purchases(client)
            server.stop()
            stdout, stderr = process.communicate(timeout=40)
        assert process.returncode == 1, stderr
        assert "Traceback" not in stderr
        (run,) = json.loads(stdout)["runs"]
        assert run["lock_keys_left"] is None
        assert sum(error["count"] for error in run["errors"].values()) > 0


def _await_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline, f"worker {pid} lives on"


class TestShop:
    def test_audit_finds_a_lost_update(self, tmp_path: Path) -> None:
        """Two buyers read the same stock; the shop lets both write."""
        shop = Shop(self._opened(tmp_path, stock=5))
        one, other = shop.stock(0), shop.stock(0)
        shop.sell(0, one - 1, "one")
        shop.sell(0, other - 1, "other")
        shop.close()
        books = audit(str(tmp_path / "shop"), stock=5)
        assert (books.left, books.orders, books.oversold, books.beyond, books.balanced) == (4, 2, 1, 0, False)
        assert books.by_buyer == {"one": 1, "other": 1}

    def test_audit_finds_orders_beyond_the_stock(self, tmp_path: Path) -> None:
        shop = Shop(self._opened(tmp_path, stock=1))
        for buyer in ("one", "other"):
            shop.sell(0, 0, buyer)
        shop.close()
        books = audit(str(tmp_path / "shop"), stock=1)
        assert (books.oversold, books.beyond, books.balanced) == (1, 1, False)

    def test_a_gap_of_one_article_hides_no_other(self, tmp_path: Path) -> None:
        path = self._opened(tmp_path, stock=5, skus=2)
        with sqlite3.connect(path) as db:
            db.execute("UPDATE stock SET pieces = 4 WHERE sku = 0")  # a piece that is gone without an order
            db.execute("INSERT INTO orders (sku, buyer, at) VALUES (1, 'one', 0)")  # and an order that took no piece
        db.close()
        assert audit(path, stock=5).oversold == 2

    def test_a_reader_blocks_no_writer(self, tmp_path: Path) -> None:
        """The race needs this: between reading and writing no lock of SQLite is held."""
        path = self._opened(tmp_path, stock=5)
        reader, writer = Shop(path), Shop(path)
        assert reader.stock(0) == 5
        writer.sell(0, 4, "writer")
        assert reader.stock(0) == 4
        reader.sell(0, 3, "reader")
        assert reader.progress() == (2, 3)
        reader.close()
        writer.close()

    def _opened(self, folder: Path, *, stock: int, skus: int = 1) -> str:
        path = str(folder / "shop")
        open_shop(path, skus=skus, stock=stock)
        return path


class Broken:
    """A lock whose acquire or release fails."""

    def __init__(self, where: str, error: type[Exception]) -> None:
        self.where = where
        self.error = error

    def acquire(self) -> bool:
        if self.where == "refuses":
            return False
        return self._may_fail("acquire")

    def release(self) -> None:
        self._may_fail("release")

    def _may_fail(self, step: str) -> bool:
        if step == self.where:
            raise self.error(f"no {step}")
        return True


class TestBuyer:
    @pytest.mark.parametrize(
        ("where", "error", "times", "orders"),
        [
            ("acquire", OSError, 3, 0),
            ("release", OSError, 3, 3),
            ("refuses", RuntimeError, 3, 0),
            ("acquire", redis.ConnectionError, 1, 0),
        ],
    )
    def test_counts_errors_and_gives_up(
        self, tmp_path: Path, where: str, error: type[Exception], times: int, orders: int
    ) -> None:
        tally, shop = self._buy(tmp_path, Broken(where, error), threading.Event())
        assert dict(tally.errors) == {error.__name__: times}
        assert shop.progress()[0] == orders
        shop.close()

    def test_buys_the_whole_stock(self, tmp_path: Path) -> None:
        tally, shop = self._buy(tmp_path, NoLock(), threading.Event())
        assert (shop.progress(), len(tally.waits), tally.sold_out) == ((10, 0), 11, {0})
        shop.close()

    def test_stops_at_the_stop_event(self, tmp_path: Path) -> None:
        stop = threading.Event()
        stop.set()
        _, shop = self._buy(tmp_path, NoLock(), stop)
        assert shop.progress() == (0, 10)
        shop.close()

    def _buy(self, folder: Path, lock: Any, stop: threading.Event) -> tuple[Tally, Shop]:
        open_shop(str(folder / "shop"), skus=1, stock=10)
        shop, tally = Shop(str(folder / "shop")), Tally()
        run_steps(Buyer("0.0", lambda sku: lock, lambda: None, tally, stop).shopping(shop, 1))
        return tally, shop


class TestWorkers:
    def plan(self, folder: Path, **changes: Any) -> Plan:
        given = {"rival": "no-lock", "url": "", "path": str(folder / "shop"), "prefix": "x:", "worker": 0, "buyers": 1}
        given |= {"tasks": False, "uvloop": False, "skus": 1, "think": 0.0, "timeout": 1.0}
        return Plan(**{**given, **changes})

    def test_a_worker_that_cannot_start_reports_the_reason(self, tmp_path: Path) -> None:
        with Workers([self.plan(tmp_path, rival="fastlock", url="http://nowhere")], tmp_path) as workers:
            event = workers.next_event(20)
            assert event is not None
            assert event.kind == "ended"
            assert re.match(r"ended with exit code 1: \w+Error: .+", workers.how_it_ended(0))

    def test_keeps_the_password_out_of_the_process_list(self, tmp_path: Path) -> None:
        open_shop(str(tmp_path / "shop"), skus=1, stock=1)
        with Workers([self.plan(tmp_path, url="redis://:s3cret@localhost")], tmp_path) as workers:
            event = workers.next_event(20)  # the worker waits for "go" now
            assert event is not None
            assert event.kind == "ready"
            (pid,) = workers.pids()
            shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout
        assert "flash_sale.buyers" in shown
        assert "s3cret" not in shown

    def test_leaves_no_process_behind(self, tmp_path: Path) -> None:
        open_shop(str(tmp_path / "shop"), skus=1, stock=1)
        with Workers([self.plan(tmp_path)], tmp_path) as workers:
            (pid,) = workers.pids()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def outcome(**changes: Any) -> Outcome:
    books = Books(initial=10, left=0, orders=10, oversold=0, beyond=0, by_buyer={"0.0": 6, "0.1": 4}, last=12.0)
    given = {"rival": "fastlock", "books": books, "buyers": 2, "began": 10.0, "waits": [0.1, 0.2], "errors": Counter()}
    given |= {"examples": {}, "keys_left": 0, "stopped": None, "accidents": ()}
    return Outcome(**{**given, **changes})


class TestReport:
    @pytest.mark.parametrize(
        "changes",
        [
            {"books": Books(10, 0, 11, 1, 1, {}, None)},
            {"books": Books(10, 1, 10, 1, 0, {}, None)},
            {"errors": Counter(OSError=1)},
            {"keys_left": 1},
            {"keys_left": None},
            {"accidents": ("worker 1 died",)},
        ],
    )
    def test_findings(self, changes: dict[str, Any]) -> None:
        assert outcome().ok
        assert not outcome(**changes).ok
        assert outcome(**changes).findings

    def test_an_interrupted_sale_can_be_ok(self) -> None:
        assert outcome(stopped="interrupted").ok

    def test_json_is_as_documented(self) -> None:
        def keys(value: Any) -> Iterator[str]:
            for key, inner in value.items() if isinstance(value, dict) else ():
                yield key
                yield from keys(inner)

        written = as_json(outcome())
        assert written["per_second"] == 5.0
        assert [key for key in keys(written) if not re.search(rf"\b{key}\b", JSON_SHAPE)] == []
        assert json.loads(json.dumps(written)) == written

    def test_nothing_measured_is_null(self) -> None:
        empty = outcome(books=Books(10, 10, 0, 0, 0, {}, None), waits=[], began=None)
        written = as_json(empty)
        assert (written["per_second"], written["wait"]["p99"], written["fairness"]["jain"]) == (None, None, None)
        assert [row[1] for row in table([empty]) if row[0] == "purchases/s"] == ["-"]

    @pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 5), (0.51, 6), (0.99, 10), (1.0, 10)])
    def test_percentile(self, share: float, value: int) -> None:
        assert percentile(range(1, 11), share) == value


def test_watch_notices_a_stalled_sale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    open_shop(str(tmp_path / "shop"), skus=1, stock=10)
    shop = Shop(str(tmp_path / "shop"))
    args = command.argparse.Namespace(stock=10, skus=1, timeout=1.0, think=0.0)
    watch = command.Watch(shop, args)
    now[0] += command.STALLED_SECONDS
    assert watch.check()[1] is None
    shop.sell(0, 9, "one")
    assert watch.check() == ("1 of 10 sold, 9 left, 30 s", None)
    now[0] += command.STALLED_SECONDS + 1
    assert watch.check()[1] == "stalled"
    shop.close()
