"""What is sent to the server: opcodes, their templates on each kind of server, scripts, and what a server can do.

The parts of a template are bytes (literal arguments) and NAME, TOKEN, MS (placeholders for what the call gives); the
core compiles them. The templates that a connection uses are its command table, chosen by the capabilities that its own
handshake found: a promoted node may be older than the one before. Never here: sockets, waiting, redis-py.
"""

from __future__ import annotations

import binascii
import enum
import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar

T = TypeVar("T")

NAME, TOKEN, MS = 0, 1, 2


class Opcode(enum.IntEnum):
    """What a server is to do: the index of a template in a command table."""

    ACQUIRE = 0
    ACQUIRE_ENDLESS = 1
    RELEASE = 2
    EXTEND = 3
    EXTEND_SCRIPT = 4
    RELEASE_SCRIPT = 5
    PTTL = 6
    GET = 7
    EXISTS = 8
    ACQUIRE_SCRIPT = 9
    ACQUIRE_ENDLESS_SCRIPT = 10
    ACQUIRE_OR_RECALL = 11


# What does the same where a server has no such command, or it, or a proxy, refuses what its handshake promised.
SCRIPTED: dict[int, Opcode] = {
    Opcode.ACQUIRE: Opcode.ACQUIRE_SCRIPT,
    Opcode.ACQUIRE_ENDLESS: Opcode.ACQUIRE_ENDLESS_SCRIPT,
    Opcode.RELEASE: Opcode.RELEASE_SCRIPT,
    Opcode.EXTEND: Opcode.EXTEND_SCRIPT,
}

# What to send instead where a server refuses a command.
OTHER_FORMS: dict[int, Opcode] = {**SCRIPTED, Opcode.ACQUIRE_OR_RECALL: Opcode.ACQUIRE}

# Capabilities, as `Client.server_info()` shows them.
SET_NX_GET = "set-nx-get"  # SET ... NX GET: Redis 7.0, every Valkey
CLUSTERED = "cluster"  # it is a node of a cluster
DELIFEQ = "delifeq"  # DELIFEQ key value: Valkey 9.0
DELEX = "delex"  # DELEX key IFEQ value: Redis 8.4, Valkey 9.2
SET_IFEQ = "set-ifeq"  # SET ... IFEQ value: came before DELIFEQ (Valkey 8.1) and with DELEX (Redis 8.4)

# Of our tokens: their length; how they begin; and how those begin of leases that their client may keep
TOKEN_SIZE, PLAIN_PREFIX, KEPT_PREFIX = 35, b"fl:", b"fk:"
KEEP_CHANNEL = b"fastlock:keep:"  # and the id of a process: where it is told that somebody waits for what it keeps
CHANNEL_SIZE, ADDRESS_SIZE = 41, 46  # bytes of a channel's name, and of an address in the queue
# Of tokens of locks that several may hold: their mode, which stands behind a plain token and `|`
READER, WRITER, SEMAPHORE = b"r", b"w", b"s"
_SHARED_MARKS = (b"|r", b"|w", b"|s")
QUEUE_KEPT_MS = 10_000  # the server keeps a queue so long after its last use: its waiters enter far more often
# A fence counter outlives the last use of its name by an hour: by then the server's clock is past whatever it held.
FENCE_KEPT_MS = 3_600_000
LOOK, JOIN, CONFIRM = range(3)  # what an entry does


def made_here(token: bytes) -> bool:
    """Whether a token was made here, and not given by a caller."""
    return len(token) == TOKEN_SIZE and token[:3] in (PLAIN_PREFIX, KEPT_PREFIX)


SCRIPTS: list[Script] = []


def script_text(*parts: str) -> bytes:
    """The text of a Lua script, behind the parts it shares with others."""
    folder = resources.files(__package__).joinpath("scripts")
    return b"".join(folder.joinpath(f"{part}.lua").read_bytes() for part in parts)


class Script:
    """A Lua script: its text, behind the parts it shares with others, and the SHA1 by which the server knows it. It is
    among SCRIPTS, wherever it is made: a server that has forgotten one is sent them all."""

    def __init__(self, *parts: str) -> None:
        self.name = parts[-1]
        self.text = script_text(*parts)
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()
        SCRIPTS.append(self)

    @property
    def rights(self) -> str:
        """The permissions that an ACL user needs to run the script, as ACL SETUSER has them."""
        calls = re.findall(r"redis\.p?call\('(\w+)'(?:, '(\w+)')?", self.text.decode())
        commands = {f"{one}|{two}" if one == "PUBSUB" else one for one, two in calls}
        return " ".join(["+evalsha", "+script|load", *sorted(f"+{command.lower()}" for command in commands)])

    def template(self, *args: bytes | int) -> tuple[bytes | int, ...]:
        return (b"EVALSHA", self.sha, b"1", *args)

    @property
    def load(self) -> tuple[bytes, ...]:
        return (b"SCRIPT", b"LOAD", self.text)

    @property
    def loads(self) -> list[tuple[bytes, ...]]:
        """What loads the script; and first, if it may grant a name, those by which a waiter leaves and releases, and
        then joins and confirms. Nobody may read the replies to them: a server that knows how to join knows the rest."""
        needed = [LEAVE_LUA, HAND_OVER_LUA, ENTER_LUA] if b"local function grant(" in self.text else []
        return [script.load for script in dict.fromkeys([*needed, self])]


# First those that leave and release: whoever has all of them loaded may die half way
RELEASE_LUA = Script("release")
RELEASE_MANY_LUA = Script("release_many")
LEAVE_LUA = Script("tokens", "publish", "grant", "leave")
HAND_OVER_LUA = Script("tokens", "publish", "grant", "hand_over")
RELEASE_ALL_LUA = Script("all_mine", "tokens", "publish", "grant", "release_all")
SHARED_RELEASE_LUA = Script("release_alone", "ends", "publish", "shared", "shared_release")
DOWNGRADE_LUA = Script("ends", "publish", "shared", "downgrade")
ACQUIRE_LUA = Script("acquire")
ACQUIRE_MANY_LUA = Script("acquire_many")
FENCED_LUA = Script("acquire_fenced")
ACQUIRE_OR_RECALL_LUA = Script("recall", "acquire_or_recall")
ENTER_LUA = Script("tokens", "publish", "grant", "recall", "enter")
ACQUIRE_ALL_LUA = Script("all_free", "tokens", "acquire_all")
SHARED_JOIN_LUA = Script("join_free", "ends", "publish", "shared", "shared_reply", "shared_join")
SHARED_LOOK_LUA = Script("ends", "publish", "shared", "shared_reply", "shared_look")
EXTEND_LUA = Script("tokens", "extend")
RENEW_MANY_LUA = Script("tokens", "ends", "renew_many")
RESIZE_LUA = Script("ends", "publish", "shared", "resize")
DESCRIBE_LUA = Script("ends", "describe")

CHECK_FENCE = script_text("check_fence")  # for a client of redis-py (`fencing.py`)

TemplateParts = tuple[bytes | int, ...]
RawCommand = tuple[bytes, ...]


def command_table(capabilities: frozenset[str]) -> tuple[TemplateParts, ...]:
    """The template of each opcode, by index, on a server with these capabilities."""
    table: dict[int, TemplateParts] = {
        Opcode.ACQUIRE_SCRIPT: ACQUIRE_LUA.template(NAME, TOKEN, MS),
        Opcode.ACQUIRE_ENDLESS_SCRIPT: ACQUIRE_LUA.template(NAME, TOKEN, b"0"),
        Opcode.ACQUIRE_OR_RECALL: ACQUIRE_OR_RECALL_LUA.template(NAME, TOKEN, MS),
        Opcode.RELEASE_SCRIPT: RELEASE_LUA.template(NAME, TOKEN),
        Opcode.EXTEND_SCRIPT: EXTEND_LUA.template(NAME, TOKEN, MS),
        Opcode.PTTL: (b"PTTL", NAME),
        Opcode.GET: (b"GET", NAME),
        Opcode.EXISTS: (b"EXISTS", NAME),
    }
    for native, scripted in SCRIPTED.items():
        table[native] = table[scripted]
    if SET_NX_GET in capabilities:
        table[Opcode.ACQUIRE] = (b"SET", NAME, TOKEN, b"NX", b"GET", b"PX", MS)
        table[Opcode.ACQUIRE_ENDLESS] = (b"SET", NAME, TOKEN, b"NX", b"GET")
    table[Opcode.RELEASE] = _release(NAME, TOKEN, capabilities) or table[Opcode.RELEASE]
    if SET_IFEQ in capabilities:
        table[Opcode.EXTEND] = (b"SET", NAME, TOKEN, b"IFEQ", TOKEN, b"PX", MS)
    return tuple(table[opcode] for opcode in range(len(table)))


def _release(name: T, token: T, capabilities: frozenset[str]) -> tuple[bytes | T, ...]:
    """The server's own command that deletes a key with this token; empty where it has none."""
    if DELIFEQ in capabilities:
        return (b"DELIFEQ", name, token)
    if DELEX in capabilities:
        return (b"DELEX", name, b"IFEQ", token)  # never without IFEQ: that deletes anybody's
    return ()


def scripts_to_load(capabilities: frozenset[str]) -> list[Script]:
    """The scripts that a connection with these capabilities will need at once, to be loaded by its handshake."""
    scripts = []
    if SET_NX_GET not in capabilities:
        scripts += [ACQUIRE_LUA, ACQUIRE_MANY_LUA]
    if not capabilities & {DELIFEQ, DELEX}:
        scripts += [RELEASE_LUA, RELEASE_MANY_LUA]
    if SET_IFEQ not in capabilities:
        scripts.append(EXTEND_LUA)
    return scripts


def acquire_fenced(name: bytes, token: bytes, ms: int) -> tuple[bytes, ...]:
    """The call that acquires a name together with a fence."""
    return (
        *(b"EVALSHA", FENCED_LUA.sha, b"2", name, fence_key(name)),
        *(token, b"%d" % ms, b"%d" % FENCE_KEPT_MS),
    )


def rights_needed(call: tuple[bytes, ...]) -> str:
    """The permissions that an ACL user needs for the call of a script, as the server's refusal does not name them;
    empty for other calls."""
    if call[0] != b"EVALSHA":
        return ""
    keys = " ".join(f"~{key.decode(errors='replace')}" for key in call[3 : 3 + int(call[2])])
    return f"{script_of(call).rights} {keys}"


def script_of(call: tuple[bytes, ...]) -> Script:
    """The script that a call of EVALSHA names."""
    return next(script for script in SCRIPTS if script.sha == call[1])


def batch_script(
    opcode: int, ms: int, capabilities: frozenset[str]
) -> Callable[[list[bytes], list[bytes]], RawCommand] | None:
    """What makes the call of the script that does for many names what `opcode` does for one; None: the server needs no
    script for that, and executes a command each as fast."""
    if opcode == Opcode.RELEASE:
        return release_many if release_script(capabilities) else None
    if opcode in (Opcode.ACQUIRE, Opcode.ACQUIRE_ENDLESS) and not capabilities & {SET_NX_GET, CLUSTERED}:
        return lambda names, tokens: acquire_many(names, tokens[0], ms)
    return None


def release_script(capabilities: frozenset[str]) -> bytes | None:
    """The SHA1 of the script that releases many locks; None: the server needs none for that, or is a node of a cluster,
    where all names of a script have to be in one slot."""
    return None if capabilities & {DELIFEQ, DELEX, CLUSTERED} else RELEASE_MANY_LUA.sha


def acquire_many(names: list[bytes], token: bytes, ms: int) -> tuple[bytes, ...]:
    """The call that acquires several locks in one script, each that is free."""
    return (b"EVALSHA", ACQUIRE_MANY_LUA.sha, b"%d" % len(names), *names, token, b"%d" % ms)


def release_many(names: list[bytes], tokens: list[bytes]) -> tuple[bytes, ...]:
    """The call that releases several locks in one script, to which a token that is that of all is sent once."""
    given = tokens[:1] if tokens.count(tokens[0]) == len(tokens) else tokens
    return (b"EVALSHA", RELEASE_MANY_LUA.sha, b"%d" % len(names), *names, *given)


def acquire_all(names: list[bytes], tokens: list[bytes], ms: int, partly: bool) -> tuple[bytes, ...]:
    """The call that acquires several locks, all or none. partly: where one is held, those before it all the same."""
    return (b"EVALSHA", ACQUIRE_ALL_LUA.sha, b"%d" % len(names), *names, *tokens, b"%d" % ms, b"%d" % partly)


def release_all(names: list[bytes], tokens: list[bytes]) -> tuple[bytes, ...]:
    """The call that releases several locks in one script, which grants each to whoever waits for it."""
    queues = map(queue_key, names)
    return (b"EVALSHA", RELEASE_ALL_LUA.sha, b"%d" % (2 * len(names)), *names, *queues, *tokens)


def renew_many(names: list[bytes], tokens: list[bytes], ms: list[int]) -> tuple[bytes, ...]:
    """The call that gives several locks a new lease each, in one script."""
    return (b"EVALSHA", RENEW_MANY_LUA.sha, b"%d" % len(names), *names, *tokens, *(b"%d" % each for each in ms))


def enter(name: bytes, address: bytes, fenced: bool, how: int, entry: bytes | int = TOKEN, ms: bytes | int = MS) -> Any:
    """The call that acquires a contended lock or joins its queue (how: JOIN), by an entry with that address; looks what
    became of an entry (LOOK); or confirms a grant (CONFIRM). Its template, if `entry` and `ms` are not given."""
    keys = (name, queue_key(name), fence_key(name)) if fenced else (name, queue_key(name))
    kept = b"%d" % QUEUE_KEPT_MS, b"%d" % FENCE_KEPT_MS
    return (b"EVALSHA", ENTER_LUA.sha, b"%d" % len(keys), *keys, entry, address, ms, *kept, b"%d" % how)


def is_enter_reply(reply: object) -> bool:
    """Whether this is a reply to a join or a look."""
    if type(reply) is not list or not reply or len(reply) != (4 if reply[0] == 0 else 3):
        return False
    return all(type(each) is int for each in reply)


def address(channel: bytes, moment: float, fenced: bool = False) -> bytes:
    """Where a waiter is told of its grant, for how many seconds that is valid before it is confirmed, and whether it
    wants a fence: what stands before its entry in the server's queue."""
    return b"%b%04d%b" % (channel, round(moment * 1000), b"f" if fenced else b"-")


def split(member: bytes) -> tuple[bytes, bytes]:
    """The address and the entry of a member of the server's queue."""
    return member[:ADDRESS_SIZE], member[ADDRESS_SIZE:]


def leave(name: bytes, member: bytes) -> tuple[bytes, ...]:
    """The call that takes a member out of the server's queue."""
    address, entry = split(member)
    if is_shared(entry):
        return _shared(SHARED_RELEASE_LUA, name, entry, False, address)
    return (b"EVALSHA", LEAVE_LUA.sha, b"2", name, queue_key(name), entry, address)


def hand_over(name: bytes, token: bytes | int = TOKEN) -> Any:
    """The call that releases a contended lock, or a name that several may hold; its template, if the token is not
    given."""
    if isinstance(token, bytes) and is_shared(token):
        return _shared(SHARED_RELEASE_LUA, name, token, False, b"")
    return (b"EVALSHA", HAND_OVER_LUA.sha, b"2", name, queue_key(name), token)


@lru_cache(1024)
def hand_over_template(make: Callable[..., T], name: bytes) -> T:
    """The template of the call that releases a contended lock."""
    return make(*hand_over(name))


def join(
    name: bytes, token: bytes, address: bytes, ms: int, fenced: bool = False, first: bool = False
) -> tuple[bytes, ...]:
    """The call that acquires a name that several may hold; or joins its queue, if an address is given, before all that
    do not ask to be `first`."""
    times = b"%d" % ms, b"%d" % QUEUE_KEPT_MS, b"%d" % FENCE_KEPT_MS
    return _shared(SHARED_JOIN_LUA, name, token, fenced, address, *times, b"%d" % first)


def look(name: bytes, token: bytes, address: bytes, ms: int, fenced: bool = False) -> tuple[bytes, ...]:
    """The call that asks what became of an entry that has joined, and confirms a grant."""
    times = b"%d" % ms, b"%d" % QUEUE_KEPT_MS, b"%d" % FENCE_KEPT_MS
    return _shared(SHARED_LOOK_LUA, name, token, fenced, address, *times)


def downgrade(name: bytes, token: bytes) -> tuple[bytes, ...]:
    """The call that makes a writer a reader."""
    return _shared(DOWNGRADE_LUA, name, token, False)


def resize(name: bytes, size: int | None) -> tuple[bytes, ...]:
    """The call that changes how many permits a semaphore has; None: as many as whoever acquires says."""
    keys = name, queue_key(name), size_key(name)
    return (b"EVALSHA", RESIZE_LUA.sha, b"3", *keys, b"" if size is None else b"%d" % size)


def describe(name: bytes) -> tuple[bytes, ...]:
    """The call that tells all that is known of a name."""
    keys = name, queue_key(name), fence_key(name), size_key(name)
    return (b"EVALSHA", DESCRIBE_LUA.sha, b"4", *keys)


@lru_cache(1024)
def try_template(make: Callable[..., T], name: bytes, mode: bytes, fenced: bool) -> T:
    """The template of the call that acquires a name that several may hold, without joining its queue."""
    call = join(name, b"fl:%b|%b" % (b"0" * 32, mode), b"", 0, fenced)
    return make(*call[:-6], TOKEN, call[-5], MS, *call[-3:])


@lru_cache(1024)
def release_template(make: Callable[..., T], name: bytes, mode: bytes) -> T:
    """The template of the call that releases a name that several may hold."""
    call = hand_over(name, b"fl:%b|%b" % (b"0" * 32, mode))
    return make(*call[:-2], TOKEN, call[-1])


def _shared(script: Script, name: bytes, token: bytes, fenced: bool, *args: bytes) -> tuple[bytes, ...]:
    """The call of a script that works on a name that several may hold."""
    keys = [name, queue_key(name)]
    if mode_of(token) == SEMAPHORE:
        keys.append(size_key(name))
    elif fenced:
        keys.append(fence_key(name))
    return (b"EVALSHA", script.sha, b"%d" % len(keys), *keys, token, *args)


def undo_commands(
    names: list[bytes], tokens: list[bytes], capabilities: frozenset[str], again: bool
) -> list[RawCommand]:
    """The calls that release each name: the hand-over script, which not every user may run, and a plain delete, should
    the script be refused. `again`: the scripts are loaded first, and the delete is sent for the plain and for the
    contended token."""
    needed = [RELEASE_LUA, *[SHARED_RELEASE_LUA] * any(map(is_shared, tokens))] if again else []
    calls: list[RawCommand] = [script.load for script in needed]
    calls += HAND_OVER_LUA.loads if again else []
    for name, token in zip(names, tokens, strict=True):
        calls.append(hand_over(name, token))
        if is_shared(token):  # nothing else can release it
            calls += calls[-1:] * (2 if again else 1)
            continue
        for form in (token, as_contended(token) if made_here(token) else token) if again else (token,):
            calls.append(_release(name, form, capabilities) or (b"EVALSHA", RELEASE_LUA.sha, b"1", name, form))
    return calls


def undo_outcomes(replies: list[Any], count: int, again: bool) -> list[Any]:
    """The outcome for each of the `count` names of an undo: an integer, or the error that left it unknown."""
    each = 3 if again else 2
    first = len(replies) - each * count  # behind those of the scripts that were loaded
    return [_undo_outcome(replies[i : i + each], again) for i in range(first, len(replies), each)]


def _undo_outcome(replies: list[Any], again: bool) -> Any:
    handed, *deleted = replies
    if 1 in replies or not isinstance(handed, Exception):
        return 1
    errors = [reply for reply in deleted if isinstance(reply, Exception)]
    return 1 if again and not errors else (errors or [handed])[0]


def hash_slot(name: bytes) -> int:
    """The hash slot of a key in a cluster: of its hash tag, where it has one."""
    start = name.find(b"{")
    end = name.find(b"}", start)
    if 0 <= start < end - 1:
        name = name[start + 1 : end]
    return binascii.crc_hqx(name, 0) % 16384


@lru_cache(1024)
def fence_key(name: bytes) -> bytes:
    """The key of the fence counter of a name."""
    return beside(b"fastlock:fence:", name)


@lru_cache(1024)
def fenced_key(resource: bytes) -> bytes:
    """The key of the newest fence that wrote a resource (`fencing.py`)."""
    return beside(b"fastlock:fenced:", resource)


@lru_cache(1024)
def size_key(name: bytes) -> bytes:
    """The key of how many permits a semaphore has, where that was changed."""
    return beside(b"fastlock:size:", name)


@lru_cache(1024)
def queue_key(name: bytes) -> bytes:
    """The key of the server's queue for a name."""
    return beside(b"fastlock:queue:", name)


def beside(prefix: bytes, name: bytes) -> bytes:
    """A key in the same hash slot as the name, wherever the rules for hash tags allow it."""
    start = name.find(b"{")
    if start >= 0 and name.find(b"}", start) > start + 1:
        return prefix + b":" + name  # the name's own hash tag decides for both; `a` and `{a}` are two names
    return prefix + b"{" + name + b"}"


def token_matches(held: bytes | None, token: bytes) -> bool:
    """Whether a key's value `held` is this token, plain or contended."""
    return held == token or (held is not None and can_be_contended(token) and held == as_contended(token))


def as_contended(token: bytes) -> bytes:
    """What a token becomes once somebody waits."""
    return token[:2] + b"+" + token[3:]


def as_plain(token: bytes) -> bytes | None:
    """The token that a key's value is, plain or contended; None: it is none of a plain lock of ours."""
    plain = token[:2] + b":" + token[3:]
    return plain if can_be_contended(plain) and token_matches(token, plain) else None


def is_shared(token: bytes) -> bool:
    """Whether this is the token of a lock that several may hold. (A token that a user gives looks like this only if it
    was copied from one.)"""
    return len(token) > TOKEN_SIZE and token[:3] == PLAIN_PREFIX and token[35:37] in _SHARED_MARKS


def mode_of(token: bytes) -> bytes:
    """The mode of a shared token: READER, WRITER or SEMAPHORE."""
    return token[36:37]


def shared_token(token: bytes, mode: bytes, permits: tuple[int, int] | None = None) -> bytes:
    """A token of a lock that several may hold. permits: how many of how many, of a semaphore."""
    return token + b"|" + mode + (b"" if permits is None else b"%d/%d" % permits)


def permits_of(token: bytes) -> tuple[int, int]:
    """How many permits of how many a semaphore's token stands for."""
    count, _, size = token[37:].partition(b"/")
    return int(count), int(size)


def can_be_contended(token: bytes) -> bool:
    """Whether waiters can mark the token as contended, so that its holder learns of them: whether it is one of ours."""
    return made_here(token)


def capabilities(hello: dict[bytes, Any], commands: object) -> frozenset[str]:
    """What a server can do, from its reply to HELLO and to COMMAND INFO DELIFEQ DELEX (which may be an error)."""
    found = {CLUSTERED} if hello.get(b"mode") == b"cluster" else set()
    if hello.get(b"server") != b"redis" or version(hello) >= (7, 0):
        found.add(SET_NX_GET)
    if isinstance(commands, list):
        heads = [entry[0] for entry in commands if isinstance(entry, list) and entry]
        known = [head.lower() for head in heads if isinstance(head, bytes)]
        found |= {name for name in (DELIFEQ, DELEX) if name.encode() in known}
    if found & {DELIFEQ, DELEX}:
        found.add(SET_IFEQ)
    return frozenset(found)


def version(hello: dict[bytes, Any]) -> tuple[int, ...]:
    """A server's version as numbers; (0,) when it sends none that can be read."""
    text = hello.get(b"version")
    try:
        return tuple(int(part) for part in text.split(b".")[:3]) if isinstance(text, bytes) else (0,)
    except ValueError:
        return (0,)
