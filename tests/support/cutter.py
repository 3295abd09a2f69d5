"""A process between clients and a server on unix sockets, which ends each connection in the middle of whatever passes.

After a number of bytes in one of its directions, chosen by chance, a connection passes on what is left of these, and
ends: a request, a reply or a message is cut at any byte. What a client has sent before it was killed still arrives.
Half of the directions are a network that takes its time, so that replies, messages and requests cross.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

MEAN_BYTES = 2_000, 20_000, 200_000, 2_000_000  # of a direction until it is cut; all scripts are 92,000
MEAN_DELAYS = 0.0, 0.0, 0.001, 0.005  # seconds by which a direction holds back what passes


class Cutter:
    """The process, and the URL for clients. `cuts` counts the connections that it has ended."""

    def __init__(self, server: str, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fastlock-cutter-")
        path = str(Path(self._folder.name) / "s")
        self.url = f"unix://{path}"
        self._cuts = multiprocessing.Value("L", 0)
        ready = multiprocessing.Event()
        self._process = multiprocessing.Process(target=_run, args=(path, server, seed, self._cuts, ready), daemon=True)
        self._process.start()
        ready.wait()

    @property
    def cuts(self) -> int:
        return int(self._cuts.value)

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def _run(path: str, server: str, seed: int, cuts: Any, ready: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    rng, parent = random.Random(f"{seed}/cutter"), os.getppid()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left, delay = int(rng.expovariate(1 / rng.choice(MEAN_BYTES))), rng.choice(MEAN_DELAYS)
        while data := await reader.read(65536):
            if delay:
                await asyncio.sleep(delay * rng.uniform(0, 2))
            writer.write(data[:left])
            await writer.drain()
            left -= len(data)
            if left <= 0:
                cuts.value += 1
                return

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_unix_connection(server)
        except OSError:
            writer.close()
            return
        ways = [asyncio.create_task(pass_on(*each)) for each in ((reader, upstream[1]), (upstream[0], writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, upstream[1]):
            end.close()

    async def main() -> None:
        async with await asyncio.start_unix_server(serve, path):
            ready.set()
            while os.getppid() == parent:
                await asyncio.sleep(1)

    asyncio.run(main())
