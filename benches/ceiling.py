"""What redis-benchmark or valkey-benchmark reaches with the same two commands, and the raw round trip.

These run in turn with the rivals, but hold no locks for anybody. Acquires are measured on free names and
releases on held ones, each alone: pairs/s = 1 / (1/acquires + 1/releases). The tool draws names at random, out of four
times as many as there are commands: about 88 % find what they should, the rest costs the server less, so that the
ceiling errs upwards.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import time
from collections.abc import Sequence

import fastlock
from fastlock._protocol import commands
from fastlock._protocol.commands import Opcode

from . import raw
from .rivals import LEASE
from .stats import Sample, encode
from .target import Target
from .workers import Meanwhile, Turn

MOST = 50_000
"""Commands of a run at most: keys are filled four times as many, which must not take longer than the run."""

TOOLS = ("valkey-benchmark", "redis-benchmark")
TOKEN = "0123456789abcdef0123456789abcdef"
SPARE = 4  # names per command, see above


def find_tool() -> str | None:
    """The benchmark program of the server, if one is on PATH."""
    return next(filter(None, map(shutil.which, TOOLS)), None)


def spoken(url: str, verb: int, key: str) -> list[str]:
    """The command that fastlock says for ``verb`` to that server; the handshake has loaded its scripts."""
    with fastlock.Client.from_url(url) as client:
        capabilities = frozenset(client.server_info()["capabilities"])
    values = {commands.NAME: key, commands.TOKEN: TOKEN, commands.MS: str(LEASE * 1000)}
    template = commands.command_table(capabilities)[verb]
    return [part.decode() if isinstance(part, bytes) else values[part] for part in template]


def parse_rate(output: str) -> float:
    """Requests per second out of the tool's ``--csv``. Raises ValueError on anything else."""
    lines = list(csv.reader(io.StringIO(output)))
    if len(lines) != 2 or "rps" not in lines[0]:
        raise ValueError(f"not the CSV of a benchmark run: {output!r:.200}")
    return float(lines[1][lines[0].index("rps")])


class Ceiling:
    """Takes part in ``batch``: the server's own benchmark tool with the same commands, as fast as it can.

    pipeline: commands of a write, as in the budget. clients: numbers of connections tried in the warm-up, of which the
    better one counts. pace: commands per second of which there are enough for a run.
    """

    name = "ceiling"
    pipeline = 256
    clients: tuple[int, ...] = (1, 50)
    pace = 200_000

    def __init__(self, target: Target, tool: str) -> None:
        self._target = target
        where = raw.address(target.url)
        at = ["-s", where["path"]] if "path" in where else ["-h", where["host"], "-p", str(where["port"])]
        self._base = [tool, *at, "--dbnum", str(where.get("db", 0)), "--csv", "-P", str(self.pipeline)]
        self.versions: dict[str, str] = {"tool": tool.rsplit("/", 1)[-1]}

    def open(self, scenario: str, label: str, turns: Sequence[Turn]) -> None:
        """Find out which commands this server takes."""
        self._best: tuple[int, int] | None = None
        self._prefix = f"{label}:"
        key = f"{self._prefix}__rand_int__"
        self._acquire = spoken(self._target.url, Opcode.ACQUIRE, key)
        self._release = spoken(self._target.url, Opcode.RELEASE, key)
        self._sock = raw.RawSocket(self._target.url)
        words = [word for word in self._acquire if word not in (key, TOKEN)]
        self.versions |= {"acquire": " ".join(words), "release": self._release[0]}

    def run(self, turn: Turn, meanwhile: Meanwhile | None = None) -> Sample:
        """Acquires, then releases, each with the better number of connections, which the first run finds out. CPU is
        left out: keys are filled too."""
        count = min(MOST, max(256, int(turn.seconds * self.pace)))
        acquires: dict[int, float] = {}
        releases: dict[int, float] = {}
        for clients in self.clients if self._best is None else sorted(set(self._best)):
            acquires[clients] = self._rate(self._acquire, count, clients)
            raw.fill(self._sock, self._prefix, SPARE * count, TOKEN.encode(), 6 * LEASE * 1000)
            releases[clients] = self._rate(self._release, count, clients)
            raw.remove(self._sock, self._prefix, SPARE * count)
        if self._best is None:
            self._best = max(acquires, key=acquires.__getitem__), max(releases, key=releases.__getitem__)
        seconds_a_pair = 1 / max(acquires.values()) + 1 / max(releases.values())
        return Sample(count, count * seconds_a_pair, count, count)

    def _rate(self, command: Sequence[str], count: int, clients: int) -> float:
        line = [*self._base, "-c", str(clients), "-n", str(count), "-r", str(SPARE * count), *command]
        for _ in range(2):  # seen once on a busy machine: all of its connections dropped; it does not try again
            done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
            if not done.returncode:
                break
        if done.returncode:
            raise RuntimeError(f"{self.versions['tool']} ended with {done.returncode}: {done.stderr.strip()[:200]}")
        return parse_rate(done.stdout)

    def close(self) -> None:
        """Close the connection used for filling."""
        self._sock.close()


class Hiredis(Ceiling):
    """Takes part in ``handover``: the same tool with one connection and one command at a time, which is what a pair
    costs a caller in C that uses libhiredis."""

    name = "hiredis"
    pipeline = 1
    clients = (1,)
    pace = 10_000


class RoundTrip:
    """Runs beside every round: two PINGs over a blocking socket, what the machine asks for two waits.

    To wake a sleeping thread costs 5 us on one machine and 40 us on the next: read all latencies beside it.
    """

    name = "round trip"

    def __init__(self, target: Target) -> None:
        self._url = target.url
        self.versions: dict[str, str] = {}

    def open(self, scenario: str, label: str, turns: Sequence[Turn]) -> None:
        """Connect."""
        self._sock = raw.RawSocket(self._url)

    def run(self, turn: Turn, meanwhile: Meanwhile | None = None) -> Sample:
        """Pairs of PINGs for so many seconds."""
        before = time.process_time()
        laps = self._sock.ping_pairs(turn.seconds)
        cpu = time.process_time() - before
        histograms = {"latency": encode(laps)}
        return Sample(len(laps), sum(laps) / 1e9, len(laps), len(laps), cpu, histograms=histograms)

    def close(self) -> None:
        """Disconnect."""
        self._sock.close()
