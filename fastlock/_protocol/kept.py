"""Kept leases: after a release nobody holds the name, but the client keeps its lease, and the next acquire takes no
command.

The token of such a lease names the channel of its process from the start. Whoever then joins the server's queue, or
looks, finds that token, marks it as contended and tells that channel, each time: the lease is recalled. So does a try
of another process by a lock that keeps, which marks nothing. A lease is kept
only while that channel is heard. As VMS, GFS2 and Lustre cache their locks. What is done here at each acquire and
release stands in `local_queue.py`. Never here: sockets, who is next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from fastlock._protocol import commands, handshake
from fastlock._protocol import lease as leases
from fastlock._protocol.lease import process_id
from fastlock._protocol.moments import Moments
from fastlock._protocol.stats import Stats

if TYPE_CHECKING:
    from fastlock._protocol.lease import Lease
    from fastlock._protocol.local_queue import LocalQueue

LEAST_PAUSE, PAUSE_EACH = 0.01, 2e-6  # seconds between two looks for what has lapsed, and more for each that is kept
MOST_UNKNOWN = 1000  # recalls of leases that are not known yet, of which a client remembers the tokens


class KeptLeases(Moments):
    """The leases that one client keeps. Methods take the mutex where they change anything."""

    __slots__ = (
        *("by_key", "ended", "hears_recalls", "keeper", "kept", "mutex", "next_lapse", "refused", "stats", "unknown"),
    )

    def __init__(self, mutex: AbstractContextManager[object], stats: Stats, channel: bytes) -> None:
        super().__init__(channel)
        self.mutex = mutex
        self.stats = stats
        self.by_key: dict[bytes, LocalQueue] = {}
        self.kept: dict[bytes, LocalQueue] = {}  # the queues whose lease nobody holds, and which are not in `by_key`
        self.hears_recalls = False
        self.refused = False  # whether the client was told that its user may not hear them
        self.ended = False  # whether the client was closed, and keeps nothing any more
        self.next_lapse = math.inf  # by when `lapsed` is to be asked again
        self.unknown: dict[bytes, None] = {}  # tokens that were recalled before the reply came by which they hold
        self.keeper: Callable[[], Any] | None = None  # a weak reference to the transport, which has a timer

    @property
    def keep_channel(self) -> bytes:
        """The channel on which the leases of this process are recalled."""
        return commands.KEEP_CHANNEL + process_id()

    def expect(self, key: bytes, contended: bool) -> None:
        """As `LocalQueues.expect`."""
        raise NotImplementedError

    def close(self, queue: LocalQueue) -> None:
        """As `LocalQueues.close`."""
        raise NotImplementedError

    def on_recall(self, message: bytes) -> Lease | None:
        """Take a recall. Returns the lease that is to be released, which nobody can take any more; None: its holder is
        to release it, or there is none."""
        token, key = message[: commands.TOKEN_SIZE], message[commands.TOKEN_SIZE :]
        with self.mutex:
            queue = self.kept.get(key) or self.by_key.get(key)
            held = None if queue is None else queue.circulating
            if queue is None or held is None or held._raw_token != token:
                if len(self.unknown) >= MOST_UNKNOWN:
                    self.unknown.clear()  # each recall is repeated as long as somebody waits
                self.unknown[token] = None
                return None
            if queue.keep_until > 0:  # else it was recalled before
                self.stats.recalls += 1
                self.expect(key, True)
                queue.recall(leases.now())
            return held if key in self.kept else None

    def lapsed(self, now: float) -> list[Lease]:
        """The leases that were kept for as long as they may be, and are to be released."""
        with self.mutex:
            queues = list(self.kept.values())
            self.next_lapse = min([each.keep_until for each in queues if each.keep_until > now], default=math.inf)
            over = [each for each in queues if each.keep_until <= now]
            for each in over:
                each.keep_until = 0.0  # for a thread that has read the clock before
            return [each.circulating for each in over if each.circulating is not None]

    def lapse_time(self, now: float) -> float:
        """When to call `lapsed` next: not too often, as that looks at all that is kept."""
        return max(self.next_lapse, now + LEAST_PAUSE + len(self.kept) * PAUSE_EACH)

    def stop_keeping(self, keys: Iterable[bytes] | None = None) -> list[Lease]:
        """Keep these names no longer, or all. Returns their leases, which are to be released."""
        with self.mutex:
            found = [*self.kept.values()] if keys is None else map(self.kept.get, keys)
            queues = [each for each in found if each is not None]
            for queue in queues:
                queue.keep_until = 0.0
            return [queue.circulating for queue in queues if queue.circulating is not None]

    def recalls_heard(self, heard: bool) -> list[Lease]:
        """Note whether recalls are heard from now on. Returns the leases that are to be released, if not: recalls may
        have been lost."""
        with self.mutex:
            self.hears_recalls = heard and not self.ended
            if not heard:
                for queue in self.by_key.values():
                    queue.keep_until = 0.0
        return [] if heard else self.stop_keeping()

    def released(self, lease: Lease) -> None:
        """Forget a kept lease, whose release is on its way."""
        with self.mutex:
            queue = self.kept.get(lease._key)
            if queue is not None and queue.circulating is lease:
                del self.kept[lease._key]

    def forget_kept(self, key: bytes, token: bytes) -> None:
        """Forget that the lease by this token may be kept: it is released otherwise."""
        with self.mutex:
            queue = self.by_key.get(key)
            if queue is not None and queue.circulating is not None and queue.circulating._raw_token == token:
                queue.keep_until = 0.0
                if not queue.waiters.count:
                    self.close(queue)

    def wake_keeper(self, _: object = None) -> None:
        """Have the transport ask for what has lapsed, in time. Called without the mutex."""
        keeper = None if self.keeper is None else self.keeper()
        if keeper is not None:
            try:
                keeper.wake_keeper()
            except BaseException:  # a signal handler raised: whoever sleeps still would let the key stay for its lease
                keeper.wake_keeper()
                raise

    def tell_recalled(self, lease: Lease | None) -> None:
        """Have the transport release a lease that was recalled."""
        keeper = None if self.keeper is None or lease is None else self.keeper()
        if keeper is not None:
            keeper.recalled(lease)


class Subscription:
    """The pending reply to the SUBSCRIBE by which recalls are heard."""

    def __init__(self, queues: KeptLeases, endpoint: str) -> None:
        self.queues = queues
        self.endpoint = endpoint

    def done(self) -> bool:
        return False

    def set_result(self, reply: object) -> None:
        """Take the reply: a list, unless it was refused, or the connection broke."""
        if isinstance(reply, list):
            self.queues.recalls_heard(True)
        elif isinstance(reply, Exception) and not self.queues.refused:
            self.queues.refused = handshake.warn_of_refused_recalls(self.endpoint, reply)
