"""Random walks of kept leases: callers that keep their leases and callers that do not, in three clients, and somebody
with redis-py, while connections break and processes stop and die. Grants are believed before they are confirmed.

Checked after each event: of a name at most one caller believes that it holds, and the server holds it for that one; and
a client that has heard of a recall keeps nothing. At the end, where nothing fails any more, everybody is served, and
nothing is left once what is kept has lapsed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fastlock._locks import plain
from fastlock._protocol import commands, steps
from fastlock._protocol.lease import ENDED, Lease
from support.model_judge import ModelJudge
from support.run_steps import Clock
from support.walk_clients import Actor, Body, WalkedClient, WalkTransport, perform
from support.walk_server import TOLERANCE, Entry
from support.walks import SOON, Event, Walk

NAMES = "a", "b", "c", "d", "e", "f"
FOREIGN = b"a token of redis-py"
LONG = 100.0  # seconds: longer than any lease


class Held(NamedTuple):
    """A lease that a caller believes it holds, and by which token the server knew it."""

    actor: Actor
    lease: Lease
    key: bytes
    token: bytes


class KeptTransport(WalkTransport):
    """A transport that keeps leases."""

    async def _execute(self, request: Any) -> Any:
        if self.queues.kept:
            self.release_kept_for(request.acquires())
        while request.settles and any(key in self.unconfirmed for key in request.acquires()):
            await self.performed(steps.Sleep(0.0))
        answer = await super()._execute(request)
        while (self.unconfirmed or self.resent) and self.met_own_release(request, answer):
            answer = await super()._execute(request)
        return answer

    def post_unconfirmed(self, unconfirmed: Any) -> bool:
        """Over any connection but that on which messages come, as in threads."""
        self.walked.walk.judge.compared.add("not waited for")
        return not self.walked.away and self.post_over(self.walked.any_wire(), unconfirmed)

    def call_apart(self, on_lost: Any, lease: Lease) -> None:
        on_lost(lease)

    def hear_recalls(self) -> None:
        self.wants_recalls = True

    def deliver(self, delivery: Any) -> None:
        self.walked.post(delivery)

    def turn_is_over(self, time: float) -> bool:
        return False

    def wake_keeper(self) -> None:
        """The walk looks for what has lapsed."""


class KeptWalk(Walk):
    """A walk."""

    transport = KeptTransport
    jumps = (0.005, 0.05, 0.3, 1.1)
    passing = 0.03, 0.5
    lateness, arrival = 0.0, SOON

    def __init__(self, path: str, clock: Clock, seed: int) -> None:
        super().__init__(path, clock, seed, faults=seed % 3 > 0)
        self.clients.append(WalkedClient(self))
        self.judge = ModelJudge(self.clients)
        self.held: list[Held] = []
        self.timeout, self.keep = self.random.choice((10, 20)), self.random.choice((1, 6))
        self.names = NAMES[: self.random.choice((2, 4, 6))]
        for _ in range(self.random.choice((3, 4, 6))):
            self.actors.append(Actor(self.random.choice(self.clients), self.caller))

    # the callers

    async def caller(self, actor: Actor) -> None:
        """Hold a name, by a lock that keeps its leases, or one that does not."""
        lock = self.lock(actor.client)
        lease = await self.acquire(actor, lock)
        if lease is None:
            return
        held = Held(actor, lease, lock._key, lease._raw_token)
        self.held.append(held)
        while await perform(Body(0.4)) == "stay":
            pass
        self.held.remove(held)
        queue = actor.client.transport.queues.by_key.get(lock._key)
        left = 0.0 if queue is None else queue.keep_until - self.clock()
        compare = self.judge.lets_go(actor.client, lease, lock._key, left, self.clock())
        await lock.release()
        compare()

    def lock(self, client: WalkedClient) -> Any:
        """A lock of a name: mostly of one of those that are this client's by custom."""
        own = [each for i, each in enumerate(self.names) if self.clients[i % len(self.clients)] is client]
        name = self.random.choice(own if own and self.random.random() < 0.8 else self.names)
        limit = self.random.choice((None, None, 2, 8))
        options = {
            "blocking_timeout": limit,
            "timeout": self.timeout * self.random.choice((1, 1, 1, 2)),
            "thread_local": False,
        }
        kind = self.random.choice(("kept", "kept", "kept", "kept", "kept", "plain", "fair"))
        more = {"kept": {"keep": self.keep}, "plain": {}, "fair": {"fair": True}}[kind]
        return client.api.lock(name, confirm_release=self.random.random() < 0.5, **options, **more)

    async def acquire(self, actor: Actor, lock: Any) -> Lease | None:
        """Acquire by the plain path."""
        queues, start, at = lock._transport.queues, self.clock(), len(self.log)
        lease: Lease | None = await plain.aio_acquire(lock, False)
        if lease is not None and len(self.log) == at:  # it did not stop meanwhile
            assert lease._deadline - start >= lock.timeout, "given out though it does not last"
            self.judge.takes(actor.client, lease, start)
        elif lease is not None and (queue := queues.by_key.get(lock._key)) is not None and queue.keep_until:
            self.judge.granted(actor.client, lease)
        return lease

    def end(self, actor: Actor, result: Any) -> None:
        self.held = [each for each in self.held if each.actor is not actor]
        super().end(actor, result)
        if self.open:
            self.actors.append(Actor(self.random.choice(self.clients), self.caller))

    def go_on(self, actor: Actor) -> None:
        self.advance(actor, self.random.choice(("stay", "leave", "leave")) if self.open else "leave")

    def wire_for(self, client: WalkedClient, request: Any) -> Any:
        """Behind a release that nobody has waited for; unless it joins, over the connection on which messages come."""
        unconfirmed = [client.transport.unconfirmed.get(key) for key in request.acquires()]
        found = [each.carrier for each in unconfirmed if each is not None and each.carrier in client.wires]
        wire = found[0] if found and not request.needs_push else super().wire_for(client, request)
        if found and request.needs_push and request.joins:
            self.judge.compared.add("joined meanwhile")
        for each in client.pending[:]:  # whatever connection comes up, these are sent first
            client.pending.remove(each)
            wire.post(each)
        return wire

    # events

    def events_of(self, client: WalkedClient) -> Iterator[Event]:
        yield from super().events_of(client)
        queues = client.transport.queues
        if client.runs and client.transport.wants_recalls and not queues.hears_recalls:
            yield Event("subscribe", lambda: self.subscribe(client), SOON if self.random.random() < 0.5 else 0.5)
        if client.runs and queues.next_lapse <= self.clock():
            yield Event("lapse", lambda: client.transport.release_kept(queues.lapsed(self.clock())))

    def events(self) -> Iterator[Event]:
        yield from super().events()
        for name in self.names if self.open else ():
            held = self.server.state.get(name.encode())
            if held is None:
                yield Event("foreign", lambda name=name: self.server.raw("SET", name, FOREIGN, "PX", 3000, "NX"), 0.05)
            elif held.value == FOREIGN:
                yield Event("foreign ends", lambda name=name: self.server.raw("DEL", name), 0.5)

    def let_happen(self, events: list[Event]) -> None:
        super().let_happen(events)
        self.server.look()

    def subscribe(self, client: WalkedClient) -> None:
        """Recalls are heard from now on: on the connection on which messages come."""
        client.listen()
        client.ear.send_command("SUBSCRIBE", client.transport.queues.keep_channel)
        client.hear_until(b"subscribe")
        client.transport.queues.recalls_heard(True)

    def message(self, client: WalkedClient) -> None:
        channel, text = client.messages[0]
        if channel != client.transport.queues.keep_channel:
            return super().message(client)
        compare = self.judge.heard(client, text[: commands.TOKEN_SIZE], text[commands.TOKEN_SIZE :])
        super().message(client)
        return compare()

    def executed(self, call: tuple[bytes, ...], before: dict[bytes, Entry], reply: Any) -> None:
        self.judge.executed(call, before, self.server.state, reply)

    def deafened(self, client: WalkedClient) -> None:
        self.judge.deafened(client)
        if not client.dead:
            client.transport.release_kept(client.transport.queues.recalls_heard(False))

    # promises

    def check(self) -> None:
        claims: dict[bytes, Held] = {}
        for each in self.held:
            left = each.lease._deadline - self.clock()
            if each.actor.client.dead or each.lease._deadline == ENDED or left <= 0:
                continue
            assert each.key not in claims, f"two hold {each.key!r}"
            claims[each.key] = each
            there = self.server.left(each.key, each.token)
            assert left < max(there, 0) + TOLERANCE, f"believed in for {left} seconds, not {there}"
        for client in self.clients:
            if client.runs and not client.messages:
                self.check_kept(client)

    def check_kept(self, client: WalkedClient) -> None:
        """What was recalled is not kept by a client that has heard all, and nothing by one that does not hear."""
        assert client.transport.queues.hears_recalls or not client.transport.queues.kept, "kept, and no recall is heard"
        for key, queue in client.transport.queues.kept.items():
            entry, lease = self.server.state.get(key), queue.circulating
            if entry is not None and lease is not None and lease._deadline > self.clock():
                assert entry.value != commands.as_contended(lease._raw_token), "kept though it was recalled"

    # the whole walk

    def run(self) -> None:
        """Walk. AssertionError: a promise was broken."""
        self.wander(2000)
        self.until(lambda: not any(client.stopped for client in self.clients), "all go on")
        living = lambda: [each for each in self.actors if not each.client.dead]  # noqa: E731
        self.until(lambda: self.idle() and not living(), "all are served")
        self.until(lambda: self.idle() and not any(self.kept(client) for client in self.clients), "what is kept lapses")
        self.skip(LONG)
        assert not self.server.state, f"left behind: {self.server.state}"

    def kept(self, client: WalkedClient) -> bool:
        return not client.dead and bool(client.transport.queues.kept)
