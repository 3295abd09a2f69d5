"""`client.every` on real servers: at most one run in each period, never two at once, and a fleet that loses a process
goes on.

Of which period a run is says its fence, which is made of the server's clock in the script that claims.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, SOON, until
from support.child_helper import ChildHelper
from support.faultproxy import FaultProxy, stall, swallow

import fastlock
import fastlock.asyncio
from fastlock._locks import every
from fastlock._protocol import commands, periods, renewal
from fastlock._protocol.lease import now
from fastlock.embedded import Server

CLAIMED = "fastlock:every:{sku}"
RELEASE = "DELIFEQ"  # the command, on Valkey 9
PERIOD = 0.05  # seconds: many in a test
LONG = 3600.0  # seconds: a period that does not end in a test (but once an hour: then two are seen)
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
tasks_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference


@pytest.fixture(autouse=True)
def claims_stay(no_leaks: Any) -> None:
    no_leaks.allow("fastlock:every:*", "fastlock:fence:*")


class Fleet:
    """Jobs of one name, and what they did: the period of each run, and how many ran at once."""

    def __init__(self, api: Api, seconds: float, before: Callable[[], Any] = lambda: None) -> None:
        self.api, self.seconds, self.before = api, seconds, before
        self.jobs: list[Any] = []
        self.periods: list[int] = []
        self.inside = self.most = 0

    def add(self, client: Any, **settings: Any) -> Any:
        job = client.every(NAME, self.seconds, self.api.native(self._run), **settings)
        self.jobs.append(job)
        return job

    async def _run(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        (lease,) = [job.lease for job in self.jobs if job.lease is not None]
        self.periods.append(lease.fence // int(self.seconds * 1_000_000))
        await self.api.get(self.before())
        await self.api.checkpoint()
        self.inside -= 1

    async def runs(self, count: int) -> None:
        await until(self.api, lambda: len(self.periods) >= count, f"{count} runs")

    async def stop(self) -> None:
        for job in self.jobs:
            assert await self.api.get(job.stop(SOON)) is True

    @property
    def once_a_period(self) -> bool:
        return self.most == 1 and self.periods == sorted(set(self.periods))


async def test_one_of_the_fleet_runs_each_period(api: Api, server: Server, probe: redis.Redis) -> None:
    fleet = Fleet(api, PERIOD)
    for client in [api.client(server.url) for _ in range(3)] * 2:
        fleet.add(client)
    await fleet.runs(12)
    await fleet.stop()
    assert fleet.once_a_period and sum(job.runs for job in fleet.jobs) == len(fleet.periods)
    assert [job.last_error for job in fleet.jobs] == [None] * 6 and not probe.exists(NAME)
    assert len({*fleet.periods}) >= 12


@one_server
async def test_a_run_has_ended_before_the_server_knows(api: Api, server: Server, proxy: FaultProxy) -> None:
    """Else the next process may run the job while this one says that it does."""
    fleet = Fleet(api, LONG)
    job = fleet.add(api.client(proxy.url))
    stalled = proxy.arm(stall(), command=RELEASE)
    await until(api, lambda: stalled.fired, "the release")
    assert job.lease is None and job.runs == 1
    stalled.resume()
    await fleet.stop()


async def test_who_is_started_later_does_not_run_the_period_again(api: Api, server: Server) -> None:
    fleet = Fleet(api, LONG)
    client = api.client(server.url)
    for number in range(6):
        job = fleet.add(client)
        await until(api, lambda number=number: client.get_stats()["commands"] > number, "its question")
        if number == 0:
            await fleet.runs(1)
        assert await api.get(job.stop()) is True
    assert fleet.once_a_period and len(fleet.periods) <= 2


async def test_the_first_run_may_wait_for_the_next_period(api: Api, server: Server, probe: redis.Redis) -> None:
    for _ in range(3):
        seconds, micros = probe.time()
        fleet = Fleet(api, 0.2)
        fleet.add(api.client(server.url), at_once=False)
        await fleet.runs(1)
        await fleet.stop()
        assert fleet.periods[0] > (seconds * 1_000_000 + micros) // 200_000
    later = Fleet(api, LONG)
    client = api.client(server.url)
    job = later.add(client, at_once=False)
    await until(api, lambda: client.get_stats()["commands"] >= 2, "its first question")
    await later.stop()
    assert job.runs == 0


async def test_a_period_that_begins_during_a_run_is_skipped(api: Api, server: Server, probe: redis.Redis) -> None:
    ended: list[int] = []

    async def long() -> None:
        if len(fleet.periods) == 1:  # the first run goes on until the period after the next
            await until(api, lambda: period_now(probe) >= fleet.periods[0] + 2, "two more periods")
            ended.append(period_now(probe))

    fleet = Fleet(api, PERIOD, api.native(long))
    for client in [api.client(server.url) for _ in range(3)]:
        fleet.add(client)
    await fleet.runs(5)
    await fleet.stop()
    assert fleet.once_a_period and fleet.periods[1] > ended[0] >= fleet.periods[0] + 2


def period_now(probe: redis.Redis) -> int:
    seconds, micros = probe.time()
    return int((seconds * 1_000_000 + micros) // int(PERIOD * 1_000_000))


async def test_while_somebody_else_holds_the_lock_it_does_not_run(api: Api, server: Server, probe: redis.Redis) -> None:
    fleet, client = Fleet(api, PERIOD), api.client(server.url)
    async with api.within(client.lock(NAME)):
        fleet.add(api.client(server.url))
        start = period_now(probe)
        await until(api, lambda: period_now(probe) > start + 2, "two periods")
        assert fleet.periods == []
    await fleet.runs(2)
    await fleet.stop()
    assert fleet.once_a_period


@one_server
async def test_a_runner_that_is_killed_costs_one_run(api: Api, server: Server, probe: redis.Redis) -> None:
    fleet = Fleet(api, PERIOD)
    with ChildHelper(api, server.url, "every", period=PERIOD, timeout=0.5) as child:
        await child.wait_for_line("running")
        fleet.add(api.client(server.url))
        begun = period_now(probe)
        await until(api, lambda: period_now(probe) > begun + 2, "two periods")
        assert fleet.periods == [], "that run goes on"
        child.kill()
    await fleet.runs(3)
    await fleet.stop()
    assert fleet.once_a_period and child.output == ["running"]


@one_server
async def test_a_runner_that_is_stopped_runs_no_period_twice(api: Api, server: Server) -> None:
    """It loses the lock; those that ran since are not run by it."""
    fleet = Fleet(api, PERIOD)
    with ChildHelper(api, server.url, "every", period=PERIOD, timeout=0.3) as child:
        await child.wait_for_line("running")
        child.stop()
        fleet.add(api.client(server.url))
        await fleet.runs(3)
        child.go_on()
        await fleet.runs(6)
    await fleet.stop()
    assert fleet.once_a_period and child.output == ["running"]


@one_server
async def test_a_process_that_was_stopped_after_its_claim_does_not_run(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease has ended, so that another one may be running the job."""
    claimed: list[Any] = []
    claim = every.Schedule._claim

    def claim_and_stop(job: Any) -> Any:
        answer = yield from claim(job)
        if answer.lease is not None and not claimed:
            claimed.append(answer.lease)
            answer.lease._shorten(0.0)
        return answer

    monkeypatch.setattr(every.Schedule, "_claim", claim_and_stop)
    fleet = Fleet(api, PERIOD)
    job = fleet.add(api.client(server.url))
    await fleet.runs(1)
    await fleet.stop()
    assert fleet.periods[0] > claimed[0].fence // int(PERIOD * 1_000_000) and job.runs == len(fleet.periods)


async def test_a_claim_whose_reply_is_lost_is_run_once(api: Api, proxy: FaultProxy, probe: redis.Redis) -> None:
    fleet, client = Fleet(api, LONG), api.client(proxy.url)
    await api.get(client.server_info())
    armed = proxy.arm(swallow(), after=b"EVALSHA")
    fleet.add(client)
    await fleet.runs(1)
    fleet.add(api.client(proxy.url))
    await until(api, lambda: not probe.exists(NAME) and fleet.inside == 0, "the end of the run")
    await fleet.stop()
    assert armed.fired and fleet.once_a_period and len(fleet.periods) <= 2


async def test_an_error_does_not_end_the_job(
    api: Api, server: Server, probe: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [KeyError("one"), ValueError("two")]

    async def fail() -> None:
        if errors:
            raise errors.pop(0)

    async with api.within(api.client(server.url).every(NAME, PERIOD, api.native(fail))) as job:
        await until(api, lambda: isinstance(job.last_error, ValueError), "the second error")
        await until(api, lambda: job.last_error is None and job.runs >= 3, "a run without an error")
    logged = [each for each in caplog.records if each.message == "the job 'sku' failed"]
    assert len(logged) == 2 and logged[0].exc_info and not probe.exists(NAME)


@one_server
async def test_it_goes_on_when_the_server_is_back(
    api: Api, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(api, PERIOD)
    job = fleet.add(api.client(proxy.url, connect_timeout=0.05, reply_timeout=0.05))
    await fleet.runs(1)
    proxy.refuse()
    proxy.cut()
    await until(api, lambda: isinstance(job.last_error, redis.ConnectionError | redis.TimeoutError), "an error")
    proxy.admit()
    count = len(fleet.periods)
    await fleet.runs(count + 2)
    await fleet.stop()
    assert fleet.once_a_period
    assert [each.message for each in caplog.records if "goes on when the server is back" in each.message]


async def test_the_lock_of_a_long_run_is_renewed(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)
    client = api.client(server.url)

    async def long() -> None:
        await until(api, lambda: client.get_stats()["renewals"] >= 3, "renewals")

    fleet = Fleet(api, LONG, api.native(long))
    job = fleet.add(client, timeout=5)
    await fleet.runs(1)
    assert 3000 < probe.pttl(NAME) <= 5000
    await until(api, lambda: job.runs, "its end")
    await fleet.stop()
    assert client.get_stats()["losses"] == 0


@pytest.mark.parametrize(("seconds", "lease"), [(0.05, 1), (7, 7), (LONG, 30)])
async def test_the_lease_is_a_period_within_limits(api: Api, server: Server, seconds: float, lease: float) -> None:
    found: list[float] = []

    async def look() -> None:
        found.append(job.lease.remaining)

    client = api.client(server.url)
    job = client.every(NAME, seconds, api.native(look), start=False)
    async with api.within(job):
        await until(api, lambda: job.runs, "a run")
    assert lease - 0.9 < found[0] <= lease and job.lease is None


async def test_stopping_waits_for_the_run_that_is_under_way(api: Api, server: Server, probe: redis.Redis) -> None:
    go_on = threading.Event()

    async def wait() -> None:
        await until(api, go_on.is_set, "the end")

    fleet = Fleet(api, PERIOD, api.native(wait))
    job = fleet.add(api.client(server.url))
    await fleet.runs(1)
    assert await api.get(job.stop(0.01)) is False and job.running and probe.exists(NAME)
    with pytest.raises(RuntimeError, match="still being stopped"):
        job.start()
    stopped = api.start(job.stop)
    go_on.set()
    assert await stopped.get(SOON) is True
    assert not job.running and len(fleet.periods) == job.runs == 1 and not probe.exists(NAME)
    with pytest.raises(TypeError, match="timeout"):
        await api.get(job.stop("1"))


async def test_a_run_may_stop_its_job_and_close_its_client(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)

    async def stop() -> None:
        assert await api.get(job.stop()) is False
        await api.get(client.close())

    job = client.every(NAME, PERIOD, api.native(stop), start=False)
    job.start()
    await until(api, lambda: not job.running, "the end")
    assert job.runs == 1 and job.last_error is None and not probe.exists(NAME)


async def test_a_closed_client_ends_its_jobs(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    fleet = Fleet(api, PERIOD)
    job = fleet.add(client)
    await fleet.runs(1)
    await api.get(client.close())
    assert not job.running and not probe.exists(NAME) and client._background == set()
    with pytest.raises(fastlock.ClientClosedError):
        job.start()


async def test_a_decorated_function_stays_what_it_was(api: Api, server: Server) -> None:
    client, calls = api.client(server.url), []

    async def tidy(what: str = "by the clock") -> str:
        """Tidies."""
        calls.append(what)
        return what

    job = client.every(NAME, PERIOD, start=False)(api.native(tidy))
    assert isinstance(job, api.module.Job) and (job.__name__, job.__doc__) == ("tidy", "Tidies.")
    assert await api.get(job("by hand")) == "by hand" and job.runs == 0
    async with api.within(job) as entered:
        await until(api, lambda: job.runs, "a run")
    assert entered is job and set(calls) == {"by hand", "by the clock"} and job.name == NAME
    assert repr(job) == "<Job 'sku', not running>"


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": ""}, ValueError, "name"),
    ({"name": "fastlock:x"}, ValueError, "name"),
    ({"seconds": 0}, ValueError, "seconds"),
    ({"seconds": -1}, ValueError, "seconds"),
    ({"seconds": None}, TypeError, "seconds"),
    ({"seconds": "60"}, TypeError, "seconds"),
    ({"seconds": float("inf")}, ValueError, "seconds"),
    ({"function": 7}, TypeError, "function"),
    ({"timeout": 0.01}, ValueError, "timeout"),
    ({"timeout": "1"}, TypeError, "timeout"),
]


@one_server
@pytest.mark.parametrize(("given", "error", "named"), WRONG)
async def test_arguments_that_make_no_sense(api: Api, server: Server, given: Any, error: Any, named: str) -> None:
    client, fleet = api.client(server.url), Fleet(api, PERIOD)
    with pytest.raises(error, match=named):
        client.every(**{"name": NAME, "seconds": 60, "function": api.native(fleet._run), **given})
    if "function" not in given:
        with pytest.raises(error, match=named):
            client.every(**{"name": NAME, "seconds": 60, **given})
    assert client.get_stats()["commands"] == 0 and not client._background


# -------------------------------------------------------------------------------------------- the server's clock


@pytest.fixture
def outcome(api: Api, server: Server) -> Callable[..., Any]:
    """outcome(token): what becomes of this token's claim of the hour, by the script."""
    client = api.client(server.url)

    async def by(token: str) -> periods.Claim:
        steps = periods.claim(NAME, NAME.encode(), b"fl:" + token.encode() * 32, 60_000, int(LONG * 1000), 0, now)
        claim: periods.Claim = await api.get(client._transport.drive(steps))
        return claim

    return by


@pytest.fixture
def claim(outcome: Any) -> Callable[..., Any]:
    """claim(token): whether this token claims the hour."""

    async def by(token: str) -> bool:
        return (await outcome(token)).lease is not None

    return by


@pytest.mark.parametrize(
    ("ahead", "claimed"), [(-1, True), (100, False), (LONG, False), (2 * LONG - 10, False), (2 * LONG + 10, True)]
)
async def test_a_clock_that_was_set_back_runs_no_period_twice(
    api: Api, server: Server, probe: redis.Redis, claim: Any, ahead: float, claimed: bool
) -> None:
    """By less than a period: it goes on where it was. By more, or after the period was cut: from then on it counts
    anew, as nobody knows for how long it would stand still."""
    probe.set(CLAIMED, int((probe.time()[0] + ahead) * 1000))
    assert await claim("a") is claimed
    probe.delete(NAME)


async def test_a_claim_is_confirmed_to_who_sent_it(api: Api, server: Server, probe: redis.Redis, claim: Any) -> None:
    assert [await claim("a"), await claim("a"), await claim("b"), await claim("a")] == [True, True, False, True]
    probe.set(NAME, b"fl+" + b"a" * 32)  # somebody waits for the lock
    assert [await claim("a"), await claim("b")] == [True, False]
    probe.delete(NAME)
    assert [await claim("a"), await claim("b")] == [False, False], "the run has ended, or was lost"
    assert LONG * 2 * 1000 < probe.pttl(CLAIMED) <= LONG * 3 * 1000


def test_everybody_is_told_when_the_period_ends(probe: redis.Redis) -> None:
    """Who claims it, who claimed it before, who comes too late, and who finds that somebody else holds the lock."""
    period = 10**12  # milliseconds: none ends in a test
    for who, claimed in ((b"a", 1), (b"a", 1), (b"b", 0), (b"c", 0)):
        if who == b"c":
            probe.delete(CLAIMED)
            probe.persist(NAME)
        (call,) = periods.ClaimPeriod(NAME.encode(), b"fl:" + who * 32, 60_000, period, 0).calls
        before = milliseconds(probe)
        reply = probe.execute_command("EVAL", commands.script_of(call).text, *call[2:])
        end = (before // period + 1) * period
        assert reply[0] == claimed and before <= end - reply[1] <= milliseconds(probe)
    probe.delete(NAME)


def milliseconds(probe: redis.Redis) -> int:
    seconds, micros = probe.time()
    return int(seconds * 1000 + micros // 1000)


async def test_a_claim_that_is_confirmed_late_is_of_its_own_period(
    api: Api, server: Server, probe: redis.Redis, outcome: Any
) -> None:
    """The run goes on into the next one, which is skipped then."""
    first = await outcome("a")
    assert first.time > now()
    probe.set(CLAIMED, int((probe.time()[0] - 1) * 1000))  # the period after that has begun meanwhile
    again = await outcome("a")
    assert again.lease is not None and again.time <= now()
    probe.delete(NAME)


async def test_a_skipped_period_is_run_by_nobody(api: Api, server: Server, probe: redis.Redis, claim: Any) -> None:
    lease, client = fastlock.Lease(NAME, NAME.encode(), b"fl:" + b"a" * 32, now() + 60), api.client(server.url)
    for held, claimed in ((True, False), (False, True)):
        probe.delete(CLAIMED)
        assert await claim("a")
        probe.set(CLAIMED, int((probe.time()[0] - 1) * 1000))  # the period after that has begun meanwhile
        if not held:  # the lock was lost: it is not for this run to say
            probe.delete(NAME)
        await api.get(client._transport.drive(periods.skip(lease, int(LONG * 1000), now)))
        probe.delete(NAME)
        assert await claim("b") is claimed
        probe.delete(NAME)


async def test_what_is_no_lock_is_told(api: Api, server: Server, probe: redis.Redis, claim: Any) -> None:
    probe.rpush(NAME, "theirs")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await claim("a")
    assert probe.lrange(NAME, 0, -1) == [b"theirs"] and not probe.exists(CLAIMED)
    probe.delete(NAME)


# ------------------------------------------------------------------------------------------------------------- threads


@threads_only
async def test_functions_that_are_to_be_awaited_are_refused(api: Api, server: Server) -> None:
    client = api.client(server.url)

    async def run() -> None: ...

    for make in (lambda: client.every(NAME, 1, run), lambda: client.every(NAME, 1)(run)):
        with pytest.raises(TypeError, match=r"run is async: give it to a fastlock\.asyncio\.Client"):
            make()
    job = client.every(NAME, LONG, lambda: run())
    await until(api, lambda: job.runs, "a run")
    assert isinstance(job.last_error, TypeError) and job.stop(SOON)


@threads_only
async def test_a_run_that_exits_does_not_end_the_job(api: Api, server: Server) -> None:
    with api.client(server.url).every(NAME, PERIOD, lambda: exit(1)) as job:
        await until(api, lambda: job.runs >= 2, "another run")
    assert isinstance(job.last_error, SystemExit)


@threads_only
async def test_a_forked_child_starts_it_itself(api: Api, server: Server) -> None:
    client = api.client(server.url)
    job = client.every(NAME, PERIOD, functools.partial(int, 1))
    await until(api, lambda: job.runs, "a run")
    if (child := os.fork()) == 0:
        before = job.runs
        inherited = job.running or not job.stop(1)
        job.start()
        await until(api, lambda: job.runs > before, "a run of the child")
        client.close()
        os._exit(1 if inherited or job.running else 0)
    job.stop()
    assert os.waitpid(child, 0)[1] == 0


# ------------------------------------------------------------------------------------------------------------- asyncio


@tasks_only
async def test_plain_functions_are_run_in_asyncio_too(api: Api, server: Server) -> None:
    ran = asyncio.Event()
    async with api.client(server.url).every(NAME, LONG, ran.set):
        await asyncio.wait_for(ran.wait(), SOON)


@tasks_only
async def test_a_client_that_is_closed_cancels_the_run(api: Api, server: Server, probe: redis.Redis) -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    client = api.client(server.url)
    job = client.every(NAME, LONG, long)
    await until(api, lambda: job.lease is not None, "a run")
    await client.close()
    assert ended == ["cancelled"] and not job.running and not probe.exists(NAME)


@tasks_only
async def test_a_job_whose_function_cancels_itself_goes_on(api: Api, server: Server) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async with api.client(server.url).every(NAME, PERIOD, cancelled) as job:
        await until(api, lambda: job.runs >= 2, "another run")
    assert isinstance(job.last_error, asyncio.CancelledError)


@tasks_only
async def test_without_an_event_loop_it_is_refused(api: Api, server: Server) -> None:
    def make() -> None:
        client = fastlock.asyncio.Client.from_url(server.url)
        with pytest.raises(RuntimeError, match="start=False"):
            client.every(NAME, 1, print)

    await asyncio.to_thread(make)
