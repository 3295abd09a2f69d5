"""Random walks of renewal: leases of all kinds of locks, which are renewed while connections break, the server is out
of reach until a lease is lost, processes stop and die, names are deleted, and others want them.

Checked after each event: nobody believes in a lease that the server does not hold for it; who does not hold a name any
more was told so, once, if its process was awake; a lease that was told lost does not come back; and of each renewal
that the server executes: it moves the end of its own lease, of one that is held, and of nothing else. At the end, where
nothing fails any more: leases are not lost, and nothing is left when they are released.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from fastlock._protocol import commands
from fastlock._protocol.lease import ENDED, Lease
from fastlock._protocol.renewal import RenewMany
from support.run_steps import Clock
from support.walk_clients import Actor, Body, Planned, WalkedClient, perform
from support.walk_server import TOLERANCE, Entry
from support.walks import SOON, Event, Walk

KINDS = "plain", "reentrant", "rw", "semaphore"  # of locks: each has a name of its own, which is that word
NAMES = {kind.encode() for kind in KINDS}
LONG = 70.0  # seconds: longer than any lease


class Held(NamedTuple):
    """A lease that was granted, and whose it is."""

    actor: Actor
    lease: Lease
    key: bytes
    token: bytes

    @property
    def renewal(self) -> Any:
        return self.lease._renewal

    def is_held(self) -> bool:
        """Whether it was neither released nor found lost."""
        return not (self.lease._releasing or self.lease._deadline == ENDED or self.renewal.over)


class RenewalWalk(Walk):
    """A walk. `resting`: whether those who hold a lease keep it."""

    jumps = (0.05, 0.4, 1.5, 4.0, 12.0)

    def __init__(self, path: str, clock: Clock, seed: int) -> None:
        super().__init__(path, clock, seed, faults=seed % 3 > 0)
        self.held: list[Held] = []
        self.robbed: set[bytes] = set()  # tokens whose key was deleted
        self.sent: list[RenewMany] = []
        self.tries: Counter[tuple[bytes, float]] = Counter()  # of each token, at each time
        self.resting = False
        self.cut_off: WalkedClient | None = None  # the client that an outage has cut off
        for _ in range(6):
            self.actors.append(Actor(self.random.choice(self.clients), self.caller))

    @property
    def lateness(self) -> float:  # type: ignore[override]
        """Less than the time by which a loss is told before the lease ends."""
        return min((each.renewal.margin / 2 for each in self.held if each.is_held()), default=0.5)

    # the callers

    async def caller(self, actor: Actor) -> None:
        """Hold a name, of one kind of lock or another."""
        lock, outer = self.locks(actor.client.api, self.random.choice(KINDS))
        async with outer or contextlib.nullcontext():
            await self.hold(actor, lock)

    def end(self, actor: Actor, result: Any) -> None:
        super().end(actor, result)
        if self.open and not actor.patient:
            self.actors.append(Actor(self.random.choice(self.clients), self.caller))

    def locks(self, api: Any, kind: str) -> tuple[Any, Any]:
        """A lock that renews its leases; and one to enter before, or None, whose lease is not renewed until then."""
        limit = self.random.choice((None, None, 2, 8))
        options = {"blocking_timeout": limit, "auto_renew": True, "timeout": self.random.choice((30, 45, 60))}
        options["max_hold"] = self.random.choice((None, None, None, 40))
        if kind == "plain":
            return api.lock(kind, **options), None
        if kind == "semaphore":
            return api.semaphore(kind, 3, self.random.choice((1, 2)), **options), None
        lock, outer = api.reentrant_lock(kind, **options), api.reentrant_lock(kind, 30, blocking_timeout=limit)
        if kind == "rw":
            both = api.rw_lock(kind, **options)
            lock, outer = self.random.choice((both.read, both.write)), None
        leases: dict[Any, Lease] = {}  # without a loop all callers of a client would be one owner
        for each in (lock, outer):
            if each is not None:
                each._leases = leases
        return lock, outer

    async def hold(self, actor: Actor, lock: Any) -> None:
        async with lock as lease:
            self.held.append(Held(actor, lease, lock._key, lease._raw_token))
            while await perform(Body(0.2)) == "extend":
                await lock.extend(self.random.choice((5, 30, 50)), replace_ttl=True)

    def go_on(self, actor: Actor) -> None:
        what = self.random.choices(("extend", "leave", "raise", "end"), (3, 2, 1, 0.3))[0] if self.faults else "leave"
        if self.faults and self.was_told(actor):
            what = "extend"
        if what == "end":
            actor.gone = True  # its thread ends, and releases nothing
        else:
            self.advance(actor, what, Planned() if what == "raise" else None)

    # events

    def events(self) -> Iterator[Event]:
        for event in super().events():
            if not (self.resting and event.name in ("body", "begin")):
                yield event

    def events_for(self, actor: Actor) -> Iterator[Event]:
        for event in super().events_for(actor):
            hurries = self.faults and event.name == "body" and self.was_told(actor)
            yield event._replace(weight=SOON) if hurries else event

    def was_told(self, actor: Actor) -> bool:
        """Whether a caller was told that its lease is lost: then it tries to extend it."""
        return any(each.renewal.lost for each in self.held if each.actor is actor)

    def troubles(self) -> Iterator[Event]:
        yield from super().troubles()
        for key in sorted(NAMES & self.server.state.keys()):
            yield Event("delete", lambda key=key: self.delete(key), 0.1)
        for client in self.clients:
            if client.runs and any(each.is_held() for each in self.held if each.actor.client is client):
                yield Event("outage", lambda client=client: self.outage(client), 0.1)

    def outage(self, client: WalkedClient) -> None:
        """A client cannot reach the server until one of its leases is told lost; see `send`."""
        leases = [each for each in self.held if each.actor.client is client and each.is_held()]
        trouble, end = self.trouble, self.clock() + LONG
        client.away, self.resting, self.trouble, self.cut_off = True, True, 0.0, client
        while self.clock() < end and not any(each.renewal.lost for each in leases):
            self.happen()
        self.resting, self.trouble = False, trouble

    def delete(self, key: bytes) -> None:
        """Somebody deletes a name, or takes it from one of those who read."""
        holders = self.holders(key)
        if key == b"rw" and self.random.random() < 0.5:
            holders = {self.random.choice(sorted(holders))}
            self.server.raw("ZREM", key, *holders)
        else:
            self.server.raw("DEL", key)
        self.robbed |= holders
        self.server.look()

    def holders(self, key: bytes) -> set[bytes]:
        """The tokens that hold a name on the server."""
        held = self.server.state[key].value
        return {commands.PLAIN_PREFIX + token[3:] for token in (held if isinstance(held, dict) else [held])}

    # promises

    def send(self, actor: Actor, request: Any) -> None:
        if actor.client is self.cut_off and self.was_told(actor):
            self.cut_off, actor.client.away = None, False  # it can be reached again just as a lease was told lost
        if isinstance(request, RenewMany) and request not in self.sent:
            self.sent.append(request)
            for call in request.calls:
                for _, token in names_of(call):
                    self.check_renewed(token)
        super().send(actor, request)

    def check_renewed(self, token: bytes) -> None:
        """A renewal is to be sent: is the lease still held, by somebody who lives, and not for too long?"""
        self.tries[token, self.clock()] += 1
        assert self.tries[token, self.clock()] < 5, "renewed again and again"
        mine = [each for each in self.held if each.token == token and each.lease._deadline != ENDED]
        assert any(each.is_held() for each in mine), "renewed as it is released"
        assert not any(each.actor.gone for each in mine), "renewed for a thread that has ended"
        assert any(self.clock() < each.renewal.until for each in mine), "renewed after max_hold"

    def executed(self, call: tuple[bytes, ...], before: dict[bytes, Entry], reply: Any) -> None:
        if call[:2] != (b"EVALSHA", commands.RENEW_MANY_LUA.sha):
            for key in NAMES & self.server.state.keys():
                self.robbed -= self.holders(key)  # an acquire that was sent again has granted it again
            return
        names: dict[bytes, list[bytes]] = {}
        for key, token in names_of(call):
            names.setdefault(key, []).append(token)
        for key, tokens in names.items():
            was, now = before.get(key), self.server.state.get(key)
            if was is not None and isinstance(was.value, dict):
                self.check_members(tokens, was.value, {} if now is None else now.value)
            elif now is not None:
                assert was is not None and was.value == now.value, "a renewal has acquired a name"
                mine = any(commands.token_matches(now.value, token) for token in tokens)
                later = now.left - was.left > TOLERANCE * 1000
                assert mine or not later, "a renewal has moved the end of another lease"

    def check_members(self, tokens: list[bytes], was: dict[bytes, float], now: dict[bytes, float]) -> None:
        """The holders of a name that several may hold, before and after a renewal by these tokens."""
        ended = self.server.ms() - TOLERANCE * 1000
        for member, end in now.items():
            assert member in was, "a renewal has acquired a name"
            if end != was[member]:
                assert member in tokens, "a renewal has moved the end of another lease"
                assert was[member] > ended, "a renewal has brought back a lease that had ended"

    def check(self) -> None:
        for each in self.held:
            client, lease = each.actor.client, each.lease
            if client.dead or each.token in self.robbed:
                continue
            there, left = self.server.left(each.key, each.token), lease._deadline - self.clock()
            assert left < max(there, 0) + TOLERANCE or lease._releasing, f"believed in for {left} seconds, not {there}"
            assert left <= 0 or not each.renewal.lost, "a lease that was told lost has come back"
            if each.is_held() and not (client.stopped or client.late):
                assert there > -TOLERANCE or each.renewal.lost, "not told lost"
        for client in self.clients:
            assert len(client.told) == len(set(client.told)), "told twice"

    # the whole walk

    def run(self) -> None:
        """Walk. AssertionError: a promise was broken."""
        reliable = not self.faults
        self.wander(220)
        if reliable:
            told = [renewal for client in self.clients for renewal in client.told]
            assert all(each.settings.max_hold for each in told), "lost without a reason"
        self.until(lambda: self.idle() and not any(client.stopped for client in self.clients), "all is answered")
        self.rest()
        self.until(lambda: self.idle() and all(each.gone or each.client.dead for each in self.actors), "all released")
        self.check_end()

    def rest(self) -> None:
        """For as long as nothing fails, leases are kept, but not those of the dead."""
        kept = [each for each in self.held if self.is_kept(each)]
        self.resting, end = True, self.clock() + LONG
        self.until(lambda: self.clock() >= end, "time to pass")
        self.resting = False
        for each in self.held:
            if each in kept:
                assert each.is_held() and each.lease.valid and not each.renewal.lost, "lost without a reason"
            elif each.actor.gone or self.clock() > each.renewal.until + LONG:
                assert not self.server.holds(each.key, each.token), "renewed for ever"
            elif each.token in self.robbed and not each.actor.client.dead:
                assert each.renewal.lost or not each.is_held(), "never told lost"

    def is_kept(self, held: Held) -> bool:
        """Whether a lease can be renewed from now on."""
        if held.token in self.robbed or held.actor.gone or held.actor.client.dead or held.renewal.lost:
            return False
        time = self.clock()
        return held.is_held() and held.renewal.until > time + LONG and held.renewal.lost_from() > time + 3

    def check_end(self) -> None:
        """Nothing is left but what the dead hold, and that ends."""
        dead = {each.token for each in self.held if each.actor.gone or each.actor.client.dead}
        for each in self.held:
            assert each.token in dead or not self.server.holds(each.key, each.token), "not released"
        self.skip(LONG)
        assert not self.server.state, f"left behind: {self.server.state}"


def names_of(call: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    """The names that a call renews, each with its token."""
    count = int(call[2])
    return list(zip(call[3 : 3 + count], call[3 + count : 3 + 2 * count], strict=True))
