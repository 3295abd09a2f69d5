"""The model of kept and believed leases (round_trips.py) beside a walk of the real code: what a command does on the
server, what a client does as it hears of a recall, lets go of a name or takes what it keeps. The model is asked at each
of these, from the state in which the real code was; AssertionError: they have drifted apart. Time is the walk's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastlock._protocol import commands
from support import round_trips as model
from support.round_trips import AIN, BOUT, NEW, PC, SUB, TOK, WANTED, Protocol, World

if TYPE_CHECKING:
    from fastlock._protocol.lease import Lease
    from support.walk_clients import WalkedClient
    from support.walk_server import Entry

ENDING_MS = 100  # what ends so soon may have ended by the time of the next command
SCRIPTS = {  # by name, as the model has them
    "acquire": "SET",
    "acquire_or_recall": "SET",
    "release": "DEL!",
    "hand_over": "REL",
    "leave": "LEAVE",
    "extend": "EXT",
}


class Rules(Protocol):
    """The model's rules; recalls are published, whoever hears them."""

    def __init__(self, clients: int, foreign: tuple[int, ...]) -> None:
        super().__init__({"goals": (1,) * clients, "keep": 1, "faults": (0, 0, 0, 0), "foreign": foreign}, None)
        self.recalled: list[bytes] = []

    def push(self, w: Any, i: int, message: Any) -> Any:
        if message[0] != "recall":
            return super().push(w, i, message)
        self.recalled.append(message[1])
        return True


class ModelJudge:
    """Asks the model. compared: what it was asked of."""

    def __init__(self, clients: list[WalkedClient]) -> None:
        self.clients = clients
        self.foreign = len(clients)  # the number of somebody with redis-py
        everybody = tuple(range(self.foreign + 1))
        self.rules, self.silent = Rules(len(everybody), everybody[-1:]), Rules(len(everybody), everybody)
        self.owners: dict[bytes, int] = {}  # of tokens
        self.recalls: dict[bytes, set[bytes]] = {}  # tokens of which each client, by its channel, has heard a recall
        self.keepable: dict[bytes, set[bytes]] = {}  # tokens that were granted to it while it hears recalls
        self.compared: set[str] = set()

    # the server

    def executed(self, call: Any, before: dict[bytes, Entry], after: dict[bytes, Entry], reply: Any) -> None:
        """Compare what the server did by a command. All that was published before must have been heard."""
        asked = self.read(call)
        if asked is None or isinstance(reply, Exception):
            lasting = {name for name, each in before.items() if not 0 <= each.left < ENDING_MS}
            assert lasting <= after.keys() <= before.keys(), f"{call} changed what stands there"
            return
        key, i, command, rules = asked
        entries = before.get(key), before.get(commands.queue_key(key))
        if any(each is not None and 0 <= each.left < ENDING_MS for each in entries):
            self.hear()
            return
        w, rules.recalled = self.world(key, before), []
        if command[0] == "REL" and w.queue and w.key and w.key[1] == command[1]:
            w.key = (*w.key[:2], 1, *w.key[3:])  # the script grants in any case, the model's only where it is marked
        answer = rules.serve(w, i, command)
        found, verb = self.world(key, after), command[0]
        ours, theirs = ((each.key and each.key[1:3], each.queue) for each in (found, w))
        assert ours == theirs, f"{command} leaves {ours}, in the model {theirs}"
        said = reply if isinstance(reply, list) else [reply]
        if verb == "SET":
            assert answer[2] == (reply is None or commands.token_matches(reply, command[1])), f"{verb}: {reply}"
        elif verb in ("JOIN", "LOOK"):
            assert answer[0] == {1: "acq", 0: "que", -1: "gone"}[said[0]], f"{verb}: {reply}"
            assert said[0] != 1 or answer[2] == (said[1] > 0), f"who else waits: {reply}"
        grants = [[message[1] for message in client[AIN]] for client in w.cl]
        if answer and answer[0] == "que":  # an entry may be by such a token, where its first try was
            rules.recalled += [each for granted in grants for each in granted if each[:2] == b"fk"]
        heard = self.hear()
        for client, granted, (told, recalled) in zip(self.clients, grants, heard, strict=False):
            assert told == granted, f"{verb}: told of {told}, not of {granted}"
            hears = client.ear is not None and client.transport.queues.hears_recalls
            assert recalled == ([token + key for token in rules.recalled] if hears else []), f"{verb}: {recalled}"
        self.compared.add(verb)

    def hear(self) -> list[tuple[list[bytes], list[bytes]]]:
        """Of each client: the grants and the recalls that came by now."""
        found = []
        for client in self.clients:
            known = len(client.messages)
            client.hear()
            new, own = list(client.messages)[known:], client.transport.queues.channel
            found.append(([text for channel, text in new if channel == own], [t for c, t in new if c != own]))
        return found

    def read(self, call: Any) -> tuple[bytes, int, tuple[str, bytes], Rules] | None:
        """A call as the model has it: the name, who asks, the command and the rules. None: it changes nothing."""
        if call[0] in (b"SET", b"DELIFEQ"):
            token, verb = call[2], "DEL!" if call[0] == b"DELIFEQ" else "EXT" if b"IFEQ" in call else "SET"
            return call[1], self.owner(token), (verb, token), self.silent
        if call[0] != b"EVALSHA":
            return None
        key, args, script = call[3], call[3 + int(call[2]) :], commands.script_of(call).name
        if script == "enter":
            return key, self.owner(args[0], args[1]), ("JOIN" if args[-1] == b"1" else "LOOK", args[0]), self.rules
        # All clients of a walk are of one process, whose tries recall nothing
        rules = self.silent if SCRIPTS[script] == "SET" else self.rules
        return key, self.owner(args[0]), (SCRIPTS[script], args[0]), rules

    def owner(self, token: bytes, address: bytes | None = None) -> int:
        """Whose token it is: that of an entry, the client's that is told; else nobody needs to know."""
        if address is not None:
            self.owners[token] = self.at(address)
        return self.owners.get(token, 0)

    def at(self, address: bytes) -> int:
        channels = [client.transport.queues.channel for client in self.clients]
        return channels.index(address[: commands.CHANNEL_SIZE])

    def world(self, key: bytes, state: dict[bytes, Entry]) -> World:
        """The state of a name, as the model has it."""
        clients = [list(NEW) for _ in range(self.foreign + 1)]
        for client, real in zip(clients, self.clients, strict=False):
            client[SUB] = int(real.ear is not None)
        held, queue = state.get(key), state.get(commands.queue_key(key))
        holder = None
        if held is not None:
            plain = held.value[:2] + b":" + held.value[3:]
            ours = commands.made_here(plain)
            i, token = (self.owner(plain), plain) if ours else (self.foreign, held.value)
            holder = i, token, int(ours and held.value[2:3] == b"+"), int(ours and plain[:2] == b"fk"), 1
        members = sorted(queue.value, key=queue.value.__getitem__) if queue is not None else []
        entries = tuple((self.at(address), entry) for address, entry in map(commands.split, members))
        return World((holder, entries, tuple(map(tuple, clients)), (0, 0, 0, 0), 0, 0, 0, 0))

    # the clients

    def granted(self, client: WalkedClient, lease: Lease) -> None:
        """Note that a try was granted a lease."""
        queues = client.transport.queues
        if lease._raw_token[:3] == commands.KEPT_PREFIX and queues.hears_recalls:
            self.keepable.setdefault(queues.channel, set()).add(lease._raw_token)

    def deafened(self, client: WalkedClient) -> None:
        """Note that a client may have missed recalls."""
        self.keepable.pop(client.transport.queues.channel, None)

    def heard(self, client: WalkedClient, token: bytes, key: bytes) -> Any:
        """A client is about to hear of a recall. Returns what compares what it does, once it has."""
        queues = client.transport.queues
        held = [queue.circulating for queue in (queues.kept.get(key), queues.by_key.get(key)) if queue is not None]
        mine = any(lease is not None and lease._raw_token == token for lease in held)
        state = ("K" if key in queues.kept else "H") if mine else "A"
        w = self.client(state, token)
        w.of(0)[AIN] = (("recall", token),)
        self.rules.deliver(w, 0, AIN)
        self.recalls.setdefault(queues.channel, set()).add(token)

        def compare() -> None:
            after = w.of(0)
            if after[BOUT]:
                assert ("REL", token) in after[BOUT] and self.under_way(client, token), "recalled, and not released"
                assert key not in queues.kept, "recalled, released, and kept"
            elif state == "H":
                assert after[WANTED] and not queues.by_key[key].keep_until, "recalled, and not noted"
            else:
                assert after[WANTED] and token in queues.unknown, "recalled before it is known, and forgotten"
            self.compared.add(f"recall of {state}")

        return compare

    def lets_go(self, client: WalkedClient, lease: Lease, key: bytes, keeps: float, now: float) -> Any:
        """A client is about to let go of a lease, which may be kept for so many seconds from now. Returns what compares
        what becomes of it."""
        queues, token = client.transport.queues, lease._raw_token
        queue, wanted = queues.by_key.get(key), token in self.recalls.get(queues.channel, ())
        w = self.client("H", token, wanted=wanted)
        c = w.of(0)
        c[model.LEFT], c[model.CONF] = int(lease._deadline > now), 0 if lease._confirmation is not None else 2
        c[SUB] = 1 if queues.hears_recalls else -1
        self.rules.lets_go(c)
        granted = token in self.keepable.get(queues.channel, ())
        waits = queue is not None and queue.waiters.count > 0
        keep = c[PC] == "K" and granted and keeps > 0 and not waits

        def compare() -> None:
            kept = queues.kept.get(key)
            is_kept = kept is not None and kept.circulating is not None and kept.circulating._raw_token == token
            assert not is_kept or c[PC] == "K", "kept against the rules"
            assert is_kept or not keep, "not kept"
            self.compared.add("kept" if is_kept else "let go")

        return compare

    def takes(self, client: WalkedClient, lease: Lease, now: float) -> None:
        """A client has taken a lease that it kept."""
        token = lease._raw_token
        w = self.client("K", token)
        c = w.of(0)
        c[model.GOALS], c[model.LEFT] = 1, int(lease._deadline > now)
        told = token in self.recalls.get(client.transport.queues.channel, ())
        may = [what for what, _ in self.rules.may(w.frozen()) if "takes" in what]
        assert may and not told and not self.under_way(client, token), "given out though it is released"
        self.compared.add("taken")

    def client(self, state: str, token: bytes, wanted: bool = False) -> World:
        """A client of the model in this state, and nobody else."""
        client = list(NEW)
        client[PC], client[TOK], client[WANTED] = state, token, int(wanted)
        return World((None, (), (tuple(client),), (0, 0, 0, 0), 0, 0, 0, 0))

    def under_way(self, client: WalkedClient, token: bytes) -> bool:
        """Whether a release by this token is on its way."""
        flights = [flight for wire in client.wires for flight in wire.flights if not flight.executed]
        calls = [call for flight in flights for call in flight.calls]
        calls += [call for delivery in client.pending for call in delivery.calls(client.wires[0])]
        return any(call[1] == commands.HAND_OVER_LUA.sha and token in call for call in calls if call[0] == b"EVALSHA")
