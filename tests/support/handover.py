"""The protocol of handing over as a state machine without time, explored in every order of events.

A client is a process: so many of its callers want one name, each once, and it has one place in the server's queue.
Pushes are hints: who hears one asks the server. The environment may crash a client, cut a connection (a prefix of what
was sent was executed, replies and pushes are lost), make a caller give up, let a lease or a grant run out, and take a
free name for a client of another library. Checked: at most one client believes that it holds; and where nothing more
can happen, every caller got the lock or gave up, and key and queue are gone. A look is a waiter's timer: the real one
goes off every second whatever happens, and would heal what the protocol forgets, so here only where no message can tell
why, as the key has gone by itself, or its holder is of another library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

FREE, OTHER = -1, -2  # holders that are no client: nobody, and a client of another library
START, SET, ENTER, QUEUED, HOLD, LAPSED, DEL, REL, LEAVE, DONE, DEAD = range(11)

MISTAKES = {
    "mark": "who enters does not mark the holder's token",
    "more": "who enters and gets it does not mark that more are waiting",
    "retry": "a release that finds its token marked counts as done",
    "keep": "who gives up keeps what was granted to it",
    "forget": "the one who gives up takes the place of its process along",
    "believe": "a grant is believed without asking the server",
    "reenter": "after a cut a waiter waits on, though its place may be gone",
    "self": "who enters may be granted the name by its own command, which answers: wait",
    "pass lapsed": "a lease that has run out is passed on",
}


class Client(NamedTuple):
    pc: int = START
    others: int = 0  # callers behind the one at work
    heard: bool = False  # whether the server knows where to send hints
    ignore: int = 0  # replies to callers who have given up meanwhile


class State(NamedTuple):
    clients: tuple[Client, ...]
    to_server: tuple[tuple[str, ...], ...]
    to_client: tuple[tuple[str, ...], ...]
    budget: tuple[int, ...]  # crashes, cuts, cancels, lapses, takes
    key: int = FREE
    marked: bool = False
    moment: bool = False  # granted, and not confirmed: runs out soon
    due: bool = False  # the key has gone by itself, or was another library's: whoever waits will look
    queue: tuple[int, ...] = ()


CRASH, CUT, CANCEL, LAPSE, TAKE = range(5)


def begin(callers: tuple[int, ...], **budget: int) -> State:
    """One client for each number of callers; how often crash, cut, cancel, lapse and take may happen."""
    limits = tuple(budget.get(name, 0) for name in ("crash", "cut", "cancel", "lapse", "take"))
    none: tuple[tuple[str, ...], ...] = ((),) * len(callers)
    return State(tuple(Client(others=count - 1) for count in callers), none, none, limits)


def put(row: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*row[:at], value, *row[at + 1 :])


class Protocol:
    """The rules, without those in `mistakes`."""

    def __init__(self, *mistakes: str) -> None:
        assert set(mistakes) <= set(MISTAKES), mistakes
        self.wrong = frozenset(mistakes)

    # the server

    def grant(self, s: State, me: int = FREE) -> State:
        """A free name to the first in the queue whose client is there, if that is not `me`."""
        while s.queue and (s.queue[0] != me or "self" in self.wrong):
            first = s.queue[0]
            s = s._replace(queue=s.queue[1:])
            if s.clients[first].heard:
                return self.push(s, first, "hint")._replace(key=first, marked=False, moment=True)
        return s._replace(key=FREE, marked=False, moment=False)

    @staticmethod
    def push(s: State, i: int, message: str) -> State:
        if not s.clients[i].heard:
            return s
        return s._replace(to_client=put(s.to_client, i, (*s.to_client[i], message)))

    def execute(self, s: State, i: int, command: str) -> State:
        """One command of client i, with its reply."""
        answer: Callable[[State, str], State] = lambda s, text: s._replace(  # noqa: E731
            to_client=put(s.to_client, i, (*s.to_client[i], text))
        )
        if command == "SET":
            if s.key == FREE:
                return answer(s._replace(key=i, marked=False, moment=False), "ok")
            return answer(s, "ok" if s.key == i else "held")
        if command == "ENTER":
            return self.enter(s, i, answer)
        if command == "DEL":
            if s.key == i and not s.marked:
                return answer(s._replace(key=FREE, moment=False), "released")
            return answer(s, "not")
        if command == "LEAVE":
            s = s._replace(queue=tuple(q for q in s.queue if q != i))
            if s.key == i and "keep" not in self.wrong:
                s = self.grant(s)
            return answer(s, "left")
        assert command == "REL"
        if s.key != i:
            return answer(s, "not")
        return answer(self.grant(s) if s.marked else s._replace(key=FREE, moment=False), "released")

    def enter(self, s: State, i: int, answer: Callable[[State, str], State]) -> State:
        s = s._replace(clients=put(s.clients, i, s.clients[i]._replace(heard=True)), due=False)
        got = s.key == i
        if s.key == FREE:
            s = self.grant(s, me=i)
            got = s.key == FREE
        if got:
            queue = tuple(q for q in s.queue if q != i)
            return answer(
                s._replace(key=i, queue=queue, marked=bool(queue) and "more" not in self.wrong, moment=False), "granted"
            )
        if i not in s.queue:
            s = s._replace(queue=(*s.queue, i))
        if s.key != OTHER and "mark" not in self.wrong:
            s = s._replace(marked=True)
        return answer(s, "queued")

    # a client

    def hear(self, client: Client, message: str) -> tuple[Client, tuple[str, ...]]:
        """What a client makes of a reply or push: itself afterwards, and what it sends."""
        pc = client.pc
        if message == "hint":
            if pc == QUEUED and "believe" in self.wrong:
                return client._replace(pc=HOLD), ()
            return (client._replace(pc=ENTER), ("ENTER",)) if pc == QUEUED else (client, ())
        if client.ignore and message in ("granted", "queued"):
            return client._replace(ignore=client.ignore - 1), ()
        if (pc, message) in ((SET, "ok"), (ENTER, "granted")):
            return client._replace(pc=HOLD), ()
        if (pc, message) == (SET, "held"):
            return client._replace(pc=ENTER), ("ENTER",)
        if (pc, message) == (ENTER, "queued"):
            return client._replace(pc=QUEUED), ()
        if (pc, message) == (DEL, "not") and "retry" not in self.wrong:
            return client._replace(pc=REL), ("REL",)
        if pc in (DEL, REL) and message in ("released", "not"):
            return self.next(client)
        if (pc, message) == (LEAVE, "left"):
            return client._replace(pc=DONE), ()
        return client, ()

    @staticmethod
    def next(client: Client) -> tuple[Client, tuple[str, ...]]:
        """One caller has done; the next of them, if any, has been waiting in the process."""
        if not client.others:
            return client._replace(pc=DONE), ()
        return client._replace(pc=ENTER, others=client.others - 1), ("ENTER",)

    # everything that can happen

    def steps(self, s: State) -> Iterator[tuple[bool, str, State]]:
        """(whether it must happen in the end, what, the state afterwards)."""
        for i, client in enumerate(s.clients):
            if s.to_server[i]:
                command, *rest = s.to_server[i]
                yield (
                    True,
                    f"server: {command} of {i}",
                    self.execute(s._replace(to_server=put(s.to_server, i, tuple(rest))), i, command),
                )
            if client.pc == DEAD:
                if s.key == i:
                    yield True, f"the key of {i}, who is dead, expires", self.expired(s)
                continue
            yield from self.own_steps(s, i, client)
            yield from self.faults(s, i, client)
        yield from self.of_others(s)

    def own_steps(self, s: State, i: int, client: Client) -> Iterator[tuple[bool, str, State]]:
        def became(changed: Client, *sent: str) -> State:
            return s._replace(
                clients=put(s.clients, i, changed), to_server=put(s.to_server, i, (*s.to_server[i], *sent))
            )

        if s.to_client[i]:
            message, *rest = s.to_client[i]
            changed, sent = self.hear(client, message)
            yield (
                True,
                f"{i} hears {message}",
                became(changed, *sent)._replace(to_client=put(s.to_client, i, tuple(rest))),
            )
        if client.pc == START:
            yield True, f"{i} asks", became(client._replace(pc=SET), "SET")
        if client.pc in (HOLD, LAPSED):
            yield True, f"{i} releases", became(client._replace(pc=DEL), "DEL")
            if client.others and (client.pc == HOLD or "pass lapsed" in self.wrong):
                yield True, f"{i} passes on", became(client._replace(pc=HOLD, others=client.others - 1))
        if client.pc == QUEUED and (s.due or s.key == OTHER) and "ENTER" not in s.to_server[i]:
            yield True, f"{i} looks", became(client._replace(pc=ENTER), "ENTER")
        if client.pc in (QUEUED, ENTER) and s.budget[CANCEL]:
            if client.others and "forget" not in self.wrong:  # the next one has the place, and looks
                ignore = client.ignore + (client.pc == ENTER)
                gone = became(client._replace(pc=ENTER, others=client.others - 1, ignore=ignore), "ENTER")
            elif client.others:
                gone = became(client._replace(pc=QUEUED, others=client.others - 1), "LEAVE")
            else:
                gone = became(client._replace(pc=LEAVE), "LEAVE")
            yield False, f"a caller of {i} gives up", spent(gone, CANCEL)

    def faults(self, s: State, i: int, client: Client) -> Iterator[tuple[bool, str, State]]:
        if client.pc in (START, DONE):
            return
        if s.budget[CRASH]:
            for count, after in self.executed(s, i):
                dead = put(after.clients, i, Client(pc=DEAD))
                yield False, f"{i} dies, {count} executed", spent(after._replace(clients=dead), CRASH)
        if s.budget[CUT]:
            for count, after in self.executed(s, i):
                changed, sent = self.again(client)
                after = after._replace(clients=put(after.clients, i, changed), to_server=put(after.to_server, i, sent))
                yield False, f"{i} is cut, {count} executed", spent(after, CUT)
        if s.budget[LAPSE] and s.key == i and (client.pc == HOLD or s.moment):
            lapsed = client._replace(pc=LAPSED) if client.pc == HOLD else client
            after = self.expired(s._replace(clients=put(s.clients, i, lapsed)))
            yield False, f"the key of {i} expires", spent(after, LAPSE)

    def again(self, client: Client) -> tuple[Client, tuple[str, ...]]:
        """After a cut: what was in flight is asked again, and a place may be gone."""
        if client.pc == QUEUED and "reenter" in self.wrong:
            return client._replace(heard=True), ()
        asked = {SET: "SET", ENTER: "ENTER", QUEUED: "ENTER", DEL: "DEL", REL: "REL", LEAVE: "LEAVE"}
        pc = ENTER if client.pc == QUEUED else client.pc
        return client._replace(pc=pc, heard=False, ignore=0), ((asked[client.pc],) if client.pc in asked else ())

    def executed(self, s: State, i: int) -> Iterator[tuple[int, State]]:
        """What may have been executed of the unanswered commands of client i when its connection ended."""
        commands = s.to_server[i]
        for count in range(len(commands) + 1):
            after = s
            for command in commands[:count]:
                after = self.execute(after, i, command)
            yield (
                count,
                after._replace(
                    to_server=put(after.to_server, i, ()),
                    to_client=put(after.to_client, i, ()),
                    clients=put(after.clients, i, after.clients[i]._replace(heard=False)),
                ),
            )

    @staticmethod
    def expired(s: State) -> State:
        return s._replace(key=FREE, marked=False, moment=False, due=True)

    @staticmethod
    def of_others(s: State) -> Iterator[tuple[bool, str, State]]:
        if s.key == FREE and s.budget[TAKE]:
            yield False, "another library takes it", spent(s._replace(key=OTHER, marked=False), TAKE)
        if s.key == OTHER:
            yield True, "another library releases it", s._replace(key=FREE, due=True)


def spent(s: State, what: int) -> State:
    return s._replace(budget=put(s.budget, what, s.budget[what] - 1))


def unsafe(s: State) -> str | None:
    holders = [i for i, client in enumerate(s.clients) if client.pc == HOLD]
    if len(holders) > 1 or (holders and s.key != holders[0]):
        return f"{holders} hold, the key is of {s.key}"
    return None


def stuck(s: State) -> str | None:
    waiting = [i for i, client in enumerate(s.clients) if client.pc not in (DONE, DEAD)]
    if waiting:
        return f"forgotten: {waiting}, the key is of {s.key}, the queue {s.queue}"
    alive = [i for i in s.queue if s.clients[i].pc != DEAD]
    return f"left behind: the key of {s.key}, the queue {s.queue}" if s.key != FREE or alive else None


def explore(start: State, *mistakes: str) -> tuple[int, str, list[str]]:
    """(number of states, what was found wrong or "", the way there)."""
    protocol = Protocol(*mistakes)
    seen: dict[State, tuple[State, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        s = todo.popleft()
        nexts = list(protocol.steps(s))
        fault = unsafe(s) or ("" if any(must for must, _, _ in nexts) else stuck(s))
        if fault:
            return len(seen), fault, way(seen, s)
        for _, what, after in nexts:
            if after not in seen:
                seen[after] = (s, what)
                todo.append(after)
    return len(seen), "", []


def way(seen: dict[State, tuple[State, str] | None], s: State) -> list[str]:
    """The events that led to a state."""
    path = []
    while (before := seen[s]) is not None:
        s, what = before
        path.append(what)
    return path[::-1]
