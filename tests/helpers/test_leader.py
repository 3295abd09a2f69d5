"""`client.leader` on real servers: one leads at a time, says so truthfully, and another one leads when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from support.apis import Api
from support.child_client import NAME, SOON, queued, until, waits
from support.child_helper import ChildHelper
from support.faultproxy import FaultProxy

import fastlock
import fastlock.asyncio
from fastlock import fencing
from fastlock._locks import aio_leader, leader
from fastlock._protocol import renewal
from fastlock.embedded import Server

ROOT = Path(__file__).resolve().parents[2]
threads_only = pytest.mark.parametrize("api", ["threads"], indirect=True)
tasks_only = pytest.mark.parametrize("api", ["asyncio"], indirect=True)
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference


@pytest.fixture(autouse=True)
def counters_stay(no_leaks: Any) -> None:
    no_leaks.allow("fastlock:fence:*")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is due for renewal after a hundredth of its time."""
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)
    monkeypatch.setattr(renewal, "EARLY_PART", 0.001)


class Log:
    """What elections have told, in order: (what, which election, fence)."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, int]] = []
        self.inside: set[str] = set()
        self.most = 0

    def of(self, name: str) -> dict[str, Callable[[Any], None]]:
        """The callbacks of an election."""

        def gain(lease: Any) -> None:
            self.inside.add(name)
            self.most = max(self.most, len(self.inside))
            self.entries.append(("gain", name, lease.fence))

        def loss(lease: Any) -> None:
            self.inside.discard(name)
            self.entries.append(("loss", name, lease.fence))

        return {"on_gain": gain, "on_loss": loss}

    @property
    def gains(self) -> list[str]:
        return [name for what, name, _ in self.entries if what == "gain"]


async def leads(api: Api, *elections: Any) -> Any:
    """The one of these elections that leads, as soon as one does."""
    await until(api, lambda: any(each.is_leader for each in elections), "a leader")
    (found,) = [each for each in elections if each.is_leader]
    return found


async def test_one_of_all_leads_until_it_resigns(api: Api, server: Server, probe: redis.Redis) -> None:
    log, clients = Log(), [api.client(server.url) for _ in range(2)]
    elections = [client.leader(NAME, **log.of(str(i))) for i, client in enumerate(clients * 2)]
    order: list[Any] = []
    for _ in range(10):
        found = await leads(api, *elections)
        order.append(found)
        await queued(api, probe, 3)
        assert found.running and found.lease.valid and found.lease.fence and await api.get(found.wait()) is True
        assert [each.lease for each in elections if each is not found] == [None] * 3
        await api.get(found.resign())
        assert not found.is_leader and found.lease is None
        await until(api, lambda: len(log.gains) > len(order), "the next leader")
    assert log.most == 1 and len(set(map(id, order[:4]))) == 4, "who resigns is the last to lead again"
    for each in elections:
        assert await api.get(each.stop()) is True and not each.running and not each.is_leader
    fences = [fence for what, _, fence in log.entries if what == "gain"]
    assert log.most == 1 and fences == sorted(set(fences))
    assert not probe.exists(NAME) and log.inside == set() and len(log.entries) == 2 * len(fences)


async def test_a_register_never_has_two_writers(api: Api, server: Server, probe: redis.Redis, no_leaks: Any) -> None:
    """Each leader writes with its fence while it believes to lead. A leader that came later is never overwritten."""
    no_leaks.allow("register", "fastlock:fenced:*")
    refused: list[Exception] = []
    written: list[int] = []

    async def write(lease: Any) -> None:
        for _ in range(20):
            if lease.lost.is_set():
                return
            try:
                fencing.set(probe, "register", str(lease.fence), lease.fence)
                written.append(lease.fence)
            except fencing.StaleFenceError as error:
                refused.append(error)
            await api.checkpoint()

    client_of = [api.client(server.url) for _ in range(3)]
    elections = [client.leader(NAME, on_gain=api.native(write)) for client in client_of]
    for _ in range(12):
        await api.get((await leads(api, *elections)).resign())
    for each in elections:
        await api.get(each.stop())
    assert refused == [] and written == sorted(written) and len(set(written)) >= 6


async def test_a_loss_is_told_and_it_competes_again(api: Api, server: Server, probe: redis.Redis, often: None) -> None:
    log, client = Log(), api.client(server.url)
    election = client.leader(NAME, timeout=2, **log.of("x"))
    first = (await leads(api, election)).lease
    probe.set(NAME, "another's", px=100_000)
    await until(api, lambda: len(log.entries) == 2, "the loss")
    assert not election.is_leader and first.lost.is_set() and log.entries[1] == ("loss", "x", first.fence)
    await waits(api, client, 1)
    probe.delete(NAME)
    again = (await leads(api, election)).lease
    await until(api, lambda: log.gains == ["x", "x"], "on_gain")
    assert again.fence > first.fence
    await api.get(election.stop())


@one_server
async def test_it_leads_no_longer_before_another_can(api: Api, server: Server, proxy: FaultProxy) -> None:
    """The leader is cut off from the server: it is told so by its own clock."""
    log = Log()
    client = api.client(proxy.url, connect_timeout=0.2, reply_timeout=0.2)
    cut_off = client.leader(NAME, timeout=0.6, **log.of("cut off"))
    await leads(api, cut_off)
    led_at_gain: list[bool] = []
    other = api.client(server.url).leader(
        NAME, on_gain=lambda lease: led_at_gain.append(cut_off.is_leader or "cut off" in log.inside)
    )
    proxy.refuse()
    proxy.cut()
    assert await api.get(other.wait(SOON)) is True
    await until(api, lambda: led_at_gain, "on_gain")
    assert led_at_gain == [False]
    await until(api, lambda: cut_off.last_error is not None, "an error of the server")
    assert isinstance(cut_off.last_error, redis.ConnectionError | redis.TimeoutError) and cut_off.running
    proxy.admit()
    await api.get(other.stop())
    await leads(api, cut_off)
    await until(api, lambda: cut_off.last_error is None, "that it leads again")
    await api.get(cut_off.stop())


@one_server
async def test_a_leader_that_is_killed_is_replaced(api: Api, server: Server) -> None:
    client = api.client(server.url)
    with ChildHelper(api, server.url, "leader", timeout=0.5) as child:
        await child.wait_for_line("leads")
        election = client.leader(NAME)
        await waits(api, client, 1)
        assert await api.get(election.wait(0.01)) is False
        child.kill()
        assert await api.get(election.wait(SOON)) is True
    await api.get(election.stop())


@one_server
async def test_a_leader_that_was_stopped_for_longer_than_its_lease_knows_it(api: Api, server: Server) -> None:
    with ChildHelper(api, server.url, "leader", timeout=0.5) as child:
        await child.wait_for_line("leads")
        child.stop()
        election = api.client(server.url).leader(NAME)
        assert await api.get(election.wait(SOON)) is True
        child.go_on()
        await api.get(election.stop())
        child.process.send_signal(signal.SIGKILL)
    probe_waits = api.client(server.url).lock(NAME)
    assert await api.get(probe_waits.acquire(blocking_timeout=SOON))
    await api.get(probe_waits.release())


async def test_who_cannot_lead_lets_another_one(
    api: Api, server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (leader, aio_leader):
        monkeypatch.setattr(module, "PAUSE", 60)
    log, client = Log(), api.client(server.url)

    async def fail(lease: Any) -> None:
        raise KeyError("a table")

    losses: list[Any] = []
    failing = client.leader(NAME, on_gain=api.native(fail), on_loss=losses.append)
    await until(api, lambda: failing.last_error is not None, "the failure")
    other = client.leader(NAME, **log.of("other"))
    assert await api.get(other.wait(SOON)) is True
    assert isinstance(failing.last_error, KeyError) and len(losses) == 1 and failing.running
    assert any("on_gain of election 'sku' failed: it resigns" in each.message for each in caplog.records)
    for each in (failing, other):
        assert await api.get(each.stop(SOON)) is True


async def test_an_error_of_on_loss_is_logged(api: Api, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(lease: Any) -> None:
        raise KeyError

    async with api.within(api.client(server.url).leader(NAME, on_loss=api.native(fail))) as election:
        assert await api.get(election.wait()) is True
    assert [each.message for each in caplog.records] == ["on_loss of election 'sku' failed"]


@tasks_only
async def test_a_cancellation_that_is_the_callbacks_own_is_an_error(
    api: Api, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a task that they await, which somebody else has cancelled."""

    async def fail(lease: Any) -> None:
        raise asyncio.CancelledError("a task of its own")

    client = api.client(server.url)
    async with client.leader(NAME, on_gain=fail) as election:
        await until(api, lambda: election.last_error is not None, "the error")
    async with client.leader(NAME, on_loss=fail) as election:
        await leads(api, election)
        await election.resign()
        await until(api, lambda: "on_loss of election" in caplog.text, "a message")
        await leads(api, election)


@tasks_only
@pytest.mark.parametrize("way", ["stop", "resign"])
async def test_on_loss_is_called_where_the_client_is_closed_meanwhile(
    api: Api, server: Server, probe: redis.Redis, way: str
) -> None:
    """While `on_gain` still cleans up."""
    log, cleaning, may_end = [], asyncio.Event(), asyncio.Event()

    async def lead(lease: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await may_end.wait()
            log.append("on_gain has ended")

    client = api.client(server.url)
    election = client.leader(NAME, on_gain=lead, on_loss=lambda lease: log.append("on_loss"))
    await leads(api, election)
    ending = asyncio.ensure_future(election.stop() if way == "stop" else election.resign())
    await cleaning.wait()
    closing = asyncio.ensure_future(client.close())
    for _ in range(10):
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(ending, closing)
    assert log == ["on_gain has ended", "on_loss"] and not election.running and not probe.exists(NAME)


async def test_waiting_for_leadership(api: Api, server: Server) -> None:
    client, other = api.client(server.url), api.client(server.url)
    async with api.within(client.leader(NAME)) as first:
        assert await api.get(first.wait()) is True
        second = other.leader(NAME)
        assert await api.get(second.wait(0)) is False
        assert await api.get(second.wait(0.01)) is False
        jobs = [api.start(second.wait) for _ in range(2)]
        stopped = api.start(other.leader("never", start=False).wait)
        assert await stopped.get(SOON) is False, "it would wait for ever"
    assert [await job.get(SOON) for job in jobs] == [True, True]
    await api.get(second.stop())
    assert await api.get(second.wait()) is False
    for wrong, error in ((-1, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="timeout"):
            await api.get(second.wait(wrong))


async def test_stopping_one_that_waits_takes_it_out_of_the_queue(
    api: Api, server: Server, probe: redis.Redis, no_recheck: None
) -> None:
    client, other = api.client(server.url), api.client(server.url)
    async with api.within(client.lock(NAME, timeout=60)):
        election = other.leader(NAME)
        await waits(api, other, 1)
        await until(api, lambda: probe.zcard("fastlock:queue:{sku}") == 1, "its entry")
        assert await api.get(election.stop(SOON)) is True
        await until(api, lambda: not probe.exists("fastlock:queue:{sku}"), "that its entry has left")


async def test_it_may_be_started_later_and_again(api: Api, server: Server) -> None:
    client = api.client(server.url)
    election = client.leader(NAME, start=False)
    assert not election.running and await api.get(election.stop()) is True
    for _ in range(3):
        async with api.within(election) as entered:
            assert entered is election and election.running and election.start() is election
            assert await api.get(election.wait(SOON)) is True
        assert not election.running and not election.is_leader


async def test_a_closed_client_ends_its_elections(api: Api, server: Server, probe: redis.Redis) -> None:
    log, client, other = Log(), api.client(server.url), api.client(server.url)
    election = client.leader(NAME, **log.of("x"))
    assert await api.get(election.wait(SOON)) is True
    waiting = other.leader(NAME)
    await waits(api, other, 1)
    for each in (other, client):
        await api.get(each.close())
    assert not (election.running or waiting.running or election.is_leader)
    assert not probe.exists(NAME) and log.entries[-1][0] == "loss"
    with pytest.raises(fastlock.ClientClosedError):
        election.start()


async def test_callbacks_may_end_the_election(api: Api, server: Server, probe: redis.Redis) -> None:
    client, told = api.client(server.url), []

    async def stop(lease: Any) -> None:
        told.append((await api.get(election.stop()), election.is_leader))

    election = client.leader(NAME, on_gain=api.native(stop), start=False)
    election.start()
    await until(api, lambda: not election.running, "the end")
    assert told == [(False, False)] and not probe.exists(NAME)

    async def resign(lease: Any) -> None:
        told.append(election.is_leader)
        await api.get(election.resign())

    election = client.leader(NAME, on_gain=api.native(resign), start=False)
    election.start()
    await until(api, lambda: len(told) > 3, "that it led again and again")
    await api.get(election.stop())


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": ""}, ValueError, "name"),
    ({"name": "fastlock:x"}, ValueError, "name"),
    ({"name": None}, TypeError, "name"),
    ({"timeout": None}, ValueError, "timeout"),
    ({"timeout": 0}, ValueError, "timeout"),
    ({"timeout": "15"}, TypeError, "timeout"),
    ({"on_gain": 1}, TypeError, "on_gain"),
    ({"on_loss": "x"}, TypeError, "on_loss"),
]


@one_server
@pytest.mark.parametrize(("given", "error", "named"), WRONG)
async def test_arguments_that_make_no_sense(api: Api, server: Server, given: Any, error: Any, named: str) -> None:
    client = api.client(server.url)
    with pytest.raises(error, match=named):
        client.leader(**{"name": NAME, **given})
    assert client.get_stats()["commands"] == 0 and not client._background


async def test_a_repr_says_whether_it_runs(api: Api, server: Server) -> None:
    election = api.client(server.url).leader(NAME, start=False)
    assert repr(election) == "<Election 'sku', not running>"
    async with api.within(election):
        assert repr(election) == "<Election 'sku', running>" and election.name == NAME


async def test_the_other_kind_of_with_is_refused(api: Api, server: Server) -> None:
    election = api.client(server.url).leader(NAME, start=False)
    with pytest.raises(TypeError, match=r"this is for (asyncio|threads)"):
        if api.is_async:
            with election:
                pass
        else:
            await election.__aenter__()


# ------------------------------------------------------------------------------------------------------------- threads


@threads_only
async def test_coroutine_functions_are_refused_in_threads(api: Api, server: Server) -> None:
    async def gain(lease: Any) -> None: ...

    for name in ("on_gain", "on_loss"):
        with pytest.raises(TypeError, match=r"give it to a fastlock\.asyncio\.Client"):
            api.client(server.url).leader(NAME, **{name: gain})


@threads_only
async def test_a_forked_child_does_not_lead(api: Api, server: Server, probe: redis.Redis) -> None:
    client = api.client(server.url)
    election = client.leader(NAME)
    assert election.wait(SOON)
    if (child := os.fork()) == 0:
        inherits = election.is_leader or election.running or not election.stop(1) or election.wait()
        starts = election.start().running and election.wait(0.01) is False and election.stop(SOON)
        client.close()
        os._exit(0 if starts and not inherits else 1)
    assert os.waitpid(child, 0)[1] == 0 and election.is_leader and probe.exists(NAME)
    election.stop()


@threads_only
async def test_a_process_that_ends_hands_over(api: Api, server: Server, probe: redis.Redis) -> None:
    program = textwrap.dedent(
        f"""
        import fastlock
        client = fastlock.Client.from_url({server.url!r})
        election = client.leader({NAME!r}, on_loss=lambda lease: print("loss"))
        election.wait()
        waiting = client.leader({NAME!r})
        print("leads", flush=True)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr, done.returncode) == ("leads\nloss\n", "", 0) and not probe.exists(NAME)


@threads_only
async def test_it_leaves_no_thread(api: Api, server: Server) -> None:
    before = threading.active_count()
    client = api.client(server.url)
    for _ in range(3):
        with client.leader(NAME) as election:
            assert election.wait(SOON)
    assert client._background == set() and threading.active_count() <= before + 3


# ------------------------------------------------------------------------------------------------------------- asyncio


@tasks_only
async def test_what_the_leader_does_is_cancelled_when_it_leads_no_longer(api: Api, server: Server) -> None:
    told: list[str] = []

    async def lead(lease: fastlock.Lease) -> None:
        told.append("begin")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            told.append("end")

    async def loss(lease: fastlock.Lease) -> None:
        told.append("loss")

    client = api.client(server.url)
    async with client.leader(NAME, on_gain=lead, on_loss=loss) as election:
        for number in range(1, 4):
            await until(api, lambda number=number: told.count("begin") == number, "its begin")
            await election.resign()
    assert told == ["begin", "end", "loss"] * told.count("begin") and told.count("begin") >= 3


@tasks_only
async def test_a_loss_cancels_what_the_leader_does(api: Api, server: Server, probe: redis.Redis, often: None) -> None:
    ended = asyncio.Event()

    async def lead(lease: fastlock.Lease) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with api.client(server.url).leader(NAME, on_gain=lead, timeout=2) as election:
        assert await election.wait(SOON)
        probe.delete(NAME)
        await asyncio.wait_for(ended.wait(), SOON)


@tasks_only
async def test_a_leader_that_has_nothing_more_to_do_leads_on(api: Api, server: Server) -> None:
    async def lead(lease: fastlock.Lease) -> None: ...

    async with api.client(server.url).leader(NAME, on_gain=lead) as election:
        assert await election.wait(SOON)
        await asyncio.sleep(0.01)
        assert election.is_leader


@tasks_only
async def test_without_an_event_loop_it_is_refused(api: Api, server: Server) -> None:
    def make() -> None:
        client = fastlock.asyncio.Client.from_url(server.url)
        client.leader(NAME, start=False)
        with pytest.raises(RuntimeError, match="start=False"):
            client.leader(NAME)

    await asyncio.to_thread(make)


def test_a_loop_that_ends_ends_its_elections(server: Server, probe: redis.Redis, impl: str) -> None:
    client = fastlock.asyncio.Client.from_url(server.url)
    told: list[str] = []
    election = client.leader(NAME, start=False, on_loss=lambda lease: told.append("loss"))

    async def main(close: bool) -> None:
        election.start()
        assert await election.wait(SOON)
        if close:
            await client.close()

    for close in (False, True):
        asyncio.run(main(close))
        assert not election.running and not election.is_leader and not probe.exists(NAME)
    assert told == ["loss", "loss"]
