"""The periods of a job that one of a fleet runs: how a period is claimed, by the server's clock, together with the lock
under which the job runs.

A period is claimed once: by the script that acquires the lock, so that a claim whose reply was lost is confirmed by its
token. A run that goes on into the next period claims that, too, and runs it not. Never here: sockets, asyncio, threads,
sleep, what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fastlock._protocol import commands
from fastlock._protocol.commands import Script
from fastlock._protocol.lease import Lease
from fastlock._protocol.retry import RetryState, execute, resolve, run_script, with_undo
from fastlock._protocol.steps import Clock, RawCommands, Steps, lease_end
from fastlock._protocol.undo import Undo

CLAIM_LUA = Script("tokens", "claim_period")
SKIP_LUA = Script("tokens", "skip_period")
LONGEST_WAIT = 60.0  # seconds for which this process's clock is trusted to run as the server's
SHORTEST_WAIT = 0.001  # seconds


@dataclass(frozen=True, slots=True)
class Claim:
    """What became of a claim. lease: of the run, or None: the period is not the caller's to run. time: by this
    process's clock, when the period ends, or when to ask again."""

    lease: Lease | None
    time: float


@lru_cache(1024)
def period_key(name: bytes) -> bytes:
    """The key of the end of the last period of a job that was claimed."""
    return commands.beside(b"fastlock:every:", name)


class ClaimPeriod(RawCommands):
    """Request: claim the current period."""

    def __init__(self, name: bytes, token: bytes, lease_ms: int, period_ms: int, first: int) -> None:
        keys = (name, period_key(name), commands.fence_key(name))
        numbers = (b"%d" % lease_ms, b"%d" % period_ms, b"%d" % commands.FENCE_KEPT_MS, b"%d" % first)
        super().__init__([(b"EVALSHA", CLAIM_LUA.sha, b"3", *keys, token, *numbers)])
        self.name = name
        self.token = token

    def undo(self) -> Undo:
        return Undo([self.name], [self.token], self.stale)


def claim(
    name: object, key: bytes, token: bytes, lease_ms: int, period_ms: int, first: int, clock: Clock
) -> Steps[Claim]:
    """Claim the current period of a job, and acquire its lock. first: not before this time, of the server's clock in
    milliseconds."""
    request, retry = ClaimPeriod(key, token, lease_ms, period_ms, first), RetryState(clock)
    steps = _claimed(request, retry)
    claimed, ms, fence = yield from with_undo(steps, lambda: request.undo() if retry.outcome_unknown else None)
    time = request.sent + ms / 1000
    if not claimed:
        return Claim(None, time)
    lease = Lease(name, key, token, lease_end(request.sent, lease_ms), fence)
    lease._since = request.sent
    if clock() >= lease._deadline:  # it ended before the reply came: the period is run by nobody
        yield request.undo()
        return Claim(None, time)
    return Claim(lease, time)


def _claimed(request: ClaimPeriod, retry: RetryState) -> Steps[tuple[int, int, int]]:
    reply = yield from run_script(request, (yield request), _is_claim_reply, retry)
    claimed, ms, fence = reply
    return claimed, ms, fence


def skip(lease: Lease, period_ms: int, clock: Clock) -> Steps[float]:
    """Claim the current period for no run, as an earlier one goes on. Returns when it ends, by this process's clock."""
    keys = (lease._key, period_key(lease._key))
    request = RawCommands([(b"EVALSHA", SKIP_LUA.sha, b"2", *keys, lease._raw_token, b"%d" % period_ms)])
    try:
        _, ms = yield from run_script(request, (yield request), _is_skip_reply, RetryState(clock))
    except BaseException:
        # It may be executed later: no other caller may have been handed the lock by then, by the same token
        lease._token_read = True
        raise
    return request.sent + ms / 1000  # type: ignore[no-any-return]  # as was checked


def end_of_period(period_ms: int, clock: Clock) -> Steps[int]:
    """When the current period ends, by the server's clock in milliseconds."""
    request, retry = RawCommands([(b"TIME",)]), RetryState(clock)
    answer = yield from execute(request, retry)
    while not _is_time(answer):
        refused = answer[0] if len(answer) == 1 and isinstance(answer[0], Exception) else ("odd", answer)
        answer = yield from resolve(request, refused, retry)
    seconds, micros = map(int, answer[0])
    time = seconds * 1000 + micros // 1000
    return time + period_ms - time % period_ms


def wait_before(time: float, now: float) -> float:
    """Seconds to wait before asking again, where there is nothing to do until `time`: half of a long wait, as the two
    clocks may run apart, and the server's may be set."""
    left = max(SHORTEST_WAIT, time - now)
    return left if left <= LONGEST_WAIT else max(LONGEST_WAIT, left / 2)


def _is_claim_reply(reply: object) -> bool:
    return type(reply) is list and len(reply) == 3 and all(type(each) is int for each in reply)


def _is_skip_reply(reply: object) -> bool:
    return type(reply) is list and len(reply) == 2 and all(type(each) is int for each in reply)


def _is_time(answer: object) -> bool:
    if type(answer) is not list or len(answer) != 1 or type(answer[0]) is not list or len(answer[0]) != 2:
        return False
    return all(type(each) is bytes and each.isdigit() for each in answer[0])
