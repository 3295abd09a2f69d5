"""Remote waiters: a process with one client, which follows orders and can be killed, stopped or interrupted.

`ChildClient` is its handle in the test. The process reads orders and writes answers as lines, so that a test waits for
what has happened and not for a time. It runs the implementation of the test, in threads or asyncio as the test does.
Nothing here decides what is right.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from support.apis import Api, Job

ROOT = Path(__file__).parent.parent.parent
NAME = "sku"
QUEUE = "fastlock:queue:{sku}"
ORDER = "order"  # a list to which holders append their labels
LONG = 60.0  # seconds: a lease that does not end in a test
SOON = 10.0  # seconds: a wait that must not time out, far shorter than LONG


async def until(api: Api, holds: Callable[[], object], what: str, timeout: float = SOON) -> None:
    """Return when `holds()` is true, letting tasks run meanwhile; AssertionError when it never is."""
    began = time.monotonic()
    while not holds():
        waited = time.monotonic() - began
        assert waited < timeout, f"never: {what}"
        pause = max(0.0005, min(waited / 10, 0.01))  # to ask takes time that others need
        if api.is_async:
            await asyncio.sleep(pause)
        else:
            time.sleep(pause)


async def fired(api: Api, wait: Callable[[], object]) -> None:
    """Return when `wait` does, a blocking wait for a proxy thread such as `armed.wait`; the event loop goes on
    meanwhile."""
    await (asyncio.to_thread(wait) if api.is_async else api.get(wait()))


async def queued(api: Api, probe: redis.Redis, count: int) -> list[bytes]:
    """Wait until so many entries are in the server's queue; returns the entries."""
    await until(api, lambda: probe.zcard(QUEUE) == count, f"{count} in the queue")
    return list(probe.zrange(QUEUE, 0, -1))


async def waits(api: Api, client: Any, count: int) -> None:
    """Wait until so many callers of this client have had to wait."""
    await until(api, lambda: client.get_stats()["waits"] >= count, f"{count} waiters")


def two_connections(client: Any) -> None:
    """One of them that is not the push connection, over which waiters listen."""
    idle = client._transport.idle
    with client.lock("other:1", confirm_release=True):
        pass
    busy = idle.pop()
    with client.lock("other:2", confirm_release=True):
        pass
    idle.append(busy)


def away_from_push(client: Any) -> None:
    """The next command goes over another connection than the push connection, which may be idle."""
    transport = client._transport
    transport.idle.sort(key=lambda each: each is not transport.push_connection)


def waiters_of(lease: Any) -> Any:
    """Those who wait for the loss of a renewed lease."""
    event = lease.lost
    return event._waiting if hasattr(event, "_waiting") else event._changes._expected


async def held(api: Api, client: Any, **settings: Any) -> Any:
    """Acquire a lock; returns it."""
    lock = client.lock(NAME, **{"timeout": LONG, "thread_local": False, **settings})
    assert await api.get(lock.acquire(blocking=False))
    return lock


def wait_with(api: Api, client: Any, **settings: Any) -> tuple[Any, Job]:
    """A lock and a job that acquires it; the job does not poll every `sleep` seconds, unless `sleep` is given."""
    lock = client.lock(NAME, **{"timeout": LONG, "sleep": LONG, "thread_local": False, **settings})
    return lock, api.start(lock.acquire)


async def confirmed(api: Api, lock: Any) -> None:
    """Return when the server has confirmed the lease of a lock: it may have been believed."""
    await until(api, lambda: lock.lease.remaining and lock.lease._confirmation is None, "the confirmation")


async def either(api: Api, pairs: list[Any]) -> list[Any]:
    """The pairs of lock and job whose job is done, once at least one is."""
    await until(api, lambda: any(job.finished.is_set() for _, job in pairs), "one of them")
    return [pair for pair in pairs if pair[1].finished.is_set()]


class ChildClient:
    """A process with a client and a lock (kind: "lock", "semaphore", "read", "write"). `moment`: seconds in which it
    has to confirm its first grant, where it is not to lose its place on a slow machine. It knows these orders:

    acquire: answers "got" and the token, "nothing", "interrupted" or the error's name. release: answers "released" or
    the error's name. turn LABEL: acquire, append LABEL to ORDER, release; answers "served". queues: answers with the
    number of local queues that are left in its client.
    """

    program = __file__

    def __init__(self, api: Api, url: str, **settings: Any) -> None:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        self.api = api
        self.output: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, self.program, api.name, url, repr({"sleep": LONG, **settings})],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="child-client", daemon=True)
        self._reader.start()

    def send(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    async def wait_for_line(self, beginning: str, count: int = 1, timeout: float = SOON) -> str:
        """Wait until the process has written `count` lines that begin so; returns the last of them."""
        lines: Callable[[], list[str]] = lambda: [line for line in self.output if line.startswith(beginning)]  # noqa: E731
        await until(
            self.api, lambda: len(lines()) >= count, f"{count} times {beginning!r}, only {self.output}", timeout
        )
        return lines()[count - 1]

    async def request(self, order: str, answer: str) -> str:
        """Send an order and wait for the answer, which has to begin so."""
        before = len([line for line in self.output if line.startswith(answer)])
        self.send(order)
        return await self.wait_for_line(answer, before + 1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SOON)

    def stop(self) -> None:
        """Freeze the process; its connections stay. Returns when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(self.process.pid, os.WUNTRACED)[1])

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def __enter__(self) -> ChildClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._reader.join(SOON)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))


# ------------------------------------------------------------------------------------------------ in the child process


async def live(api: Api, url: str, settings: dict[str, Any]) -> None:
    client = api.client(url)
    client._transport.queues.moment = settings.pop("moment", client._transport.queues.moment)
    kind = settings.pop("kind", "lock")
    if kind in ("read", "write"):
        settings.pop("thread_local", None)
        lock = getattr(client.rw_lock(NAME, **settings), kind)
    else:
        lock = getattr(client, kind)(NAME, **settings)
    await api.get(client.server_info())
    print("ready", flush=True)
    while order := await (asyncio.to_thread(sys.stdin.readline) if api.is_async else api.get(sys.stdin.readline())):
        verb, _, label = order.strip().partition(" ")
        print(await obey(api, client, lock, verb, label), flush=True)


async def obey(api: Api, client: Any, lock: Any, verb: str, label: str) -> str:
    """Carry out an order; returns the answer."""
    try:
        if verb == "queues":
            return f"queues {len(client._transport.queues.by_key) + len(client._transport.queues.by_entry)}"
        if verb in ("acquire", "turn") and not await api.get(lock.acquire()):
            return "nothing"
        if verb == "acquire":
            return f"got {lock.lease.token.decode()}"
        if verb == "turn":
            note(client, label)
        await api.get(lock.release())
        return "served" if verb == "turn" else "released"
    except (KeyboardInterrupt, asyncio.CancelledError):
        return "interrupted"
    except Exception as error:
        return type(error).__name__


def note(client: Any, label: str) -> None:
    """Append the holder's label to ORDER, which shows the order of service."""
    with redis.Redis(unix_socket_path=client._settings.path) as raw:
        raw.rpush(ORDER, label)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    api = Api(sys.argv[1])
    api.run(live(api, sys.argv[2], ast.literal_eval(sys.argv[3])))
