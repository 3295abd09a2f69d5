"""The handover protocol as a state machine without time, explored in every order of events.

A client is a process: some callers that want one name, each once. It joins the server's queue by ENTER, once for each
entry, and looks by LOOK what became of the entry, as when it receives a push message. The environment may crash a
client, cut its connections (some of what was sent was executed, replies and messages are lost), cancel a caller, let a
lease or a grant expire, have one more caller come, and acquire a free name for a client of another library.
Checked: at most one caller believes that it holds; and where nothing more can happen, every caller got the lock or gave
up, and key and queue are gone. support/replay.py compares this model with the real scripts, protocol and local queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from support.uncollected import uncollected

Identity = tuple[int, int]  # a client, and the number of one of its tokens or queue entries
Command = tuple[str, int]  # the command, and the number of its token or queue entry
Event = tuple[Any, ...]

FREE, OTHER = (-1, 0), (-2, 0)  # holders that are no client of the model: nobody, and a client of another library
NONE, TWICE = -1, -2  # instead of the token that is held
STRICT = 0  # instead of a number of callers: one caller, which waits in strict order
# The state of a client's first waiter: BEHIND waits for another caller of its client, or there is no waiter.
START, SET, EXTEND, ENTER, QUEUED, BEHIND, DEAD = range(7)
ASKING = ("ENTER", "LOOK")  # commands of the first waiter: to join by an entry, and what became of it
ABANDONED = {
    "SET": "SET?",
    "ENTER": "ENTER?",
    "LOOK": "LOOK?",
}  # commands whose caller was cancelled: nobody reads the reply
GRANTED, CONTENDED, WAIT, LATE = "granted", "granted, and more wait", "wait", "granted too late"
GONE = "the entry is gone"

MISTAKES = {
    "mark": "a waiter that enters does not mark the holder's token",
    "mark more": "a waiter that enters and is granted the name does not mark that more are waiting",
    "retry": "a release that finds its token marked is not retried as a handover",
    "keep grant": "a waiter that gives up keeps what was granted to it",
    "remove entry": "a waiter that gives up removes the queue entry of its process",
    "believe late": "a grant is believed though the moment may be over",
    "grant unmarked": "a grant does not mark the token though more are waiting",
    "confirm joins": "the look that confirms a believed grant joins, if the entry is gone",
    "reenter": "after a cut a waiter waits on, though its queue entry may be gone",
    "grant to itself": "a waiter may be granted the name by its own ENTER, and ignores a push message that came before",
    "hand over expired": "a lease that has expired is handed over",
    "renew": "the next waiters wait with the queue entry that was granted",
    "late": "a grant whose lease has ended when the reply is read counts as one",
    "lose undos": "the pending undos of a connection that was cut are not sent again",
    "keep entry": "a waiter that entered while another caller of its client holds, and gives up, keeps its entry",
    "resume expired": "a lease that was handed over counts, though it ended before the new holder ran",
    "overtake": "a waiter whose handed-over lease had ended sends ENTER for an entry for which another waiter sends it",
    "hand over entered": "a lease is handed over locally though the waiter's entry is in the server's queue",
}


class Client(NamedTuple):
    """A client's tokens have numbers: first a token of its own, then one entry of the server's queue after the
    other, as an entry that was granted is the lease's token, and the next waiters wait with a new entry. A lone
    caller begins with SET; several callers have joined a local queue and begin with ENTER, as does a caller in
    strict order."""

    pc: int = START
    waiting: int = 1  # callers that have no lease yet
    queues: bool = False  # whether it begins with ENTER
    entry: int = 0
    joined: bool = False  # whether it has sent ENTER for that
    fresh: bool = True  # whether the moment of a grant to that cannot be over
    told: bool = False  # whether a message said that it was granted the name, and the first waiter did not believe that
    held: int = NONE  # number of the token of the lease that a caller believes it holds
    contended: bool = False  # whether remote waiters existed when the lease was granted, or it had to wait for them
    waited: bool = False  # whether the server has put its entry into the queue
    entry_sent: bool = False  # while BEHIND: a waiter that gave up has sent ENTER, so the server may know the entry
    expired: tuple[tuple[int, bool], ...] = ()  # leases that expired and are not yet released: token, contended
    handed_over: tuple[
        tuple[int, bool, bool], ...
    ] = ()  # to callers that have not run since: token, contended, expired
    subscribed: bool = False  # whether the server knows where to send push messages
    woken: bool = False  # a push message came while ENTER was under way: it will be sent again
    alone: bool = False  # it waits with its own token: in strict order, or as the reply to its SET was lost
    ordered: tuple[Command, ...] = ()  # to the server, in order
    unordered: tuple[Command, ...] = ()  # to the server, in any order
    incoming: tuple[tuple[str, int], ...] = ()  # from the server: replies to ENTER, push messages


class State(NamedTuple):
    clients: tuple[Client, ...]
    budget: tuple[int, ...]  # crashes, cuts, cancels, expiries, acquires of another library, callers that join later
    key: Identity = FREE
    marked: bool = False
    moment: bool = False  # granted and not confirmed: expires soon
    due: bool = False  # the key has gone by itself, or was another library's: waiters will recheck
    queue: tuple[Identity, ...] = ()
    fences: bool = False  # whether callers may want a fence: the server grants them the name, and they send ENTER early


Step = tuple[bool, Event, State]
CRASH, CUT, CANCEL, EXPIRE, FOREIGN, JOIN = range(6)


def begin(callers: tuple[int, ...], *, fences: bool = False, **budget: int) -> State:
    """One client for each number of callers; how often each of the events of the budget may happen."""
    limits = tuple(budget.get(name, 0) for name in ("crash", "cut", "cancel", "expire", "foreign", "join"))
    clients = (Client(waiting=count or 1, queues=count != 1, alone=count == STRICT) for count in callers)
    return State(tuple(clients), limits, fences=fences)


def put(row: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*row[:at], value, *row[at + 1 :])


def without(row: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    at = row.index(value)
    return row[:at] + row[at + 1 :]


def changed(s: State, i: int, **fields: Any) -> State:
    return s._replace(clients=put(s.clients, i, s.clients[i]._replace(**fields)))


def spent(s: State, what: int) -> State:
    return s._replace(budget=put(s.budget, what, s.budget[what] - 1))


class Server:
    """What the scripts do, except for the rules in `wrong`, which they break."""

    wrong: frozenset[str]

    def grant(self, s: State, me: Identity = FREE) -> State:
        """Grant a free name to the first in the queue whose client is connected, if that is not `me`."""
        while s.queue and (s.queue[0] != me or "grant to itself" in self.wrong):
            first, *rest = s.queue
            s = s._replace(queue=tuple(rest))
            i, entry = first
            if s.clients[i].subscribed:
                s = changed(s, i, incoming=(*s.clients[i].incoming, ("push", entry)))
                marked = bool(rest) and "grant unmarked" not in self.wrong
                return s._replace(key=first, marked=marked, moment=True)
        return s._replace(key=FREE, marked=False, moment=False)

    def executed(self, s: State, i: int, command: Command) -> tuple[State, str]:
        """The server executes one command: the state afterwards, and the reply."""
        verb, number = command
        me = (i, number)
        if verb in ("SET", "SET?"):
            if s.key == FREE:
                return s._replace(key=me, marked=False, moment=False), "ok"
            return s, "mine" if s.key == me else "held"
        if verb in ("ENTER", "ENTER?", "LOOK", "LOOK?", "CONFIRM"):
            joins = verb in ("ENTER", "ENTER?") or (verb == "CONFIRM" and "confirm joins" in self.wrong)
            subscribed = s.clients[i].subscribed or verb != "CONFIRM"
            return self.enter(changed(s, i, subscribed=subscribed), me, joins=joins)
        if verb == "LEAVE":
            s = s._replace(queue=tuple(each for each in s.queue if each != me))
            return (self.grant(s) if s.key == me and "keep grant" not in self.wrong else s), "left"
        if s.key != me or (verb in ("DEL", "BATCH") and s.marked):
            return s, "not"
        if verb == "EXTEND":
            return s, "ok"
        if verb in ("DEL", "BATCH"):
            return s._replace(key=FREE, moment=False), "ok"
        return self.grant(s), "ok"

    def enter(self, s: State, me: Identity, *, joins: bool) -> tuple[State, str]:
        got = s.key == me
        if not (got or joins or me in s.queue):
            return s, GONE
        s = s._replace(due=False)
        if s.key == FREE:
            s = self.grant(s, me)
            got = s.key == FREE
        if got:
            queue = tuple(each for each in s.queue if each != me)
            marked = bool(queue) and "mark more" not in self.wrong
            s = s._replace(key=me, queue=queue, marked=marked, moment=False)
            return s, CONTENDED if queue else GRANTED
        if me not in s.queue:
            s = s._replace(queue=(*s.queue, me))
        return s._replace(marked=s.marked or (s.key != OTHER and "mark" not in self.wrong)), WAIT


class Process:
    """What a client does, except for the rules in `wrong`, which it breaks."""

    wrong: frozenset[str]

    def enters(self, client: Client, **fields: Any) -> Client:
        """The first waiter sends ENTER, or LOOK once its entry has joined. A push message that came before needs no
        other."""
        if "entry" in fields:
            client = client._replace(fresh=True, told=False)
        verb = "LOOK" if client.joined and "entry" not in fields else "ENTER"
        client = client._replace(pc=ENTER, woken=False, entry_sent=False, joined=True, **fields)
        return client._replace(ordered=(*client.ordered, (verb, client.entry)))

    def holds(self, client: Client, token: int, contended: bool = False) -> Client:
        entry = client.entry if "renew" in self.wrong else max(client.entry, token + 1)
        joined = client.joined and "renew" in self.wrong
        client = client._replace(pc=BEHIND, waiting=client.waiting - 1, entry=entry, joined=joined, woken=False)
        client = client._replace(fresh=True, told=False)
        believed = token if client.held == NONE else TWICE
        return client._replace(held=believed, contended=contended or client.waited, waited=False, entry_sent=False)

    def answered(self, client: Client, command: Command, reply: str) -> Client:
        """What the client does on the reply to a command that has no order relative to others."""
        verb, token = command
        leads_to = {("SET", "mine"): "EXTEND", ("SET?", reply): "UNDO"}  # the undo follows right behind
        if "retry" not in self.wrong:
            leads_to |= {("DEL", "not"): "REL", ("BATCH", "not"): "REL"}
        unordered = without(client.unordered, command)
        if (verb, reply) in leads_to:
            unordered = tuple(sorted({*unordered, (leads_to[verb, reply], token)}))
        client = client._replace(unordered=unordered)
        if (verb, reply) in (("SET", "ok"), ("EXTEND", "ok")):
            return self.holds(client, token)
        if (verb, reply) == ("SET", "mine"):
            return client._replace(pc=EXTEND)
        if (verb, reply) in (("SET", "held"), ("EXTEND", "not")):
            return self.enters(client, entry=0 if client.alone else 1)
        return client

    def believes(self, client: Client) -> Iterator[Client]:
        """The client receives a message of the grant that its first waiter waits for, and believes it: it holds, and
        has that confirmed."""
        (message, number), *rest = client.incoming
        meant = message == "push" and number == client.entry and client.pc == QUEUED
        others = client.held != NONE or any(not over for _, _, over in client.handed_over)
        if meant and not others and (client.fresh or "believe late" in self.wrong):
            client = self.holds(client._replace(incoming=tuple(rest)), number, True)
            yield client._replace(ordered=(*client.ordered, ("CONFIRM", number)))

    def receives(self, client: Client) -> Client:
        """The client receives the first reply or push message that was sent to it."""
        (message, number), *rest = client.incoming
        client = client._replace(incoming=tuple(rest))
        if message == "push":
            if number != client.entry or client.pc not in (ENTER, QUEUED):
                return client
            client = client._replace(told=client.waiting > 1)
            if client.pc == ENTER:
                return client._replace(woken="grant to itself" not in self.wrong)
            return self.enters(client)
        if message == WAIT:
            client = client._replace(waited=True)
            return self.enters(client) if client.woken else client._replace(pc=QUEUED)
        if message == GONE:
            return self.enters(client, entry=number + 1, waited=False)
        if message == LATE and "late" not in self.wrong:
            client = client._replace(ordered=(*client.ordered, ("UNDO", number)))
            return self.enters(client, entry=number + 1, waited=False)
        return self.holds(client, number, message == CONTENDED)

    def releases(self, client: Client, verb: str = "") -> Client:
        """The holder releases, and no waiter of its client gets the lease; the next waiter enters. The names of a
        batch are deleted even if waiters are known; then those whose token is marked are handed over."""
        verb = verb or ("REL" if client.waiting or client.contended else "DEL")
        unordered = tuple(sorted((*client.unordered, (verb, client.held))))
        client = client._replace(unordered=unordered, held=NONE, contended=False)
        return self.enters(client) if client.waiting and client.pc == BEHIND else client

    def releases_late(self, client: Client, at: int) -> Iterator[Client]:
        """The holder of an expired lease releases. The next waiter enters, unless it has rechecked by itself, or there
        are several expired leases and it has waited for another one."""
        token, contended = client.expired[at]
        several = len(client.expired) > 1
        verb = "REL" if client.waiting or contended else "DEL"
        unordered = tuple(sorted((*client.unordered, (verb, token))))
        client = client._replace(unordered=unordered, expired=without(client.expired, client.expired[at]))
        if several or not self.orphaned(client):
            yield client
        if self.orphaned(client):
            yield self.enters(client)

    @staticmethod
    def orphaned(client: Client) -> bool:
        """Whether callers wait locally for a lease that has ended."""
        handed_over = any(not over for _, _, over in client.handed_over)
        return client.pc == BEHIND and client.waiting > 0 and client.held == NONE and not handed_over

    @staticmethod
    def hands_over(client: Client, token: int, contended: bool) -> Client:
        """A lease is handed over to the first waiter, which has not run yet."""
        return client._replace(waiting=client.waiting - 1, handed_over=(*client.handed_over, (token, contended, False)))

    def resumes(self, client: Client, at: int) -> Iterator[Client]:
        """A caller that was handed a lease runs: it holds, and the next waiter may enter already. If the lease has
        ended, the caller waits again."""
        token, contended, over = client.handed_over[at]
        client = client._replace(handed_over=without(client.handed_over, client.handed_over[at]))
        if not over or "resume expired" in self.wrong:
            client = client._replace(held=token if client.held == NONE else TWICE, contended=contended)
        else:
            unordered = tuple(sorted({*client.unordered, ("UNDO", token)}))
            client = client._replace(unordered=unordered, waiting=client.waiting + 1)
            if self.orphaned(client) or "overtake" in self.wrong:
                yield self.enters(client)
                return
        yield client
        if client.waiting and client.pc == BEHIND:
            yield self.enters(client)

    def resumes_to_leave(self, client: Client, at: int, fences: bool) -> Iterator[Client]:
        """A caller that was handed a lease gives up before it has run: the lease goes to the next waiter, or back to
        the server, for example because the next waiter wants a fence."""
        token, contended, over = client.handed_over[at]
        client = client._replace(handed_over=without(client.handed_over, client.handed_over[at]))
        may_hand_over = client.waiting and client.pc == BEHIND and not over and not client.entry_sent
        if may_hand_over:
            yield self.hands_over(client, token, contended)
        if not may_hand_over or fences:
            client = client._replace(unordered=tuple(sorted({*client.unordered, ("UNDO", token)})))
            yield self.enters(client) if self.orphaned(client) else client

    def gives_up(self, client: Client) -> Client:
        """The first waiter gives up; the next waiter takes over the queue entry, and enters."""
        ordered = tuple((ABANDONED.get(verb, verb), number) for verb, number in client.ordered)
        incoming = tuple(each for each in client.incoming if each[0] == "push")
        left = client._replace(waiting=client.waiting - 1, ordered=ordered, incoming=incoming)
        left = left._replace(waited=left.waited and left.waiting > 0)
        if client.pc in (SET, EXTEND):
            rest = [("SET?", token) if verb == "SET" else ("UNDO", token) for verb, token in client.unordered]
            return left._replace(pc=BEHIND, unordered=tuple(rest))
        if client.pc == BEHIND and client.entry_sent and not left.waiting:
            left = left._replace(ordered=(*ordered, ("LEAVE", client.entry)))
            return left._replace(entry_sent=False, entry=client.entry + 1, joined=False, fresh=True, told=False)
        if client.pc == BEHIND:
            return self.enters(left) if self.orphaned(left) else left
        if left.waiting and "remove entry" not in self.wrong:
            return self.enters(left)
        if client.held != NONE and "keep entry" in self.wrong:
            return left._replace(pc=BEHIND)
        entry = client.entry if left.waiting else client.entry + 1  # later callers wait with another entry
        left = left._replace(
            pc=QUEUED if left.waiting else BEHIND,
            entry=entry,
            joined=client.joined and entry == client.entry,
            fresh=client.fresh or entry != client.entry,
            told=client.told and entry == client.entry,
            ordered=(*ordered, ("LEAVE", client.entry)),
        )
        own_token = client.alone or not client.queues  # the server knows the caller's own token, so that is undone too
        return left._replace(unordered=(*left.unordered, ("UNDO", 0))) if own_token else left

    def reconnects(self, client: Client, confirms: bool) -> Client:
        """The client connects again: it sends pending undos first, then retries the commands that were in flight. The
        server may have removed its queue entry."""
        if client.pc == QUEUED and "reenter" in self.wrong:
            return client._replace(subscribed=True, incoming=())
        enters = client.pc in (ENTER, QUEUED) or (client.entry_sent and self.orphaned(client))
        other = {"SET?": "UNDO", "BATCH": "REL"}
        unordered = tuple(sorted({(other.get(verb, verb), number) for verb, number in client.unordered}))
        # Whether a grant is confirmed once more that is released just now, or has ended, does not matter
        kept = ("LEAVE", "UNDO", *["CONFIRM"] * confirms)
        pending_undos = tuple(each for each in client.ordered if each[0] in kept and "lose undos" not in self.wrong)
        if any(verb == "SET" for verb, _ in unordered):
            client = client._replace(alone=True)
        woken, client = (
            client.pc == ENTER,
            client._replace(subscribed=False, unordered=unordered, incoming=(), ordered=pending_undos),
        )
        return self.enters(client)._replace(woken=woken) if enters else client


class Protocol(Server, Process):
    """The rules, except for those in `mistakes`, and everything that can happen.

    ENTER, LEAVE and messages keep their order, as they share a connection; a client's other commands may be executed at
    any time. Some orders are left out, as they make no difference at the server: a waiter that is woken runs at once,
    as its ENTER may be executed later; every reply except that to an ENTER is read at once, as the command that follows
    it may be executed later, and as a cut may lose that command. The event "rechecks" is a waiter's recheck timer. The
    real timer fires every second whatever happens, which would hide a waiter that the protocol forgets. Here it fires
    only where no message can tell the waiter: the key is gone without a release, or its holder uses another library.
    """

    def __init__(self, *mistakes: str) -> None:
        assert set(mistakes) <= set(MISTAKES), mistakes
        self.wrong = frozenset(mistakes)

    def steps(self, s: State) -> Iterator[Step]:
        """Yield (whether it must happen in the end, event, the state afterwards). One event may lead to several
        states."""
        for i, client in enumerate(s.clients):
            if client.pc == DEAD:
                if s.key[0] == i:
                    yield True, ("expires",), expired(s)
                continue
            yield from self.executions(s, i, client)
            yield from self.own_steps(s, i, client)
            if client.pc != START and not finished(client):
                yield from self.faults(s, i, client)
        yield from other_library_steps(s)

    def executions(self, s: State, i: int, client: Client) -> Iterator[Step]:
        if client.ordered:
            command = client.ordered[0]
            after, reply = self.executed(changed(s, i, ordered=client.ordered[1:]), i, command)
            if command[0] in ASKING:
                after = changed(after, i, incoming=(*after.clients[i].incoming, (reply, command[1])))
            yield True, ("executes", i, command), after
        for command in client.unordered:
            after, reply = self.executed(s, i, command)
            changed_client = self.answered(after.clients[i], command, reply)
            yield True, ("executes", i, command), after._replace(clients=put(after.clients, i, changed_client))

    def own_steps(self, s: State, i: int, client: Client) -> Iterator[Step]:
        def step(what: str, became: Client, *more: Any) -> Step:
            return True, (what, i, *more), s._replace(clients=put(s.clients, i, became))

        if client.incoming:
            became = self.receives(client)
            yield step("receives", became)
            holders = [became, *self.believes(client)]
            if client.incoming[0][0] == GRANTED and not became.contended:
                holders.append(became._replace(contended=True))  # other clients wanted the name of late, and may again
            for holder in holders:
                if holder is not became:
                    yield step("receives", holder)
                if s.fences and holder.held != NONE and holder.waiting and holder.pc == BEHIND:
                    yield step("receives", self.enters(holder))
        if client.pc == START and client.queues:
            yield step("begins to acquire", self.enters(client))
        elif client.pc == START:
            yield step("begins to acquire", client._replace(pc=SET, unordered=(("SET", 0),)))
        if client.held != NONE:
            for what, verb in (("releases", ""), ("releases in a batch", "BATCH")):
                yield step(what, self.releases(client, verb))
                if (
                    client.waiting
                    and client.pc == BEHIND
                    and (not client.entry_sent or "hand over entered" in self.wrong)
                ):
                    yield step(what, self.hands_over(client._replace(held=NONE), client.held, client.contended))
        for at, (token, *_) in enumerate(client.handed_over):
            for became in self.resumes(client, at):
                yield step("resumes", became, token)
        for at, (token, _) in enumerate(client.expired):
            for became in self.releases_late(client, at):
                yield step("releases late", became, token)
            if "hand over expired" in self.wrong and self.orphaned(client):
                became = self.holds(client._replace(expired=without(client.expired, client.expired[at])), token)
                yield step("releases late", became, token)
        if (client.pc == QUEUED and (s.due or s.key == OTHER)) or self.orphaned(client):
            yield step("rechecks", self.enters(client))

    def faults(self, s: State, i: int, client: Client) -> Iterator[Step]:
        if s.budget[CRASH]:
            for sent, after in self.partial_executions(s, i, client):
                dead = put(after.clients, i, Client(pc=DEAD, waiting=0))
                yield False, ("dies", i, sent), spent(after._replace(clients=dead), CRASH)
        if s.budget[CUT]:
            for sent, after in self.partial_executions(s, i, client):
                cut = after.clients[i]._replace(ordered=client.ordered, unordered=client.unordered)
                for became in {self.reconnects(cut, confirms) for confirms in (False, True)}:
                    yield False, ("is cut", i, sent), spent(after._replace(clients=put(after.clients, i, became)), CUT)
        if s.budget[CANCEL]:
            for what, became in self.cancels(client, s.fences):
                yield False, (what, i), spent(s._replace(clients=put(s.clients, i, became)), CANCEL)
        if s.budget[JOIN] and client.queues and not client.alone:
            for became in self.comes(client._replace(waiting=client.waiting + 1)):
                yield False, ("another comes", i), spent(s._replace(clients=put(s.clients, i, became)), JOIN)
        if (
            s.budget[EXPIRE]
            and s.key[0] == i
            and (became := with_expired_lease(client, s.key[1], s.moment)) is not None
        ):
            yield False, ("expires",), spent(expired(s._replace(clients=put(s.clients, i, became))), EXPIRE)

    def comes(self, client: Client) -> Iterator[Client]:
        """One more caller of the client waits; the first waiter may enter also while another caller of its client
        holds, and notices a lease that has ended."""
        yield client
        if (client.waiting == 1 and client.pc == BEHIND) or self.orphaned(client):
            yield self.enters(client)
        if client.expired and client.pc == ENTER:
            yield client._replace(woken=True)

    def cancels(self, client: Client, fences: bool) -> Iterator[tuple[str, Client]]:
        if client.waiting:
            left = self.gives_up(client)
            yield "the first gives up", left
            if client.pc == ENTER and client.told and left.pc == ENTER and client.fresh and client.held == NONE:
                # The next waiter inherits an entry of which a message has said that it was granted the name
                became = self.holds(left._replace(ordered=left.ordered[:-1]), client.entry, True)
                yield "the first gives up", became._replace(ordered=(*became.ordered, ("CONFIRM", client.entry)))
            ahead = fences and (client.held != NONE or any(not over for _, _, over in client.handed_over))
            if ahead and client.pc in (ENTER, QUEUED) and left.pc == ENTER:
                yield "the first gives up", left._replace(pc=BEHIND, entry_sent=True, ordered=left.ordered[:-1])
            elif ahead and left.pc == BEHIND and left.waiting:
                yield "the first gives up", self.enters(left)
        if client.waiting > 1:
            yield "the last gives up", client._replace(waiting=client.waiting - 1)
        if client.handed_over:
            for became in self.resumes_to_leave(client, 0, fences):
                yield "resumes to leave", became

    def partial_executions(self, s: State, i: int, client: Client) -> Iterator[tuple[tuple[Command, ...], State]]:
        """Which of client i's commands may have been executed when its connections end, and the state after that."""
        sets = [
            chosen for count in range(len(client.unordered) + 1) for chosen in combinations(client.unordered, count)
        ]
        for count in range(len(client.ordered) + 1):
            for chosen in sets:
                after, sent = s, (*chosen, *client.ordered[:count])
                for command in sent:
                    after, _ = self.executed(after, i, command)
                yield sent, changed(after, i, subscribed=False)


def other_library_steps(s: State) -> Iterator[Step]:
    if s.key == FREE and s.budget[FOREIGN]:
        yield False, ("another library acquires it",), spent(s._replace(key=OTHER, marked=False), FOREIGN)
    if s.key == OTHER:
        yield True, ("another library releases it",), s._replace(key=FREE, due=True)


def expired(s: State) -> State:
    return s._replace(key=FREE, marked=False, moment=False, due=True)


def with_expired_lease(client: Client, number: int, moment: bool) -> Client | None:
    """The client after the key expired, while the client holds the lease or before it knows of the grant; None: this
    case is not explored."""
    client = client._replace(fresh=client.fresh and number != client.entry)
    handed_over = tuple((token, contended, over or token == number) for token, contended, over in client.handed_over)
    if handed_over != client.handed_over:
        return client._replace(handed_over=handed_over)
    if client.held == number:
        return client._replace(held=NONE, contended=False, expired=(*client.expired, (number, client.contended)))
    if moment:
        return client
    late = [at for at, each in enumerate(client.incoming) if each in ((GRANTED, number), (CONTENDED, number))]
    if not late or client.ordered or client.unordered:
        return None
    return client._replace(incoming=put(client.incoming, late[0], (LATE, number)))


def finished(client: Client) -> bool:
    return not (
        client.waiting
        or client.held != NONE
        or client.expired
        or client.handed_over
        or client.ordered
        or client.unordered
    )


def unsafe(s: State) -> str | None:
    holders = [(i, client.held) for i, client in enumerate(s.clients) if client.held != NONE]
    if len(holders) > 1 or (holders and s.key != holders[0]):
        return f"{holders} hold, the key is of {s.key}"
    return None


def stuck(s: State) -> str | None:
    waiting = [i for i, client in enumerate(s.clients) if not finished(client)]
    if waiting:
        return f"forgotten: {waiting}, the key is of {s.key}, the queue {s.queue}"
    alive = [each for each in s.queue if s.clients[each[0]].pc != DEAD]
    return f"left behind: the key of {s.key}, the queue {s.queue}" if s.key != FREE or alive else None


@uncollected()
def explore(start: State, *mistakes: str) -> tuple[int, str, list[str]]:
    """(number of states, what was found wrong or "", the events that lead there)."""
    protocol = Protocol(*mistakes)
    seen: dict[State, tuple[State, Event] | None] = {start: None}
    todo = deque([start])
    while todo:
        s = todo.popleft()
        nexts = list(protocol.steps(s))
        fault = unsafe(s) or ("" if any(must for must, _, _ in nexts) else stuck(s))
        if fault:
            return len(seen), fault, path_to(seen, s)
        for _, event, after in nexts:
            if after not in seen:
                seen[after] = (s, event)
                todo.append(after)
    return len(seen), "", []


def described(event: Event) -> str:
    return " ".join(map(str, event))


def path_to(seen: dict[State, tuple[State, Event] | None], s: State) -> list[str]:
    """The events that led to a state."""
    path = []
    while (before := seen[s]) is not None:
        s, event = before
        path.append(described(event))
    return path[::-1]
