"""The protocol of handing over as a state machine without time, explored in every order of events.

A client is a process: some callers that want one name, each once. Messages are hints: who hears one asks the server.
The environment may crash a client, cut its connections (some of what was sent was executed, replies and messages are
lost), make a caller give up, let a lease or a grant run out, have one more caller come, and take a free name for a
client of another library.
Checked: at most one believes that it holds; and where nothing more can happen, every caller got the lock or gave up,
and key and queue are gone. What the real scripts, law and gates do is held against this by support/replay.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

Identity = tuple[int, int]  # a client, and which of its tokens and places
Command = tuple[str, int]  # what, and by which token or place
Event = tuple[Any, ...]

FREE, OTHER = (-1, 0), (-2, 0)  # holders that are no client: nobody, and a client of another library
NONE, TWICE = -1, -2  # instead of the token that is held
STRICT = 0  # instead of a number of callers: one, who waits in strict order
# What the first of those who have no lease yet does: BEHIND waits for another of its client, or is nobody.
START, SET, EXTEND, ENTER, QUEUED, BEHIND, DEAD = range(7)
GHOSTS = {"SET": "SET?", "ENTER": "ENTER?"}  # commands whose caller has given up: nobody hears the reply
GRANTED, CONTENDED, WAIT, LATE = "granted", "granted, and more wait", "wait", "granted too late"

MISTAKES = {
    "mark": "who enters does not mark the holder's token",
    "more": "who enters and gets it does not mark that more are waiting",
    "retry": "a release that finds its token marked counts as done",
    "keep": "who gives up keeps what was granted to it",
    "forget": "the one who gives up takes the place of its process along",
    "believe": "a grant is believed without asking the server",
    "reenter": "after a cut a waiter waits on, though its place may be gone",
    "self": "who enters may be granted the name by its own command, and forgets that it heard so before the reply",
    "pass lapsed": "a lease that has run out is passed on",
    "renew": "those behind wait with the place that was granted",
    "late": "a grant whose lease is over when it is heard counts as one",
    "undo": "what undoes a grant does not ask who waits, if the token is not marked",
    "owe": "what was left behind on a connection that was cut is not said again",
    "ahead": "who has asked while another of its client holds, and gives up, leaves its place behind",
    "resume": "a lease that passed on counts, though it was over before its taker ran",
    "overtake": "who comes back from such a lease asks for the place for which another one is asking",
    "pass asked": "a lease passes on though the place of who waits stands in the server's queue",
}


class Client(NamedTuple):
    """What it knows the name by has a number: a token of its own, then one place in the server's queue after the other,
    as a place that was granted is its lease's token, and those behind wait with the next. A lone caller begins with
    SET; several have joined a gate and begin with ENTER, and so does one who waits in strict order.
    """

    pc: int = START
    waiting: int = 1  # callers who have no lease yet
    queues: bool = False  # whether it begins with ENTER
    place: int = 0
    held: int = NONE  # token of the lease that somebody believes to hold
    contended: bool = False  # whether others waited elsewhere when it was granted, or it had to wait for them
    waited: bool = False  # whether the server has put its place into the queue
    asked: bool = False  # while it is BEHIND: the server was asked for its place, by one who gave up, and may know it
    lapsed: tuple[tuple[int, bool], ...] = ()  # leases that ran out, not yet let go: token, contended
    passed: tuple[tuple[int, bool, bool], ...] = ()  # to callers who have not run since: and whether it is over
    heard: bool = False  # whether the server knows where to send hints
    called: bool = False  # a hint came while it was asking: it will ask again
    alone: bool = False  # it waits with its own token: in strict order, or as the reply to its SET was lost
    out: tuple[Command, ...] = ()  # to the server, in order
    own: tuple[Command, ...] = ()  # to the server, in any order
    come: tuple[tuple[str, int], ...] = ()  # from the server: replies to ENTER, hints


class State(NamedTuple):
    clients: tuple[Client, ...]
    budget: tuple[int, ...]  # crashes, cuts, cancels, lapses, takes, callers who come later
    key: Identity = FREE
    marked: bool = False
    moment: bool = False  # granted, and not confirmed: runs out soon
    due: bool = False  # the key has gone by itself, or was another library's: whoever waits will look
    queue: tuple[Identity, ...] = ()
    fences: bool = False  # whether callers may want one: they are granted the name by the server, and ask ahead


Step = tuple[bool, Event, State]
CRASH, CUT, CANCEL, LAPSE, TAKE, COME = range(6)


def begin(callers: tuple[int, ...], *, fences: bool = False, **budget: int) -> State:
    """One client for each number of callers; how often crash, cut, cancel, lapse, take and come may happen."""
    limits = tuple(budget.get(name, 0) for name in ("crash", "cut", "cancel", "lapse", "take", "come"))
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
    """What the scripts do, without those of their rules that are in `wrong`."""

    wrong: frozenset[str]

    def grant(self, s: State, me: Identity = FREE) -> State:
        """A free name to the first in the queue whose client is there, if that is not `me`."""
        while s.queue and (s.queue[0] != me or "self" in self.wrong):
            first, *rest = s.queue
            s = s._replace(queue=tuple(rest))
            i, place = first
            if s.clients[i].heard:
                s = changed(s, i, come=(*s.clients[i].come, ("hint", place)))
                return s._replace(key=first, marked=False, moment=True)
        return s._replace(key=FREE, marked=False, moment=False)

    def served(self, s: State, i: int, command: Command) -> tuple[State, str]:
        """One command executed: the state afterwards, and the reply."""
        verb, number = command
        me = (i, number)
        if verb in ("SET", "SET?"):
            if s.key == FREE:
                return s._replace(key=me, marked=False, moment=False), "ok"
            return s, "mine" if s.key == me else "held"
        if verb in ("ENTER", "ENTER?"):
            return self.enter(s, me)
        if verb == "LEAVE":
            s = s._replace(queue=tuple(each for each in s.queue if each != me))
            return (self.grant(s) if s.key == me and "keep" not in self.wrong else s), "left"
        if s.key != me or (verb in ("DEL", "BATCH") and s.marked):
            return s, "not"
        if verb == "EXTEND":
            return s, "ok"
        if verb in ("DEL", "BATCH") or (verb == "UNDO" and not s.marked and "undo" in self.wrong):
            return s._replace(key=FREE, moment=False), "ok"
        return self.grant(s), "ok"

    def enter(self, s: State, me: Identity) -> tuple[State, str]:
        s = changed(s, me[0], heard=True)._replace(due=False)
        got = s.key == me
        if s.key == FREE:
            s = self.grant(s, me)
            got = s.key == FREE
        if got:
            queue = tuple(each for each in s.queue if each != me)
            marked = bool(queue) and "more" not in self.wrong
            s = s._replace(key=me, queue=queue, marked=marked, moment=False)
            return s, CONTENDED if queue else GRANTED
        if me not in s.queue:
            s = s._replace(queue=(*s.queue, me))
        return s._replace(marked=s.marked or (s.key != OTHER and "mark" not in self.wrong)), WAIT


class Process:
    """What a client does, without those of its rules that are in `wrong`."""

    wrong: frozenset[str]

    @staticmethod
    def enters(client: Client, **fields: Any) -> Client:
        """The first of those who wait asks the server, and answers thereby whatever it was called for."""
        client = client._replace(pc=ENTER, called=False, asked=False, **fields)
        return client._replace(out=(*client.out, ("ENTER", client.place)))

    def holds(self, client: Client, token: int, contended: bool = False) -> Client:
        place = client.place if "renew" in self.wrong else max(client.place, token + 1)
        client = client._replace(pc=BEHIND, waiting=client.waiting - 1, place=place, called=False)
        believed = token if client.held == NONE else TWICE
        return client._replace(held=believed, contended=contended or client.waited, waited=False, asked=False)

    def answered(self, client: Client, command: Command, reply: str) -> Client:
        """What comes of the reply to a command that kept no order with others."""
        verb, token = command
        leads_to = {("SET", "mine"): "EXTEND", ("SET?", reply): "UNDO"}  # the undo comes right behind
        if "retry" not in self.wrong:
            leads_to |= {("DEL", "not"): "REL", ("BATCH", "not"): "REL"}
        own = without(client.own, command)
        if (verb, reply) in leads_to:
            own = tuple(sorted({*own, (leads_to[verb, reply], token)}))
        client = client._replace(own=own)
        if (verb, reply) in (("SET", "ok"), ("EXTEND", "ok")):
            return self.holds(client, token)
        if (verb, reply) == ("SET", "mine"):
            return client._replace(pc=EXTEND)
        if (verb, reply) in (("SET", "held"), ("EXTEND", "not")):
            return self.enters(client, place=0 if client.alone else 1)
        return client

    def hears(self, client: Client) -> Client:
        """The first of what has come from the server."""
        (message, number), *rest = client.come
        client = client._replace(come=tuple(rest))
        if message == "hint":
            if number != client.place or client.pc not in (ENTER, QUEUED):
                return client
            if client.pc == ENTER:
                return client._replace(called="self" not in self.wrong)
            return self.holds(client, number) if "believe" in self.wrong else self.enters(client)
        if message == WAIT:
            client = client._replace(waited=True)
            return self.enters(client) if client.called else client._replace(pc=QUEUED)
        if message == LATE and "late" not in self.wrong:
            client = client._replace(out=(*client.out, ("UNDO", number)))
            return self.enters(client, place=number + 1, waited=False)
        return self.holds(client, number, message == CONTENDED)

    def lets_go(self, client: Client, verb: str = "") -> Client:
        """The holder does, and nobody of its client gets the lease; who is next asks the server. A batch is deleted
        whatever is known, and what was marked of it handed over."""
        verb = verb or ("REL" if client.waiting or client.contended else "DEL")
        own = tuple(sorted((*client.own, (verb, client.held))))
        client = client._replace(own=own, held=NONE, contended=False)
        return self.enters(client) if client.waiting and client.pc == BEHIND else client

    def lets_go_late(self, client: Client, at: int) -> Client:
        """The holder of a lease that has run out does: who is next asks the server, if it has not looked by itself."""
        token, contended = client.lapsed[at]
        verb = "REL" if client.waiting or contended else "DEL"
        own = tuple(sorted((*client.own, (verb, token))))
        client = client._replace(own=own, lapsed=without(client.lapsed, client.lapsed[at]))
        return self.enters(client) if self.forsaken(client) else client

    @staticmethod
    def forsaken(client: Client) -> bool:
        """Whether some wait behind a lease that is over."""
        passed = any(not over for _, _, over in client.passed)
        return client.pc == BEHIND and client.waiting > 0 and client.held == NONE and not passed

    @staticmethod
    def passes(client: Client, token: int, contended: bool) -> Client:
        """A lease goes to the first of those who wait, who has not run yet."""
        return client._replace(waiting=client.waiting - 1, passed=(*client.passed, (token, contended, False)))

    def resumes(self, client: Client, at: int) -> Iterator[Client]:
        """One to whom a lease has passed runs: it holds, and who is next may ask already; or the lease is over."""
        token, contended, over = client.passed[at]
        client = client._replace(passed=without(client.passed, client.passed[at]))
        if not over or "resume" in self.wrong:
            client = client._replace(held=token if client.held == NONE else TWICE, contended=contended)
        else:
            own = tuple(sorted({*client.own, ("UNDO", token)}))
            client = client._replace(own=own, waiting=client.waiting + 1)
            if self.forsaken(client) or "overtake" in self.wrong:
                yield self.enters(client)
                return
        yield client
        if client.waiting and client.pc == BEHIND:
            yield self.enters(client)

    def resumes_to_leave(self, client: Client, at: int) -> Client:
        """It gives up before it has run: the lease goes to the next, or back."""
        token, contended, over = client.passed[at]
        client = client._replace(passed=without(client.passed, client.passed[at]))
        if client.waiting and client.pc == BEHIND and not over and not client.asked:
            return self.passes(client, token, contended)
        client = client._replace(own=tuple(sorted({*client.own, ("UNDO", token)})))
        return self.enters(client) if self.forsaken(client) else client

    def gives_up(self, client: Client) -> Client:
        """The first of those who wait; the next one has the place, and looks."""
        out = tuple((GHOSTS.get(verb, verb), number) for verb, number in client.out)
        come = tuple(each for each in client.come if each[0] == "hint")
        left = client._replace(waiting=client.waiting - 1, out=out, come=come)
        left = left._replace(waited=left.waited and left.waiting > 0)
        if client.pc in (SET, EXTEND):
            rest = [("SET?", token) if verb == "SET" else ("UNDO", token) for verb, token in client.own]
            return left._replace(pc=BEHIND, own=tuple(rest))
        if client.pc == BEHIND and client.asked and not left.waiting:
            return left._replace(asked=False, place=client.place + 1, out=(*out, ("LEAVE", client.place)))
        if client.pc == BEHIND:
            return self.enters(left) if self.forsaken(left) else left
        if left.waiting and "forget" not in self.wrong:
            return self.enters(left)
        if client.held != NONE and "ahead" in self.wrong:
            return left._replace(pc=BEHIND)
        place = client.place if left.waiting else client.place + 1  # whoever comes waits with another
        left = left._replace(pc=QUEUED if left.waiting else BEHIND, place=place, out=(*out, ("LEAVE", client.place)))
        own_token = client.alone or not client.queues  # the server has heard of it: it is undone too
        return left._replace(own=(*left.own, ("UNDO", 0))) if own_token else left

    def again(self, client: Client) -> Client:
        """After a cut: what was in flight is asked again, what was left behind first; and a place may be gone."""
        if client.pc == QUEUED and "reenter" in self.wrong:
            return client._replace(heard=True, come=())
        asks = client.pc in (ENTER, QUEUED)
        other = {"SET?": "UNDO", "BATCH": "REL"}
        own = tuple(sorted({(other.get(verb, verb), number) for verb, number in client.own}))
        pending_undos = tuple(each for each in client.out if each[0] in ("LEAVE", "UNDO") and "owe" not in self.wrong)
        if any(verb == "SET" for verb, _ in own):
            client = client._replace(alone=True)
        called, client = client.pc == ENTER, client._replace(heard=False, own=own, come=(), out=pending_undos)
        return self.enters(client)._replace(called=called) if asks else client


class Protocol(Server, Process):
    """The rules, without those in `mistakes`, and everything that can happen.

    ENTER, LEAVE and messages keep their order, as they share a connection; what else a client asks may be executed at
    any time. What is left out makes no other order at the server: who is called wakes at once, as its ENTER may be
    executed later; replies but those to ENTER are heard at once, as what they lead to may be executed later, and as a
    cut may lose them. A look is a waiter's timer: the real one goes off every second whatever happens, and would heal
    what the protocol forgets, so here only where no message can tell why, as the key has gone by itself, or its holder
    is of another library.
    """

    def __init__(self, *mistakes: str) -> None:
        assert set(mistakes) <= set(MISTAKES), mistakes
        self.wrong = frozenset(mistakes)

    def steps(self, s: State) -> Iterator[Step]:
        """(whether it must happen in the end, what, the state afterwards). One event may lead to several states."""
        for i, client in enumerate(s.clients):
            if client.pc == DEAD:
                if s.key[0] == i:
                    yield True, ("expires",), expired(s)
                continue
            yield from self.executions(s, i, client)
            yield from self.own_steps(s, i, client)
            if client.pc != START and not finished(client):
                yield from self.faults(s, i, client)
        yield from of_others(s)

    def executions(self, s: State, i: int, client: Client) -> Iterator[Step]:
        if client.out:
            command = client.out[0]
            after, reply = self.served(changed(s, i, out=client.out[1:]), i, command)
            if command[0] == "ENTER":
                after = changed(after, i, come=(*after.clients[i].come, (reply, command[1])))
            yield True, ("executes", i, command), after
        for command in client.own:
            after, reply = self.served(s, i, command)
            changed_client = self.answered(after.clients[i], command, reply)
            yield True, ("executes", i, command), after._replace(clients=put(after.clients, i, changed_client))

    def own_steps(self, s: State, i: int, client: Client) -> Iterator[Step]:
        def step(what: str, became: Client, *more: Any) -> Step:
            return True, (what, i, *more), s._replace(clients=put(s.clients, i, became))

        if client.come:
            became = self.hears(client)
            yield step("hears", became)
            if s.fences and became.held != NONE and became.waiting and became.pc == BEHIND:
                yield step("hears", self.enters(became))
        if client.pc == START and client.queues:
            yield step("asks", self.enters(client))
        elif client.pc == START:
            yield step("asks", client._replace(pc=SET, own=(("SET", 0),)))
        if client.held != NONE:
            for what, verb in (("lets go", ""), ("lets go in a batch", "BATCH")):
                yield step(what, self.lets_go(client, verb))
                if client.waiting and client.pc == BEHIND and (not client.asked or "pass asked" in self.wrong):
                    yield step(what, self.passes(client._replace(held=NONE), client.held, client.contended))
        for at, (token, *_) in enumerate(client.passed):
            for became in self.resumes(client, at):
                yield step("resumes", became, token)
        for at, (token, _) in enumerate(client.lapsed):
            yield step("lets go late", self.lets_go_late(client, at), token)
            if "pass lapsed" in self.wrong and self.forsaken(client):
                became = self.holds(client._replace(lapsed=without(client.lapsed, client.lapsed[at])), token)
                yield step("lets go late", became, token)
        if (client.pc == QUEUED and (s.due or s.key == OTHER)) or self.forsaken(client):
            yield step("looks", self.enters(client))

    def faults(self, s: State, i: int, client: Client) -> Iterator[Step]:
        if s.budget[CRASH]:
            for sent, after in self.partly(s, i, client):
                dead = put(after.clients, i, Client(pc=DEAD, waiting=0))
                yield False, ("dies", i, sent), spent(after._replace(clients=dead), CRASH)
        if s.budget[CUT]:
            for sent, after in self.partly(s, i, client):
                became = self.again(after.clients[i]._replace(out=client.out, own=client.own))
                yield False, ("is cut", i, sent), spent(after._replace(clients=put(after.clients, i, became)), CUT)
        if s.budget[CANCEL]:
            for what, became in self.cancels(client, s.fences):
                yield False, (what, i), spent(s._replace(clients=put(s.clients, i, became)), CANCEL)
        if s.budget[COME] and client.queues and not client.alone:
            for became in self.comes(client._replace(waiting=client.waiting + 1)):
                yield False, ("another comes", i), spent(s._replace(clients=put(s.clients, i, became)), COME)
        if s.budget[LAPSE] and s.key[0] == i and (lapsed := runs_out(client, s.key[1], s.moment)) is not None:
            yield False, ("expires",), spent(expired(s._replace(clients=put(s.clients, i, lapsed))), LAPSE)

    def comes(self, client: Client) -> Iterator[Client]:
        """One more of it waits; the first may ask for its turn also while another of it holds, and sees what is
        over."""
        yield client
        if (client.waiting == 1 and client.pc == BEHIND) or self.forsaken(client):
            yield self.enters(client)
        if client.lapsed and client.pc == ENTER:
            yield client._replace(called=True)

    def cancels(self, client: Client, fences: bool) -> Iterator[tuple[str, Client]]:
        if client.waiting:
            left = self.gives_up(client)
            yield "the first gives up", left
            ahead = fences and (client.held != NONE or any(not over for _, _, over in client.passed))
            if ahead and client.pc in (ENTER, QUEUED) and left.pc == ENTER:
                yield "the first gives up", left._replace(pc=BEHIND, asked=True, out=left.out[:-1])
            elif ahead and left.pc == BEHIND and left.waiting:
                yield "the first gives up", self.enters(left)
        if client.waiting > 1:
            yield "the last gives up", client._replace(waiting=client.waiting - 1)
        if client.passed:
            yield "resumes to leave", self.resumes_to_leave(client, 0)

    def partly(self, s: State, i: int, client: Client) -> Iterator[tuple[tuple[Command, ...], State]]:
        """What may have been executed of all that client i has sent when its connections end, and what came of it."""
        sets = [chosen for count in range(len(client.own) + 1) for chosen in combinations(client.own, count)]
        for count in range(len(client.out) + 1):
            for chosen in sets:
                after, sent = s, (*chosen, *client.out[:count])
                for command in sent:
                    after, _ = self.served(after, i, command)
                yield sent, changed(after, i, heard=False)


def of_others(s: State) -> Iterator[Step]:
    if s.key == FREE and s.budget[TAKE]:
        yield False, ("another library takes it",), spent(s._replace(key=OTHER, marked=False), TAKE)
    if s.key == OTHER:
        yield True, ("another library releases it",), s._replace(key=FREE, due=True)


def expired(s: State) -> State:
    return s._replace(key=FREE, marked=False, moment=False, due=True)


def runs_out(client: Client, number: int, moment: bool) -> Client | None:
    """The client when its key expires, if that is what is explored: while it holds, or before it knows."""
    passed = tuple((token, contended, over or token == number) for token, contended, over in client.passed)
    if passed != client.passed:
        return client._replace(passed=passed)
    if client.held == number:
        lapsed = (*client.lapsed, (number, client.contended))
        return client._replace(held=NONE, contended=False, lapsed=lapsed)
    if moment:
        return client
    late = [at for at, each in enumerate(client.come) if each in ((GRANTED, number), (CONTENDED, number))]
    if not late or client.out or client.own:
        return None
    return client._replace(come=put(client.come, late[0], (LATE, number)))


def finished(client: Client) -> bool:
    return not (client.waiting or client.held != NONE or client.lapsed or client.passed or client.out or client.own)


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


def explore(start: State, *mistakes: str) -> tuple[int, str, list[str]]:
    """(number of states, what was found wrong or "", the way there)."""
    protocol = Protocol(*mistakes)
    seen: dict[State, tuple[State, Event] | None] = {start: None}
    todo = deque([start])
    while todo:
        s = todo.popleft()
        nexts = list(protocol.steps(s))
        fault = unsafe(s) or ("" if any(must for must, _, _ in nexts) else stuck(s))
        if fault:
            return len(seen), fault, way(seen, s)
        for _, event, after in nexts:
            if after not in seen:
                seen[after] = (s, event)
                todo.append(after)
    return len(seen), "", []


def told(event: Event) -> str:
    return " ".join(map(str, event))


def way(seen: dict[State, tuple[State, Event] | None], s: State) -> list[str]:
    """The events that led to a state."""
    path = []
    while (before := seen[s]) is not None:
        s, event = before
        path.append(told(event))
    return path[::-1]
