"""The attributes of a transport that the fast path reads at each acquire and release (compiled, such a read costs
nothing), and what both transports do alike.

Never here: how to wait, decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastlock import _errors as errors
from fastlock._errors import is_own
from fastlock._protocol.acquire import Acquire
from fastlock._protocol.base_lock import BaseLock, LockRelease
from fastlock._protocol.batch_operations import InterruptedRelease
from fastlock._protocol.commands import token_matches
from fastlock._protocol.handshake import warn_of_pending_undos
from fastlock._protocol.lease import ENDED, Lease, Lost, is_inherited, now
from fastlock._protocol.local_queue import LocalQueues
from fastlock._protocol.losses import warn_of_loss
from fastlock._protocol.renewal import Renewal, Renewals, RenewalSettings
from fastlock._protocol.stats import Stats
from fastlock._protocol.steps import Abandonable, ConnectionLost, Operation, ProtocolViolation, Request
from fastlock._protocol.undo import KeptRelease, UnconfirmedRelease, Undo
from fastlock._protocol.waiters import Waiter
from fastlock._stream_errors import by_handler, is_certificate_error
from fastlock._transport.parker import Parking
from fastlock._transport.posted import PostedRelease
from fastlock._transport.settings import Settings
from fastlock._transport.undo_delivery import UndoDelivery
from fastlock._transport.writing import CLOSE_SECONDS

MOST_UNREAD = 64  # replies that may lie unread on a connection over which releases go that nobody waits for
MOST_RESENT = 1000  # releases whose tokens are remembered, for acquires that were sent before their answers came


class Transport:
    """Base of the transports for threads and for asyncio. Each sets the attributes that it has, and documents them."""

    __slots__ = (
        *("closed", "endpoint", "ever_connected", "queued_keys", "expected_keys", "pending_undos", "queues"),
        *("turn_end", "settings", "stats", "renewals", "unconfirmed", "resent"),
        *(
            "_mutex",
            "push_connection_lent",
            "connections",
            "push_connection",
            "keep_connection",
            "idle",
            "parking",
        ),  # of threads
        *("shared_timeouts", "open_stream", "sweep_timer"),  # of tasks
    )

    closed: bool
    renewals: Renewals
    queues: LocalQueues
    queued_keys: dict[bytes, Any]  # names for which callers of this client wait, or among whom a lease circulates
    expected_keys: dict[bytes, int]  # names that other clients wanted of late
    stats: Stats
    pending_undos: list[UndoDelivery]
    unconfirmed: dict[bytes, UndoDelivery | PostedRelease]  # releases that nobody waits for, not answered yet, by key
    resent: dict[bytes, bytes]  # tokens of those that were answered late: sent again, or of kept leases; by key
    settings: Settings
    endpoint: str
    ever_connected: bool
    turn_end: float  # until when kept leases are taken without letting those run who hear recalls, where they want to
    # of threads
    _mutex: Any
    connections: list[Any]
    idle: list[Any]
    push_connection: Any
    keep_connection: Any  # over which recalls are heard; None: nobody hears them just now
    push_connection_lent: int
    parking: Parking
    # of tasks
    open_stream: Any
    shared_timeouts: dict[float, Any]
    sweep_timer: Any

    def undo(self, undo: Undo) -> None:
        """Send an undo, for whose reply nobody waits; where there is no connection, it is sent over the next one."""
        raise NotImplementedError

    def enqueue(self, waiter: Waiter) -> None:
        """Put the waiter at the end of this client's local queue for its name."""
        self.queues.enqueue(waiter, now())

    def renew(self, lease: Lease, ms: int, settings: RenewalSettings, owner: object) -> None:
        """Renew a lease from now on, until it is released or lost, or its owner is gone (None: all share it)."""
        lease._renewal = renewal = Renewal(lease, ms, settings, self.ends_of(owner), self, now())
        self.renewals.add(renewal)
        self.wake_renewal(renewal.next_time(lease, now()))

    def posted(self, op: Operation[Any]) -> bool:
        """Whether the operation was sent, as a release for which its caller does not wait."""
        unconfirmed = op.unwaited(now, self.release_told)
        if unconfirmed is None or self.post_unconfirmed(unconfirmed):
            return unconfirmed is not None
        unconfirmed.lease._posted, unconfirmed.lease._lost_end = False, ENDED  # it is waited for
        return False

    def post_unconfirmed(self, unconfirmed: UnconfirmedRelease) -> bool:
        """Send a release that nobody waits for. False: there is no connection, or the caller may not use it."""
        raise NotImplementedError

    def post_over(self, connection: Any, unconfirmed: UnconfirmedRelease) -> bool:
        """As `post_unconfirmed`, over this connection."""
        if self.closed or connection is None or connection.error is not None:
            return False
        if connection.stream.pending >= MOST_UNREAD:  # who waits for the answer reads these as well
            return False
        (key,), delivery = unconfirmed.names, UndoDelivery(unconfirmed)
        self.unconfirmed[key] = delivery
        try:
            connection.post(delivery)
        except BaseException:  # a signal handler's: the release is carried out otherwise
            self.unconfirmed.pop(key, None)
            raise
        return True

    def met_own_release(self, request: Request, answer: object) -> bool:
        """Whether an acquire was told that a lease of this client holds the name, of which the release is to be sent
        again, as the server has forgotten its script; or was sent by another thread, behind the acquire."""
        (key,) = keys if len(keys := request.acquires()) == 1 else (b"",)
        delivery = self.unconfirmed.get(key)
        holder = answer[0][0] if type(answer) is list and answer and type(answer[0]) is list else answer
        if type(holder) is not bytes:
            return False
        if delivery is not None and token_matches(holder, delivery.undo.tokens[0]):
            return True
        resent = self.resent.pop(key, None)  # it may have been answered together with this
        return resent is not None and token_matches(holder, resent)

    def release_told(self, unconfirmed: UnconfirmedRelease, released: bool | None) -> None:
        """Note what became of a release that nobody waited for."""
        (key,) = unconfirmed.names
        delivery = self.unconfirmed.get(key)
        if delivery is not None and delivery.undo is unconfirmed:
            self.unconfirmed.pop(key, None)
        if unconfirmed.sends > 1 or type(unconfirmed) is KeptRelease:
            if len(self.resent) >= MOST_RESENT:
                self.resent.clear()
            self.resent[key] = unconfirmed.tokens[0]
        lease = unconfirmed.lease
        if released is None and unconfirmed.sends == unconfirmed.refused:  # none that another one can have found
            lease._releases -= lease._releases > 0
        if released or released is None:
            self.stats.recovered += bool(released) and unconfirmed.maybe_earlier
            return
        if lease._leave_to_another() or lease._release_unknown or lease._loss_reported():
            return  # another release of it has released it, or tells what it finds, or who renewed it has told
        self.stats.losses += 1
        warn_of_loss(lease.name, "keep" if type(unconfirmed) is KeptRelease else "release")
        if unconfirmed.on_lost is not None:
            self.call_apart(unconfirmed.on_lost, lease)

    def unheard(self) -> list[UnconfirmedRelease]:
        """The releases that nobody waited for, also of kept leases, of which it is not known what became of them."""
        undos = [each.undo for each in list(self.unconfirmed.values())]
        return [undo for undo in undos if isinstance(undo, UnconfirmedRelease)]

    def delivery_end(self) -> float:
        """Until when a client that ends tries to deliver what is pending: a second; releases that nobody has waited
        for, as if they were waited for."""
        time = now()
        latest = max([each.end for each in self.unheard()], default=0.0)
        return max(time + CLOSE_SECONDS, min(latest, time + self.settings.reply_timeout))

    def drain_end(self, connection: Any, end: float) -> float:
        """Until when a client that ends waits for answers over a connection: where releases are among them that nobody
        has waited for, half of the time is left for sending them again over another. 0.0: there are none."""
        carries = any(each.carrier is connection for each in list(self.unconfirmed.values()))
        return (now() + end) / 2 if carries else 0.0

    def give_up(self, undos: list[Undo]) -> None:
        """Note what a client that ends could not deliver, and warn of it."""
        self.warn_of_unheard(undos)
        self.unconfirmed.clear()

    def warn_of_unheard(self, undos: Iterable[Undo] = ()) -> None:
        """Warn of the releases of which it is not known what became of them, and of these undos."""
        warn_of_pending_undos(self.endpoint, (name for each in [*undos, *self.unheard()] for name in each.names))

    def prepare_to_keep(self, key: bytes) -> None:
        """A lock that keeps its leases asks the server for this name: release one that is kept and does not last, and
        see to it that recalls are heard."""
        queues = self.queues
        if key in queues.kept:
            self.release_kept(queues.stop_keeping([key]))
        if not queues.hears_recalls:
            self.hear_recalls()

    def release_kept_for(self, keys: Iterable[bytes]) -> None:
        """These names are to be acquired: release their leases, where they are kept and nobody holds them."""
        self.release_kept(self.queues.stop_keeping(keys))

    def recalled(self, lease: Lease) -> None:
        """A kept lease was recalled, which nobody holds: release it."""
        self.release_kept([lease])

    def release_kept(self, leases: Iterable[Lease], send: Callable[[UndoDelivery], object] | None = None) -> None:
        """Release leases that were kept, and which nobody can take any more, by `send`, if that is given. Nobody waits
        for that; a lease that is found lost may have been so while somebody held it, and counts."""
        for lease in leases:
            release = KeptRelease(lease, None, now, self.release_told, lease._deadline)
            release.instead = self.undo
            delivery = UndoDelivery(release)
            if lease._posted:
                continue
            # No call since the check: of two threads one releases it; nor before it is noted: the other one, which
            # acquires the name, must find it
            lease._posted = True
            lease._releases += 1
            self.unconfirmed[lease._key] = delivery
            try:
                (send or self.deliver)(delivery)
            except BaseException:  # a signal handler's: it is released later, which is no loss if this one was sent
                self.unconfirmed.pop(lease._key, None)
                lease._posted, self.queues.next_lapse = False, 0.0
                raise
            self.queues.released(lease)

    def deliver(self, delivery: UndoDelivery) -> None:
        """Send an undo over the connection that is likely to be used next; where there is none, over the next one."""
        raise NotImplementedError

    def hear_recalls(self) -> None:
        """See to it that recalls of kept leases are heard."""
        raise NotImplementedError

    def wake_keeper(self) -> None:
        """See to it that kept leases are released in time."""
        raise NotImplementedError

    def call_apart(self, on_lost: Callable[[Lease], object], lease: Lease) -> None:
        """Call a user's function from where no connection is being read."""
        raise NotImplementedError

    def ends_of(self, owner: object) -> Callable[[], bool]:
        """A function that says whether this thread or task has ended."""
        raise NotImplementedError

    def new_event(self, renewal: Renewal) -> Lost:
        """What `lease.lost` is."""
        raise NotImplementedError

    def tell_lost(self, renewal: Renewal) -> None:
        """Tell the holder of a lease that it is lost."""
        raise NotImplementedError

    def wake_renewal(self, time: float) -> None:
        """See to it that what is due then is renewed."""
        raise NotImplementedError

    def flush_pending_undos(self) -> None:
        """Send the pending undos now, where nothing else would send them."""

    def not_sent(self, error: BaseException) -> ConnectionLost:
        """The answer to a request that was not sent, as there is no connection: this error came of opening one."""
        if by_handler(error):
            raise error
        known = errors.as_connection_error(error, self.endpoint)
        refused = isinstance(known, (errors.AuthenticationError, errors.ResponseError, errors.InvalidResponse))
        # A certificate that was right before may be again, in a moment
        retries = self.ever_connected or (self.settings.retry_first_connect and not is_certificate_error(error))
        closed = isinstance(known, errors.ClientClosedError)  # a request that is allowed after close takes another way
        final = refused or closed or not retries
        return ConnectionLost(known, self.settings.reply_timeout, sent=False, final=final)

    def protocol_violation(self, step: ProtocolViolation) -> ConnectionLost:
        """A reply makes no sense: no reply that is in flight on its connection can be believed, so that fails."""
        connection: Any = step.request.connection
        error = errors.senseless_reply(self.endpoint, step.reply)
        connection.fail(error)
        return ConnectionLost(error, self.settings.reply_timeout, sent=True, session=connection.session, own=True)

    def was_interrupted(self, error: BaseException | None) -> bool:
        """Whether an operation ended by an error that it did not raise itself, so that it has left no undo."""
        return error is not None and not is_own(error)

    def undo_interrupted(self, op: Abandonable, error: BaseException) -> None:
        """Undo an operation that was interrupted. A signal handler may raise anywhere, also between the grant and the
        keeping of the lease, which nobody could release then. A caller that is interrupted in here calls this again."""
        if self.was_interrupted(error):
            for undo in op.abandon(self.queues, now):
                self.undo(undo)
            self.flush_pending_undos()

    def undo_interrupted_batch(self, leases: Iterable[Lease | None], released: list[Any], error: BaseException) -> None:
        """As `undo_interrupted`, for a release of many leases."""
        op = InterruptedRelease(leases, released)
        try:
            self.undo_interrupted(op, error)
        except BaseException as again:
            self.undo_interrupted(op, again)
            raise

    def finish_release(
        self, lock: BaseLock, owner: object, lease: Lease | None, op: LockRelease | None, error: BaseException
    ) -> None:
        """Carry out a release that was interrupted, as by `undo_interrupted`: who leaves a `with` does not try again.
        Without `lease` it is that of the owner; without `op` it had not begun."""
        lease = lease or lock._lease_of(owner)
        if lease is not None and not is_inherited(lease) and self.was_interrupted(error):
            self.undo_interrupted(op or lock._release_of(lease), error)

    def cancel_wait(self, op: Acquire, waiter: Waiter, error: BaseException | None = None) -> None:
        """The waiter slept and was interrupted or cancelled, or the client was closed: a lease that was handed to it
        goes on to the next waiter. May be called again, as `undo_interrupted`."""
        op.waiting = waiter
        if error is not None and self.was_interrupted(error):
            self.undo_interrupted(op, error)
        elif waiter.given_back is None and (left := op.leave(waiter, None, now)) is not None:
            self.undo(left)  # where `given_back` is set, the waiter has left already
