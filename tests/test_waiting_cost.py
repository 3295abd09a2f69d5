"""What waiting may cost at most: looks at the server, gates that are kept, a thread that would wait for itself."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from support import nested
from support.faces import Face
from support.faultproxy import FaultProxy, stall
from support.party import LONG, NAME, SOON, held, queued, until, wait_with, waits
from support.play import Clock, joined

from fastlock._gate import HAND_OVER, LOOK, PLAIN, Gates, Waiter
from fastlock._lease import Lease
from fastlock.embedded import Server

MS = 10_000


@pytest.fixture
def gates(impl: str) -> Gates:
    return Gates(contextlib.nullcontext())


def join(gates: Gates, count: int, ms: int = MS, sleep: float = 0.1) -> list[Waiter]:
    return [joined(gates, "name", b"name", ms, False, None, sleep) for _ in range(count)]


def grant(gates: Gates, waiter: Waiter, clock: Clock, elsewhere: int = 0) -> Lease:
    """The server grants the name to the first."""
    assert gates.ask(waiter, clock())
    end = clock() + waiter.ms / 1000 if waiter.ms else math.inf
    lease = Lease(waiter.name, waiter.gate.key, waiter.gate.place, end)
    lease.contended = elsewhere > 0
    waiter.gate.granted(waiter, lease, elsewhere, clock())
    return lease


def empty(gates: Gates) -> bool:
    return not gates.by_key and not gates.by_place


# --------------------------------------------------------------------------------------------- by a clock of the test


def look(gates: Gates, first: Waiter, clock: Clock, told: bool) -> float:
    """The server says to wait, for long; in how many seconds to look again."""
    assert gates.ask(first, clock())
    first.gate.queued(math.inf, told, clock())
    return first.gate.wake_at(first) - clock()


def test_the_least_patient_of_a_client_decides_how_often_its_first_looks(gates: Gates, clock: Clock) -> None:
    (first,) = join(gates, 1, sleep=5.0)
    assert look(gates, first, clock, told=False) == pytest.approx(5.0)
    (patient,) = join(gates, 1, sleep=7.0)
    assert not first.called
    (hasty,) = join(gates, 1, sleep=0.25)
    assert [each.called for each in (first, patient, hasty)] == [True, False, False], "its sleep is longer than that"
    assert look(gates, first, clock, told=False) == pytest.approx(0.25)
    join(gates, 1, sleep=0.25)
    assert not first.called, "it looks as often already"
    for waiter in list(first.gate.waiters)[2:]:
        gates.leave(waiter, clock())
    assert look(gates, first, clock, told=False) == pytest.approx(5.0), "who is gone asks for nothing"
    assert look(gates, first, clock, told=True) == pytest.approx(LOOK)
    join(gates, 1, sleep=0.25)
    assert not first.called, "who is told need not look"


@pytest.mark.parametrize("ms", [0, MS, 3_600_000])
@pytest.mark.parametrize("elsewhere", [0, 1])
def test_a_lease_that_nobody_lets_go_of_keeps_no_gate(gates: Gates, clock: Clock, ms: int, elsewhere: int) -> None:
    """Who comes then asks the server; the release that comes after all is one that knows of nobody."""
    (one,) = join(gates, 1, ms)
    lease = grant(gates, one, clock, elsewhere)
    gates.lapsed(clock())
    assert not empty(gates), "others may come as long as it can pass on to them"
    clock.go(LOOK)
    gates.lapsed(clock())
    assert empty(gates)
    assert gates.release(lease, clock()) == PLAIN
    assert lease.contended == (elsewhere > 0), "which is for the server all the same, who waited when it was granted"


def test_a_lease_that_somebody_waits_for_keeps_its_gate(gates: Gates, clock: Clock) -> None:
    one, two = join(gates, 2, 0)
    lease = grant(gates, one, clock)
    clock.go(10 * LOOK)
    gates.lapsed(clock())
    assert two.called and gates.by_key == {b"name": two.gate}
    assert gates.release(lease, clock()) == HAND_OVER


# ------------------------------------------------------------------------------------------------ on a real server


async def test_no_sleep_makes_a_busy_loop(face: Face, server: Server, probe: redis.Redis, no_look: None) -> None:
    """However short it is, the looks of a wait take a millisecond each, with what else is said to the server."""
    client = face.client(server.unix_url)
    await face.get(client.server_info())
    before = client.get_stats()["commands"]
    probe.set(NAME, "somebody else", px=300)
    lock = client.lock(NAME, sleep=0)
    assert await face.get(lock.acquire())
    assert client.get_stats()["commands"] - before < 300 + 10
    await face.get(lock.release())


@pytest.mark.parametrize("sleep", [0.01, 0])
async def test_the_least_patient_is_not_bound_by_who_came_before_it(
    face: Face, server: Server, probe: redis.Redis, sleep: float
) -> None:
    """Not for longer than a second, after which a thread that listens looks in any case."""
    client = face.client(server.unix_url)
    probe.set(NAME, "somebody else")
    first = wait_with(face, client, sleep=LONG)
    await queued(face, probe, 1)
    second = wait_with(face, client, sleep=sleep)
    await waits(face, client, 2)
    enough = client.get_stats()["commands"] + 30
    await until(face, lambda: client.get_stats()["commands"] >= enough, "30 looks")
    probe.delete(NAME)
    for lock, job in (first, second):
        assert await job.get(SOON) is True
        await face.get(lock.release())


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
async def test_an_endless_lease_is_no_burden_to_its_client(face: Face, server: Server, probe: redis.Redis) -> None:
    """Whom it was handed over to keeps it; the client soon knows no more of it than of any lock. Who waits elsewhere
    gets it nonetheless, once it is let go."""
    client, other = face.client(server.unix_url), face.client(server.unix_url)
    holder = await held(face, other)
    lock, job = wait_with(face, client, timeout=None)
    await queued(face, probe, 1)
    await face.get(holder.release())
    assert await job.get(SOON) is True and client._wire.crowd

    end = time.monotonic() + SOON
    while client._wire.crowd:
        assert time.monotonic() < end, "the lease still has its gate"
        free = client.lock("another name")
        assert await face.get(free.acquire())
        await face.get(free.release())
    behind, waiting = wait_with(face, other)
    await queued(face, probe, 1)
    await face.get(lock.release())
    assert await waiting.get(SOON) is True
    await face.get(behind.release())


# ---------------------------------------------------------------------------- a thread that is in the pipe already


@pytest.mark.parametrize("face", ["threads"], indirect=True)
@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("what", ["acquire", "release", "wait", "many"])
async def test_a_handler_of_signals_does_not_wait_for_the_thread_that_it_interrupts(
    face: Face, proxy: FaultProxy, probe: redis.Redis, connections: int, what: str, no_leaks: Any
) -> None:
    """Its reply would be read by that thread, which cannot go on. With another connection it works, else it is told."""
    client = face.client(proxy.url, max_connections=connections, reply_timeout=LONG / 2)
    main, mine, contended = client.lock(NAME), client.lock("mine"), client.lock("held", sleep=0.01)
    outcome: list[Any] = []
    mine.acquire()
    if what == "wait":
        probe.set("held", "somebody else", px=50)
    calls: dict[str, Callable[[], Any]] = {
        "acquire": lambda: client.lock("free", thread_local=False).acquire(blocking=False),
        "release": mine.release,
        "wait": contended.acquire,
        "many": lambda: client.acquire_many(["free"]),
    }

    def handler(*_: Any) -> None:
        try:
            outcome.append(calls[what]())
        except Exception as error:
            outcome.append(f"{type(error).__name__}: {error}")
        armed.resume()

    def strike() -> None:
        with contextlib.suppress(Exception):
            while not armed.fired:
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    striking = threading.Thread(target=strike)
    try:
        armed = proxy.arm(stall(), after=b"\r\nsku\r\n", times=1)
        striking.start()
        assert main.acquire(), "it goes on behind the handler"
    finally:
        striking.join()
        signal.signal(signal.SIGUSR1, before)
    main.release()
    found = outcome.pop()
    gc.collect()  # of the error: the frames in which it was raised, and the one that the handler interrupted
    if connections == 1:
        assert str(found).startswith("RuntimeError: ") and "max_connections" in found
        assert mine.lease.valid, "what could not be released is still held"
        mine.release()
    else:
        assert type(found) is not str, found
    if what != "release" and connections > 1:
        mine.release()
    if contended.lease is not None:
        contended.release()
    probe.delete("free", "held")
    assert empty(client._wire.gates)


@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("connections", [1, 16])
def test_nobody_stalls_as_handlers_of_signals_use_locks(server: Server, impl: str, connections: int) -> None:
    """At random moments of their own thread, also while it keeps what those want who read their replies."""
    program = Path(nested.__file__)
    paths = os.pathsep.join([str(program.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(program), server.unix_url, str(connections), "3"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["implementation"], report["stalls"], report["wrong"], report["left"]) == (impl, 0, [], [])
    assert report["strikes"] > 100 and (connections == 1 or not report["refused"]), report


@pytest.mark.parametrize("face", ["threads"], indirect=True)
async def test_a_handler_of_signals_may_wait_and_give_up_again_and_again(
    face: Face, proxy: FaultProxy, probe: redis.Redis, no_leaks: Any
) -> None:
    """The connection on which it listened is then the one that its thread uses, and another one listens."""
    client, found = face.client(proxy.url, reply_timeout=LONG / 2), []
    main, contended = client.lock(NAME), client.lock("held")
    holder = face.client(proxy.url).lock("held", thread_local=False)
    holder.acquire()

    def handler(*_: Any) -> None:
        try:
            found.append(contended.acquire(blocking_timeout=0.02))
        except Exception as error:
            found.append(repr(error))
        armed.resume()

    def strike() -> None:
        armed.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for count in range(5):
            armed = proxy.arm(stall(), after=b"\r\nsku\r\n", times=1)
            striking = threading.Thread(target=strike)
            striking.start()
            assert main.acquire(), "it goes on behind the handler"
            striking.join()
            main.release()
            assert found == [False] * (count + 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    holder.release()
    assert empty(client._wire.gates)
