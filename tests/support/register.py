"""The register of the chaos: a value for each name, on a server that is never restarted, which refuses stale writers.

Holders with a fence write to it by `fastlock.fencing`, as users do, also those that were stopped and hold nothing any
more. The server notes each attempt in a list, in the script that checks the fence, so the list has them in the order in
which they were decided. `read` and `judge_writes` tell at the end whether each was decided as it should be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from fastlock import fencing
from fastlock._protocol.lease import now

from .judge import Span

COMPARED = "tonumber(newest) > tonumber(ARGV[1])"
NOTED = """
local note, history = table.remove(ARGV), table.remove(KEYS)
local function check()
%s
end
local newest = check()
redis.call('RPUSH', history, note .. ' ' .. (newest or 'accepted'))
return newest
"""


class Noted:
    """A redis-py client as `fencing.set` takes it, whose server notes the attempt. blind: it accepts all of them."""

    def __init__(self, client: Any, history: str, note: str, blind: bool) -> None:
        self.client, self.history, self.note, self.blind = client, history, note, blind

    def register_script(self, script: bytes) -> Callable[[list[Any], list[Any]], Any]:
        text = script.decode()
        assert COMPARED in text
        checked = NOTED % (text.replace(COMPARED, "false") if self.blind else text)
        return lambda keys, args: self.client.eval(checked, len(keys) + 1, *keys, self.history, *args, self.note)


class Register:
    """The register as a worker sees it. blind: what it writes is accepted, however old its fence."""

    def __init__(self, client: Any, worker: int, blind: bool) -> None:
        self.client, self.worker, self.blind = client, worker, blind

    def write(self, name: str, request: int, fence: int, granted: float) -> Any:
        """Write the request's number; await it where the client is one of asyncio. Raises StaleFenceError."""
        note = f"{self.worker} {request} {fence} {granted:.6f} {now():.6f}"
        client = Noted(self.client, f"history:{name}", note, self.blind)
        return fencing.set(client, f"value:{name}", f"{self.worker}/{request}", fence)


@dataclass(frozen=True)
class Attempt:
    """One attempt to write. newest: the fence because of which it was refused; None: it was accepted."""

    worker: int
    request: int
    fence: int
    granted: float  # when the writer got its lease
    sent: float
    newest: int | None = None


def read(client: redis.Redis) -> dict[str, list[Attempt]]:
    """All attempts on each name, in the order in which the register decided them."""
    attempts = {}
    for key in sorted(client.scan_iter("history:*")):
        notes = [note.decode().split() for note in client.lrange(key, 0, -1)]
        attempts[key.decode()] = [
            Attempt(*map(int, note[:3]), *map(float, note[3:5]), None if note[5] == "accepted" else int(note[5]))
            for note in notes
        ]
    return attempts


@dataclass
class Writes:
    """What became of the attempts: how many were refused, also of those whose worker was stopped since it got its
    lease; and what was decided wrongly."""

    accepted: int = 0
    refused: int = 0
    stopped: int = 0
    wrong: list[str] = field(default_factory=list)


def judge_writes(attempts: dict[str, list[Attempt]], stops: dict[int, Sequence[Span]] | None = None) -> Writes:
    """Judge the attempts: accepted fences never go back, no two holders have the same, and nobody is refused but by a
    newer one."""
    writes, stops = Writes(), stops or defaultdict(list)
    for name, tries in attempts.items():
        newest: Attempt | None = None
        for each in tries:
            if each.newest is not None:
                writes.refused += 1
                writes.stopped += any(
                    start < each.sent and end > each.granted for start, end in stops.get(each.worker, ())
                )
                if newest is None or each.newest != newest.fence or each.fence >= newest.fence:
                    writes.wrong.append(f"{name}: refused, though {newest} was the newest: {each}")
                continue
            writes.accepted += 1
            if newest is not None and each.fence < newest.fence:
                writes.wrong.append(f"{name}: an older fence was accepted: {each} after {newest}")
            elif newest is not None and each.fence == newest.fence and not same_holder(each, newest):
                writes.wrong.append(f"{name}: two holders with one fence: {each} and {newest}")
            if newest is None or each.fence > newest.fence:
                newest = each
    return writes


def same_holder(one: Attempt, other: Attempt) -> bool:
    return (one.worker, one.request) == (other.worker, other.request)
