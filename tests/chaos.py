"""The chaos: many processes that want the same few names, while they are killed, stopped, interrupted and cut off.

    python -m tests.chaos --kind plain --seconds 300 --processes 8 [--seed N] [--server valkey|redis|floor] [--impl ...]

Half of the workers wait in threads, half in asyncio (`support/callers.py`, `kind_callers.py`). The chaos picks actions
at random: it kills workers, which are replaced, stops them for up to 1.5 s, or (`freeze`) beyond a lease that one
holds, sends Ctrl-C and signals whose handlers raise, cuts connections at the server, makes it forget scripts, pause,
stand still (`freeze_server`), or restart with its data or (`wipe`) without. All connections of fastlock's clients are
cut at any byte of what passes (`support/cutter.py`). `support/judge.py` lists what must hold; holders with a fence also
write to the register (`register.py`). At the end all workers exit, and no key is left but counters of fences.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import redis

import fastlock
from fastlock._protocol.lease import now
from fastlock.embedded import Server

sys.path.insert(0, str(Path(__file__).resolve().parent))  # support/ is on the path of pytest, not of `python -m`

from support.callers import ACTED, LONGEST, OVER, RIVAL, SHORTEST, WIPED, Caller, Plan, Worker
from support.cutter import Cutter
from support.event_log import Reader
from support.judge import History, Judge, Size
from support.kind_callers import (
    FairCaller,
    KeptCaller,
    MultiCaller,
    ReadWriteCaller,
    ReentrantCaller,
    RenewedCaller,
    SemaphoreCaller,
    UnconfirmedCaller,
)
from support.kind_judges import PERMITS, KeptJudge, MultiJudge, ReadWriteJudge, SemaphoreJudge, SharedJudge
from support.plants import MISTAKES, plant
from support.register import Writes, judge_writes, read
from support.servers import Servers

CALLERS = 4  # of each worker
ACTIONS_PER_SECOND = 10.0
ACTIONS = {
    **{"kill": 2, "stop": 4, "interrupt": 4, "raise_in_handler": 8, "cut": 24, "cut_messages": 16, "flush": 6},
    **{"pause": 1, "freeze_server": 1, "restart": 1, "wipe": 1},
}
MILD = {"cut": 12, "cut_messages": 8, "flush": 3}  # beside a planted violation: actions on workers would excuse a lot
SIZES = (2, 3, 5, None)  # to which semaphores are resized
FREEZES = 3  # of the actions
LONGEST_STOP, LONGEST_PAUSE = 1.5, 0.3  # seconds
STARTUP = 1.0  # seconds: before that a worker is still starting, and is spared a Ctrl-C
EXIT_SECONDS = 30.0  # seconds in which all workers have to exit at the end
QUEUES = 10.0  # seconds for which a queue outlives its last use
WITHOUT_END = -0.001  # what PTTL says of a key that does not expire
LONG = 30.0  # seconds of a run that has to have met all that it is about
PLANTS = (*ACTED, "stale", *MISTAKES)


@dataclass(frozen=True)
class Kind:
    """One kind of lock in the chaos: who wants it, who judges, how many names there are, and whether holders write to
    the register by their fences."""

    caller: type[Caller]
    judge: type[Judge]
    names: int
    fenced: bool = False
    resized: int = 0  # how many of the actions resize a semaphore

    @property
    def actions(self) -> dict[str, int]:
        return {**ACTIONS, "resize": self.resized, "freeze": FREEZES}


KINDS = {
    "plain": Kind(Caller, Judge, 8, fenced=True),
    "fair": Kind(FairCaller, Judge, 8, fenced=True),
    "unconfirmed": Kind(UnconfirmedCaller, Judge, 8, fenced=True),
    "kept": Kind(KeptCaller, KeptJudge, 24, fenced=True),
    "reentrant": Kind(ReentrantCaller, Judge, 6, fenced=True),
    "renewed": Kind(RenewedCaller, Judge, 8, fenced=True),
    "read-write": Kind(ReadWriteCaller, ReadWriteJudge, 4, fenced=True),
    "semaphore": Kind(SemaphoreCaller, SemaphoreJudge, 3, resized=4),
    "multi": Kind(MultiCaller, MultiJudge, 5),
}


def work(plan: Plan, number: int, api: str, kind: Kind) -> None:
    """A worker's process."""
    plant(plan.plant)
    Worker(plan, number, api, kind.caller).run()


class Victim:
    """A worker as the chaos sees it."""

    def __init__(self, plan: Plan, number: int, api: str, kind: Kind) -> None:
        self.number, self.api, self.born = number, api, now()
        self.reader = Reader(plan.folder / f"{number}.events", number)
        self.process = multiprocessing.get_context("fork").Process(target=work, args=(plan, number, api, kind))
        self.process.start()
        self.stopped = 0.0  # since when
        self.interrupted = self.born

    def signal(self, number: int) -> None:
        """Send a signal to a process that lives: the pid of one that ended by itself may be another's by now."""
        if self.process.exitcode is None and self.process.pid:
            os.kill(self.process.pid, number)


class Chaos:
    """One run: workers, the actions on them, and what was observed."""

    def __init__(self, server: Server, plan: Plan, kind: Kind, processes: int, plant: str = "") -> None:
        self.plan, self.kind, self.plant, self.server = plan, kind, plant, server
        self.rng = random.Random(f"{plan.seed}/hand")
        self.probe = redis.Redis.from_url(server.unix_url, client_name="hand")
        self.client = fastlock.Client.from_url(server.unix_url)
        self.history = History()
        self.counts: Counter[str] = Counter()
        self.deck: list[str] = []  # actions to come: however short the run, none is left out by chance
        self.wrong: list[str] = []
        self.numbers = itertools.count()
        self.later: list[tuple[float, int, Callable[[], None]]] = []  # calls to come, and when
        self.workers: list[Victim] = []
        self.gone: list[Victim] = []
        self.writes = Writes()
        self.ended = 0.0  # seconds that the workers took to end when the actions had
        for number in range(processes):
            self.start_worker("asyncio" if number % 2 else "threads")

    def start_worker(self, api: str) -> None:
        number = next(self.numbers)
        plan = replace(self.plan, plant=self.plant) if number == 0 else self.plan
        self.workers.append(Victim(plan, number, api, self.kind))

    # ------------------------------------------------------------------------------------------------------ actions

    def kill(self) -> None:
        victim = self.rng.choice(self.workers)
        self.history.kills[victim.number] = now()
        victim.signal(signal.SIGKILL)
        self._continued(victim)
        self.remove_worker(victim)
        self.start_worker(victim.api)

    def remove_worker(self, victim: Victim) -> None:
        victim.process.join()
        self.workers.remove(victim)
        self.gone.append(victim)

    def stop(self) -> None:
        self.stop_until(self.rng.choice(self.workers), now() + self.rng.uniform(0.01, LONGEST_STOP))

    def stop_until(self, victim: Victim, end: float) -> None:
        if not victim.stopped:
            victim.stopped = now()
            victim.signal(signal.SIGSTOP)
            self.at(end, lambda: self.resume(victim))

    def freeze(self) -> None:
        """Stop a worker that holds a name for longer than its lease; others will have the name then."""
        holders = [(victim, end) for victim in self.workers for end in self.lease_ends(victim)]
        if holders:
            victim, end = self.rng.choice(holders)
            self.stop_until(victim, end + self.rng.uniform(0.1, 0.5))

    def lease_ends(self, victim: Victim) -> list[float]:
        """When the leases end that a worker holds, by its event log: those with fences, if there is a register."""
        victim.reader.read()
        held = [each for each in victim.reader.requests.values() if each.released == math.inf]
        return [each.deadline for each in held if each.deadline > now() and (each.fence or not self.kind.fenced)]

    def resume(self, victim: Victim) -> None:
        if victim.stopped:
            victim.signal(signal.SIGCONT)
            self._continued(victim)

    def _continued(self, victim: Victim) -> None:
        if victim.stopped:
            self.history.stops[victim.number].append((victim.stopped, now()))
            victim.stopped = 0.0

    def interrupt(self) -> None:
        victim = self.rng.choice(self.workers)
        # a second Ctrl-C would hit it while it cleans up
        if not victim.stopped and now() - victim.interrupted > STARTUP:
            victim.interrupted = now()
            victim.signal(signal.SIGINT)

    def cut(self, kind: str = "normal") -> None:
        clients = [each for each in self.probe.client_list(_type=kind) if each["name"] not in (RIVAL, "hand")]
        if clients:
            self.probe.client_kill_filter(_id=self.rng.choice(clients)["id"])

    def cut_messages(self) -> None:
        self.cut("pubsub")

    def flush(self) -> None:
        self.probe.script_flush()

    def raise_in_handler(self) -> None:
        threads = [each for each in self.workers if each.api == "threads" and not each.stopped]
        victim = self.rng.choice(threads or self.workers)
        if threads and now() - victim.interrupted > STARTUP:
            victim.interrupted = now()
            victim.signal(signal.SIGALRM)

    def restart(self, save: str = "100000 100000") -> float:
        """Restart the server as the same process, which loads what it saved. Returns when the old one had ended."""
        start = now()
        self.probe.config_set("save", save)
        with contextlib.suppress(redis.exceptions.ConnectionError):
            self.probe.execute_command("DEBUG", "RESTART", "0")
        ended = now()
        while now() < start + EXIT_SECONDS:
            with contextlib.suppress(redis.exceptions.RedisError):
                self.probe.ping()
                break
            time.sleep(0.001)
        self.history.pauses.append((start, now()))
        (Path(self.probe.config_get("dir")["dir"]) / "dump.rdb").unlink(missing_ok=True)
        return ended

    def note_wipe(self, when: str) -> None:
        """Tell the workers when the server lost its data; they read the file at any moment, so it is replaced."""
        written = self.plan.folder / f"{WIPED}.new"
        written.write_text(when)
        written.replace(self.plan.folder / WIPED)

    def wipe(self) -> None:
        """Restart the server empty: earlier leases are worth nothing, and no client can know."""
        start = now()
        self.note_wipe("inf")
        ended = self.restart(save="")
        self.note_wipe(str(now()))
        self.history.wipes.append((start, ended))

    def pause(self) -> None:
        seconds, start = self.rng.uniform(0.02, LONGEST_PAUSE), now()
        self.probe.client_pause(int(seconds * 1000))
        self.probe.ping()  # answered when the pause has ended
        self.history.pauses.append((start, now()))

    def freeze_server(self) -> None:
        start = now()
        os.kill(self.server.pid, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.02, LONGEST_PAUSE))
        os.kill(self.server.pid, signal.SIGCONT)
        self.history.pauses.append((start, now()))

    def resize(self) -> None:
        self.set_size(self.rng.randrange(self.plan.names), self.rng.choice(SIZES))

    def set_size(self, name: int, size: int | None) -> None:
        """Resize a semaphore; when exactly is not known."""
        start = now()
        self.client.semaphore(f"hot:{name}", PERMITS).resize(size)
        self.history.sizes[name].append(Size(start, now(), size))

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.later, (when, id(call), call))

    def act(self) -> None:
        """Take the next action, and schedule the one after it."""
        if not self.deck:
            self.deck = list(Counter(MILD if self.plant else self.kind.actions).elements())
            self.rng.shuffle(self.deck)
        name = self.deck.pop()
        self.counts[name] += 1
        with contextlib.suppress(redis.exceptions.ResponseError):  # the client to be cut may have gone by itself
            getattr(self, name)()
        self.at(now() + self.rng.expovariate(ACTIONS_PER_SECOND), self.act)

    # ------------------------------------------------------------------------------------------------------ the run

    def run(self, seconds: float, progress: Callable[[Chaos], None]) -> Judge:
        end, told = now() + seconds, now()
        self.at(now(), self.act)
        while now() < end:
            when, _, call = heapq.heappop(self.later)
            time.sleep(max(0.0, min(when, end) - now()))
            call()
            for victim in [each for each in self.workers if not each.process.is_alive()]:
                self.wrong.append(f"worker {victim.number} ended by itself: {victim.process.exitcode}")
                self.remove_worker(victim)
                self.start_worker(victim.api)
            if now() > told + 10:
                told = now()
                progress(self)
        ended = now()
        self.stop_workers()
        self.ended = now() - ended
        for name in self.history.sizes:
            self.set_size(name, None)
        self.client.close()
        self.nothing_is_left()
        return self.judge()

    def stop_workers(self) -> None:
        """Have all workers finish what they do, and exit."""
        (self.plan.folder / OVER).touch()
        self.history.end = now()
        for victim in self.workers:
            self.resume(victim)
        end = now() + EXIT_SECONDS
        for victim in list(self.workers):
            victim.process.join(max(0.0, end - now()))
            if victim.process.exitcode != 0:
                self.wrong.append(f"worker {victim.number} did not exit: {self.stuck(victim)}")
            self.remove_worker(victim)

    def stuck(self, victim: Victim) -> str:
        """End a worker that does not exit. Returns its exit code, or where it hangs."""
        if victim.process.exitcode is not None:
            return str(victim.process.exitcode)
        for number in (signal.SIGUSR1, signal.SIGUSR2) if victim.api == "asyncio" else (signal.SIGUSR1,):
            victim.signal(number)
            time.sleep(0.5)
        victim.process.kill()
        return (self.plan.folder / f"{victim.number}.stacks").read_text()

    def left(self, pattern: str) -> list[bytes]:
        return [key for key in self.probe.scan_iter(pattern, count=1000) if not key.startswith(b"fastlock:fence:")]

    def nothing_is_left(self) -> None:
        """Check that names are gone after the longest lease, and that the server deletes queues when they expire."""
        end = now()
        while (keys := self.left("hot:*")) and now() < end + LONGEST + 1:
            time.sleep(0.05)
        left = {key: self.probe.pttl(key) / 1000 for key in self.left("*")}
        found = {*keys, *(key for key, seconds in left.items() if seconds == WITHOUT_END or seconds > QUEUES)}
        if found:
            self.wrong.append(f"left at the server {now() - end:.0f} s after the end: {sorted(found)[:5]}")

    def read(self) -> int:
        """Read all event logs up to now; returns the number of requests."""
        for victim in self.workers + self.gone:
            victim.reader.read()
        return sum(len(each.reader.requests) for each in self.workers + self.gone)

    def judge(self) -> Judge:
        self.read()
        self.history.requests = [each for victim in self.gone for each in victim.reader.requests.values()]
        judge = self.kind.judge(self.history, max(LONGEST, self.plan.shortest))
        complaints = [path.read_text() for path in sorted(self.plan.folder.glob("*.wrong"))]
        if self.plan.register:
            self.writes = judge_writes(read(redis.Redis.from_url(self.plan.register)), self.history.stops)
        judge.wrong += self.wrong + complaints + self.writes.wrong
        return judge


def run_chaos(
    server: Server, register: Server, args: argparse.Namespace, name: str, progress: Callable[[Chaos], None]
) -> tuple[Chaos, Judge]:
    """A whole run on an empty server."""
    kind = KINDS[name]
    redis.Redis.from_url(register.unix_url).flushall()
    with tempfile.TemporaryDirectory(prefix="fastlock-chaos-") as folder:
        writes, names = register.unix_url if kind.fenced else "", args.names or kind.names
        cutter = Cutter(server.path, args.seed)
        plan = Plan(server.unix_url, Path(folder), args.seed, names, CALLERS, "", args.shortest, writes, cutter.url)
        chaos = Chaos(server, plan, kind, args.processes, args.plant)
        try:
            judge = chaos.run(args.seconds, progress)
            chaos.counts["cut at a byte"] = cutter.cuts
            return chaos, judge
        finally:
            for victim in chaos.workers:  # none, unless there was an error
                victim.process.kill()
            cutter.close()


def play(args: argparse.Namespace, name: str) -> int:
    """Play one kind, and print what was found; returns the number of violations."""
    started = time.monotonic()

    def progress(chaos: Chaos) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {chaos.read():8} requests  {dict(chaos.counts)}", flush=True)

    options = () if args.server == "floor" else ("--enable-debug-command", "yes")
    servers = Servers()
    with servers.start(args.server, args=options) as server, servers.start(args.server) as register:
        chaos, judge = run_chaos(server, register, args, name, progress)
    if args.seconds >= LONG and not args.plant:
        judge.wrong += too_little(chaos, judge)
    cell = f"{fastlock.IMPLEMENTATION} {args.server} seed {args.seed}"
    print(f"{name}, {cell}: {args.processes} processes, {args.seconds:g} seconds, {dict(chaos.counts)}")
    print(f"{len(judge.history.requests)} requests, {judge.grants:.0f} grants, {judge.seen()}" * (not judge.wrong))
    print(
        f"longest gap {judge.longest_gap:.3f} s, longest wait {judge.longest_wait:.3f} s "
        f"({judge.longest_excused:.3f} s with what is excused), "
        f"overtaken at most {judge.overtaken} times, {judge.excused / (judge.waited or 1):.0%} of the waiting excused; "
        f"all were served {chaos.ended:.1f} s after the last action"
    )
    if chaos.plan.register:
        writes = chaos.writes
        print(f"register: {writes.accepted} accepted, {writes.refused} refused, {writes.stopped} after a stop")
    for line in judge.wrong[:50]:
        print(f"WRONG: {line}")
    print(f"{len(judge.wrong)} violations", flush=True)
    return len(judge.wrong)


def too_little(chaos: Chaos, judge: Judge) -> list[str]:
    """What a long run has to have met, else it proves little."""
    missing = []
    if chaos.plan.register and not chaos.writes.stopped:
        missing.append(f"no holder that was stopped wrote by an old fence: {chaos.writes}")
    if isinstance(judge, SharedJudge) and judge.most < 2:
        missing.append("nobody ever held a name beside another")
    if isinstance(judge, KeptJudge) and judge.taken < judge.grants / 20:
        missing.append(f"hardly a lease was taken that was kept: {judge.taken} of {judge.grants:.0f}")
    if isinstance(judge, MultiJudge) and not judge.several:
        missing.append("nobody ever held several names")
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="plain", help="all: one after the other")
    parser.add_argument("--minutes", type=float, default=10, help="of each kind")
    parser.add_argument("--seconds", type=float, help="of each kind, instead of minutes")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--names", type=int, help="the fewer, the more callers of a process wait for each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shortest", type=float, default=SHORTEST, help="seconds of the shortest leases")
    parser.add_argument("--server", choices=("valkey", "redis", "floor"), default="valkey")
    parser.add_argument("--impl", choices=("cython", "python"), default="cython")
    parser.add_argument("--plant", choices=PLANTS, default="", help="commit a violation, which has to be found")
    args = parser.parse_args()
    args.seconds = args.minutes * 60 if args.seconds is None else args.seconds
    if args.impl != fastlock.IMPLEMENTATION:  # it is chosen when fastlock is imported, so start again
        os.environ["FASTLOCK_IMPL"] = args.impl
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    # a shell's background jobs would inherit that SIGINT is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wrong = [play(args, name) for name in (KINDS if args.kind == "all" else [args.kind])]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
