"""The chaos: many processes that want the same few names, while they are killed, stopped, interrupted and cut off.

    python -m tests.chaos --minutes 10 --processes 8 [--seed N] [--server valkey|redis|floor] [--impl cython|python]
                          [--shortest SECONDS]

Half of the workers wait in threads, half in asyncio (`support/callers.py`: what they do). The chaos picks actions at
random: it kills workers, which are replaced, stops them for up to 1.5 s, sends Ctrl-C and signals whose handlers raise,
cuts connections at the server, makes the server forget scripts, pause, or restart with its data or (`wipe`) without.
`support/judge.py` lists what must hold all the while. At the end every worker exits in good order, and when the longest
lease has ended no key is left but counters of fences. Exit code 1: a violation.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis

import fastlock
from fastlock._protocol.lease import now
from fastlock.embedded import Server

sys.path.insert(0, str(Path(__file__).resolve().parent))  # support/ is on the path of pytest, not of `python -m`

from support.callers import LONGEST, OVER, RIVAL, SHORTEST, WIPED, Plan, Worker
from support.event_log import Reader
from support.judge import History, Judge
from support.servers import Servers

CALLERS = 4  # of each worker
ACTIONS_PER_SECOND = 10.0
ACTIONS = {
    **{"kill": 2, "stop": 4, "interrupt": 4, "raise_in_handler": 8, "cut": 24, "cut_messages": 16, "flush": 6},
    **{"pause": 2, "restart": 1, "wipe": 1},
}
MILD = {"cut": 12, "cut_messages": 8, "flush": 3}  # beside a planted violation: actions on workers would excuse a lot
LONGEST_STOP, LONGEST_PAUSE = 1.5, 0.3  # seconds
STARTUP = 1.0  # seconds: before that a worker is still starting, and is spared a Ctrl-C
EXIT_SECONDS = 30.0  # seconds in which all workers have to exit at the end
QUEUES = 10.0  # seconds for which a queue outlives its last use
PLANTS = ("claim", "squat", "fence", "key", "fail", "desert")


def work(plan: Plan, number: int, api: str) -> None:
    """A worker's process."""
    Worker(plan, number, api).run()


class Victim:
    """A worker as the chaos sees it."""

    def __init__(self, plan: Plan, number: int, api: str) -> None:
        self.number, self.api, self.born = number, api, now()
        self.reader = Reader(plan.folder / f"{number}.events", number)
        self.process = multiprocessing.get_context("fork").Process(target=work, args=(plan, number, api))
        self.process.start()
        self.stopped = 0.0  # since when
        self.interrupted = self.born

    def signal(self, number: int) -> None:
        """Send a signal to a process that lives: the pid of one that ended by itself may be another's by now."""
        if self.process.exitcode is None and self.process.pid:
            os.kill(self.process.pid, number)


class Chaos:
    """One run: workers, the actions on them, and what was observed."""

    def __init__(self, server: Server, plan: Plan, processes: int, plant: str = "") -> None:
        self.plan, self.plant = plan, plant
        self.rng = random.Random(f"{plan.seed}/hand")
        self.probe = redis.Redis.from_url(server.unix_url, client_name="hand")
        self.history = History()
        self.counts: Counter[str] = Counter()
        self.deck: list[str] = []  # actions to come: however short the run, none is left out by chance
        self.wrong: list[str] = []
        self.numbers = itertools.count()
        self.later: list[tuple[float, int, Callable[[], None]]] = []  # calls to come, and when
        self.workers: list[Victim] = []
        self.gone: list[Victim] = []
        for number in range(processes):
            self.start_worker("asyncio" if number % 2 else "threads")

    def start_worker(self, api: str) -> None:
        number = next(self.numbers)
        plan = replace(self.plan, plant=self.plant) if number == 0 else self.plan
        self.workers.append(Victim(plan, number, api))

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
        victim = self.rng.choice(self.workers)
        if not victim.stopped:
            victim.stopped = now()
            victim.signal(signal.SIGSTOP)
            self.at(now() + self.rng.uniform(0.01, LONGEST_STOP), lambda: self.resume(victim))

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

    def wipe(self) -> None:
        """Restart the server empty: earlier leases are worth nothing, and no client can know."""
        start = now()
        (self.plan.folder / WIPED).write_text("inf")
        ended = self.restart(save="")
        (self.plan.folder / WIPED).write_text(str(now()))
        self.history.wipes.append((start, ended))

    def pause(self) -> None:
        seconds, start = self.rng.uniform(0.02, LONGEST_PAUSE), now()
        self.probe.client_pause(int(seconds * 1000))
        self.probe.ping()  # answered when the pause has ended
        self.history.pauses.append((start, now()))

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.later, (when, id(call), call))

    def act(self) -> None:
        """Take the next action, and schedule the one after it."""
        if not self.deck:
            self.deck = list(Counter(MILD if self.plant else ACTIONS).elements())
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
        self.stop_workers()
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
        """Check that names are gone after the longest lease, queues when they expire."""
        end = now()
        for pattern, longest in (("hot:*", LONGEST), ("*", QUEUES)):
            while (keys := self.left(pattern)) and now() < end + longest + 1:
                time.sleep(0.05)
            if keys:
                self.wrong.append(f"left at the server {now() - end:.0f} s after the end: {keys[:5]}")

    def read(self) -> int:
        """Read all event logs up to now; returns the number of requests."""
        for victim in self.workers + self.gone:
            victim.reader.read()
        return sum(len(each.reader.requests) for each in self.workers + self.gone)

    def judge(self) -> Judge:
        self.read()
        self.history.requests = [each for victim in self.gone for each in victim.reader.requests.values()]
        judge = Judge(self.history, max(LONGEST, self.plan.shortest))
        complaints = [path.read_text() for path in sorted(self.plan.folder.glob("*.wrong"))]
        judge.wrong += self.wrong + complaints
        return judge


def run_chaos(server: Server, args: Any, progress: Callable[[Chaos], None]) -> tuple[Chaos, Judge]:
    """A whole run on an empty server."""
    with tempfile.TemporaryDirectory(prefix="fastlock-chaos-") as folder:
        plan = Plan(server.unix_url, Path(folder), args.seed, args.names, CALLERS, shortest=args.shortest)
        chaos = Chaos(server, plan, args.processes, args.plant)
        try:
            return chaos, chaos.run(args.minutes * 60, progress)
        finally:
            for victim in chaos.workers:  # none, unless there was an error
                victim.process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--names", type=int, default=8, help="the fewer, the more callers of a process wait for each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shortest", type=float, default=SHORTEST, help="seconds of the shortest leases")
    parser.add_argument("--server", choices=("valkey", "redis", "floor"), default="valkey")
    parser.add_argument("--impl", choices=("cython", "python"), default="cython")
    parser.add_argument("--plant", choices=PLANTS, default="", help="commit a violation, which has to be found")
    args = parser.parse_args()
    if args.impl != fastlock.IMPLEMENTATION:  # it is chosen when fastlock is imported, so start again
        os.environ["FASTLOCK_IMPL"] = args.impl
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    # a shell's background jobs would inherit that SIGINT is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()

    def progress(chaos: Chaos) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {chaos.read():8} requests  {dict(chaos.counts)}", flush=True)

    options = () if args.server == "floor" else ("--enable-debug-command", "yes")
    with Servers().start(args.server, args=options) as server:
        chaos, judge = run_chaos(server, args, progress)
    cell = f"{fastlock.IMPLEMENTATION} {args.server} seed {args.seed}"
    print(f"{cell}: {args.processes} processes, {args.minutes:g} minutes, {dict(chaos.counts)}")
    print(f"{len(judge.history.requests)} requests, {judge.grants:.0f} grants, never two holders" * (not judge.wrong))
    print(
        f"longest gap {judge.longest_gap:.3f} s, longest wait {judge.longest_wait:.3f} s, "
        f"overtaken at most {judge.overtaken} times, {judge.excused / (judge.waited or 1):.0%} of the waiting excused"
    )
    for line in judge.wrong[:50]:
        print(f"WRONG: {line}")
    print(f"{len(judge.wrong)} violations")
    return int(bool(judge.wrong))


if __name__ == "__main__":
    sys.exit(main())
