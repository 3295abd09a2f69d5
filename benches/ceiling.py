"""What redis-benchmark or valkey-benchmark reaches with the same two commands, and the raw round trip.

What lives here: runners that take part like a rival. Acquires are measured on free names and releases on held ones,
each alone: pairs/s = 1 / (1/acquires + 1/releases). The tool draws names at random, out of four times as many as there
are commands: about 88 % of the commands find the name free (or held) as they should, the others cost the server less,
so that the ceiling errs upwards. Never here: locks, worker processes.
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
from .workers import Meanwhile, RunSpec

MOST = 50_000
"""Commands of a run at most: four times as many keys are filled, which must not take longer than the run."""

TOOLS = ("valkey-benchmark", "redis-benchmark")
TOKEN = "0123456789abcdef0123456789abcdef"
SPARE = 4  # names per command, see above


def find_tool() -> str | None:
    """The path of the server's benchmark program; None if there is none on PATH."""
    return next(filter(None, map(shutil.which, TOOLS)), None)


def command_of(url: str, opcode: int, key: str) -> list[str]:
    """The command that fastlock sends to the server for an opcode; the handshake has loaded fastlock's scripts."""
    with fastlock.Client.from_url(url) as client:
        capabilities = frozenset(client.server_info()["capabilities"])
    values = {commands.NAME: key, commands.TOKEN: TOKEN, commands.MS: str(LEASE * 1000)}
    template = commands.command_table(capabilities)[opcode]
    return [part.decode() if isinstance(part, bytes) else values[part] for part in template]


def parse_rate(output: str) -> float:
    """Requests per second, read from the output of the tool's ``--csv``. Raises ValueError on anything else."""
    lines = list(csv.reader(io.StringIO(output)))
    if len(lines) != 2 or "rps" not in lines[0]:
        raise ValueError(f"not the CSV of a benchmark run: {output!r:.200}")
    return float(lines[1][lines[0].index("rps")])


class Ceiling:
    """The runner ``ceiling`` of ``batch``: the server's own benchmark tool with the same commands, as fast as it can.

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

    def open(self, scenario: str, label: str, specs: Sequence[RunSpec]) -> None:
        """Find out which commands fastlock sends to this server."""
        self._best: tuple[int, int] | None = None
        self._prefix = f"{label}:"
        key = f"{self._prefix}__rand_int__"
        self._acquire = command_of(self._target.url, Opcode.ACQUIRE, key)
        self._release = command_of(self._target.url, Opcode.RELEASE, key)
        self._sock = raw.RawSocket(self._target.url)
        words = [word for word in self._acquire if word not in (key, TOKEN)]
        self.versions |= {"acquire": " ".join(words), "release": self._release[0]}

    def run(self, spec: RunSpec, meanwhile: Meanwhile | None = None) -> Sample:
        """Run the acquires, then the releases, each with the better number of connections, which the first run finds
        out. CPU is left out, as the keys are filled meanwhile."""
        count = min(MOST, max(256, int(spec.seconds * self.pace)))
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
        for _ in range(
            2
        ):  # seen once on a busy machine: the server dropped all connections of the tool, which does not retry
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
    """The runner ``hiredis`` of ``handover``: the same tool with one connection and one command at a time, which is
    what a pair costs a caller in C that uses libhiredis."""

    name = "hiredis"
    pipeline = 1
    clients = (1,)
    pace = 10_000


class RoundTrip:
    """The runner that is measured beside every round: two PINGs over a blocking socket, what two waits cost here.

    Waking a sleeping thread costs 5 us on one machine and 40 us on the next: all latencies are read beside this one.
    """

    name = "round trip"

    def __init__(self, url: str) -> None:
        self._url = url
        self.versions: dict[str, str] = {}

    def open(self, scenario: str, label: str, specs: Sequence[RunSpec]) -> None:
        """Connect the socket."""
        self._sock = raw.RawSocket(self._url)

    def run(self, spec: RunSpec, meanwhile: Meanwhile | None = None) -> Sample:
        """Send pairs of PINGs for the seconds of the run."""
        before = time.process_time()
        laps = self._sock.ping_pairs(spec.seconds)
        cpu = time.process_time() - before
        histograms = {"latency": encode(laps)}
        return Sample(len(laps), sum(laps) / 1e9, len(laps), len(laps), cpu, histograms=histograms)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
