"""The fault proxy does what it says, to the byte: raw sockets on one side, a real server on the other.

The client here is a socket that sends known bytes; the truth about what was executed is asked of the server directly.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
import redis
from support import resp
from support.faces import Face, drive
from support.fakeserver import CLOSE, SILENCE, FakeServer, Reply
from support.faultproxy import FaultProxy, delay, drop, inject, replace, split, stall, swallow
from support.resp import encode

from fastlock.embedded import Server

SET_A, SET_B, GET_A = encode("SET", "a", "1"), encode("SET", "b", "2"), encode("GET", "a")


class Wire:
    """A raw client: says bytes, hears bytes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            with contextlib.ExitStack() as undo:
                self.socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self.socket.connect(parts.path)
                undo.pop_all()
        else:
            self.socket = socket.create_connection((parts.hostname, parts.port))
        self.socket.settimeout(20)

    def say(self, *data: bytes) -> None:
        self.socket.sendall(b"".join(data))

    def hear(self, count: int) -> bytes:
        """Exactly so many bytes, or fewer if the connection ends first."""
        heard = b""
        while len(heard) < count and (chunk := self.socket.recv(count - len(heard))):
            heard += chunk
        return heard

    def hear_end(self) -> bytes:
        """All that comes until the connection ends."""
        return self.hear(1 << 20)


@pytest.fixture
def wire(proxy: FaultProxy) -> Iterator[Callable[[], Wire]]:
    """wire(): a new raw connection through the proxy."""
    with contextlib.ExitStack() as stack:

        def connect() -> Wire:
            made = Wire(proxy.url)
            stack.callback(made.socket.close)
            return made

        yield connect


Connect = Callable[[], Wire]


# ------------------------------------------------------------------------------------------------------- faithfulness


def test_forwards_and_notes_everything(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    client.say(SET_A, GET_A)
    assert client.hear(12) == b"+OK\r\n$1\r\n1\r\n"
    proxy.wait_for_request(GET_A)
    (link,) = proxy.links
    assert link.requests == proxy.requests == SET_A + GET_A and link.replies == b"+OK\r\n$1\r\n1\r\n"
    assert proxy.commands == [[b"SET", b"a", b"1"], [b"GET", b"a"]] and proxy.accepted == 1 and proxy.open == [link]
    client.socket.close()
    proxy.wait_for(lambda _: link.done)
    assert proxy.open == []


def test_one_write_stays_one_write(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    client.say(encode("PING") * 100)
    assert client.hear(700) == b"+PONG\r\n" * 100
    assert len(proxy.commands) == 100


def test_half_a_command_waits_for_the_other_half(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    for byte in SET_A:
        client.say(bytes([byte]))
    assert client.hear(5) == b"+OK\r\n"


def test_what_is_no_resp_passes_as_it_is(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    client.say(b"*x\r\n")
    assert client.hear_end().startswith(b"-ERR Protocol error")


def test_tcp_and_credentials(start_server: Callable[..., Server]) -> None:
    own = start_server(tcp=True, password="p w")
    with FaultProxy(own.url) as proxy:
        assert proxy.url.startswith("redis://:p%20w@127.0.0.1:") and proxy.url.endswith("/0")
        with redis.Redis.from_url(proxy.url) as client:
            assert client.ping()
        assert proxy.accepted >= 1
    with FaultProxy(own.unix_url.replace("db=0", "db=3"), tcp=True) as proxy:
        assert proxy.url.endswith("/3") and "127.0.0.1" in proxy.url
        with redis.Redis.from_url(proxy.url) as client:
            assert client.ping()


# ------------------------------------------------------------------------------------------------------------- drops


@pytest.mark.parametrize("count", [0, 1, len(SET_A) - 1, len(SET_A), len(SET_A) + 1, len(SET_A + SET_B)])
def test_drop_after_request_bytes(proxy: FaultProxy, wire: Connect, probe: redis.Redis, count: int) -> None:
    client = wire()
    client.say(encode("PING"))
    assert client.hear(7) == b"+PONG\r\n"
    proxy.arm(drop(request_bytes=count), command="SET")
    client.say(SET_A, SET_B)
    client.hear_end()
    (link,) = proxy.links
    proxy.wait_for(lambda _: link.done)
    assert link.requests == encode("PING") + (SET_A + SET_B)[:count]
    assert probe.exists("a") == (count >= len(SET_A)) and probe.exists("b") == (count >= len(SET_A + SET_B))


@pytest.mark.parametrize("count", [0, 1, 4, 5, 7])
def test_drop_after_reply_bytes(proxy: FaultProxy, wire: Connect, probe: redis.Redis, count: int) -> None:
    client = wire()
    proxy.arm(drop(reply_bytes=count), command="SET")
    client.say(encode("PING"), SET_A, GET_A)
    assert client.hear_end() == b"+PONG\r\n" + b"+OK\r\n$1\r\n1\r\n"[:count]
    assert probe.get("a") == b"1"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_drop_after_replies(proxy: FaultProxy, wire: Connect, count: int) -> None:
    client = wire()
    proxy.arm(drop(replies=count), command="SET")
    client.say(encode("PING"), SET_A, SET_B, GET_A)
    assert client.hear_end() == b"+PONG\r\n" + b"+OK\r\n" * count
    proxy.wait_for(lambda each: each.links[0].done)


@pytest.mark.parametrize("count", [0, 7])
def test_drop_by_reset(server: Server, count: int) -> None:
    with FaultProxy(server.url) as proxy:
        client = Wire(proxy.url)
        with client.socket:
            proxy.arm(drop(reply_bytes=count, reset=True))
            client.say(encode("PING"))
            with pytest.raises(ConnectionResetError):
                while client.socket.recv(64):
                    pass
                raise AssertionError("the end was a polite one")


def test_cut_executes_what_was_forwarded(proxy: FaultProxy, wire: Connect, probe: redis.Redis) -> None:
    one, other = wire(), wire()
    held = proxy.arm(stall())
    for client, data in ((one, SET_A), (other, SET_B)):
        client.say(data)
    proxy.wait_for(lambda each: [bool(link.held) for link in each.links] == [True, True])
    assert held.fired == 2
    proxy.cut()
    assert one.hear_end() == other.hear_end() == b""
    assert probe.mget("a", "b") == [b"1", b"2"]


# ------------------------------------------------------------------------------------------ replies lost, held, forged


def test_swallow_hits_the_reply_to_that_command_in_a_pipeline(
    proxy: FaultProxy, wire: Connect, probe: redis.Redis
) -> None:
    client = wire()
    armed = proxy.arm(swallow(close=False), after=b"$1\r\nb\r\n")
    client.say(SET_A, SET_B, GET_A)
    assert client.hear(12) == b"+OK\r\n$1\r\n1\r\n"
    assert armed.fired == 1 and probe.get("b") == b"2"
    client.say(SET_B)
    assert client.hear(5) == b"+OK\r\n", "a fault hits once"


def test_swallow_and_close(proxy: FaultProxy, wire: Connect, probe: redis.Redis) -> None:
    client = wire()
    armed = proxy.arm(swallow(), command="set")
    client.say(SET_A)
    assert client.hear_end() == b""
    armed.wait()
    assert probe.get("a") == b"1"
    again = wire()
    again.say(SET_A)
    assert again.hear(5) == b"+OK\r\n"


def test_swallow_several_times(proxy: FaultProxy, wire: Connect) -> None:
    armed = proxy.arm(swallow(), command="SET", times=2)
    for _ in range(2):
        client = wire()
        client.say(SET_A)
        assert client.hear_end() == b""
    client = wire()
    client.say(SET_A)
    assert client.hear(5) == b"+OK\r\n" and armed.fired == 2


def test_pushes_are_no_replies(proxy: FaultProxy, wire: Connect, probe: redis.Redis) -> None:
    client = wire()
    client.say(encode("HELLO", "3"), encode("SUBSCRIBE", "c", "d"))
    proxy.wait_for(lambda each: each.links[0].reply_frames == 3)
    lost = proxy.arm(swallow(pushes=1, close=False))
    answers = proxy.arm(replace(b"+CHANGED\r\n"), command="PING")
    assert probe.publish("c", "first") == 1 and probe.publish("c", "second") == 1
    client.say(encode("PING"))
    client.hear(len(proxy.links[0].replies))
    heard = b""
    while not heard.endswith(b"+CHANGED\r\n"):
        heard += client.socket.recv(4096)
    assert b"second" in heard and b"first" not in heard
    assert lost.fired == 1 and answers.fired == 1


def test_fault_at_a_push(proxy: FaultProxy, wire: Connect, probe: redis.Redis) -> None:
    client = wire()
    client.say(encode("HELLO", "3"), encode("SUBSCRIBE", "c"))
    proxy.wait_for(lambda each: each.links[0].reply_frames == 2)
    armed = proxy.arm(drop(pushes=0), on_push=b"second")
    probe.publish("c", "first")
    probe.publish("c", "second")
    heard = client.hear_end()
    assert b"first" in heard and b"second" not in heard and armed.fired == 1


def test_stall_and_resume_replies(proxy: FaultProxy, wire: Connect, probe: redis.Redis) -> None:
    client, other = wire(), wire()
    armed = proxy.arm(stall(), command="SET", times=1)
    client.say(encode("PING"), SET_A, GET_A)
    assert client.hear(7) == b"+PONG\r\n"
    proxy.wait_for(lambda each: any(link.held == {"reply"} for link in each.links))
    assert probe.get("a") == b"1", "the server has executed"
    other.say(SET_B)
    assert other.hear(5) == b"+OK\r\n", "the other connection goes on"
    armed.resume()
    assert client.hear(12) == b"+OK\r\n$1\r\n1\r\n"


def test_stalled_requests_arrive_after_their_client_is_gone(
    proxy: FaultProxy, wire: Connect, probe: redis.Redis
) -> None:
    client = wire()
    armed = proxy.arm(stall("request"), command="SET")
    client.say(SET_A)
    proxy.wait_for(lambda each: each.links[0].held == {"request"})
    client.socket.close()
    assert probe.get("a") is None
    armed.resume()
    proxy.wait_for(lambda each: each.links[0].done)
    assert probe.get("a") == b"1"


def test_delay_and_split_change_nothing_but_time(proxy: FaultProxy, wire: Connect) -> None:
    armed = [proxy.arm(delay(0.001)), proxy.arm(split(1)), proxy.arm(split(3, "request"))]
    for _ in range(2):
        client = wire()
        client.say(SET_A, GET_A)
        assert client.hear(12) == b"+OK\r\n$1\r\n1\r\n"
    assert [each.fired for each in armed] == [2, 2, 2]
    assert proxy.requests == (SET_A + GET_A) * 2


def test_split_sends_byte_by_byte(server: Server) -> None:
    """Over a socket that keeps the borders of writes apart by its acknowledgements: each byte is waited for."""
    with FaultProxy(server.unix_url) as proxy:
        proxy.arm(split(1, pause=0.05), command="PING")
        client = Wire(proxy.url)
        with client.socket:
            client.say(encode("PING"))
            first = client.socket.recv(64)
            assert len(first) < 7, "the whole reply came at once"
            assert first + client.hear(7 - len(first)) == b"+PONG\r\n"


def test_inject(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    proxy.arm(inject(b"+STRAY\r\n"), command="SET")
    client.say(encode("PING"), SET_A)
    assert client.hear(20) == b"+PONG\r\n+STRAY\r\n+OK\r\n"
    proxy.inject(b"+NOW\r\n")
    assert client.hear(6) == b"+NOW\r\n"


def test_replace(proxy: FaultProxy, wire: Connect, probe: redis.Redis) -> None:
    client = wire()
    proxy.arm(replace(b"-READONLY no\r\n"), command="SET")
    client.say(SET_A, GET_A)
    assert client.hear(21) == b"-READONLY no\r\n$1\r\n1\r\n"
    assert probe.get("a") == b"1"


def test_two_faults_at_one_command(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    proxy.arm(inject(b"+STRAY\r\n"), command="SET")
    proxy.arm(drop(reply_bytes=10), command="SET")
    client.say(SET_A)
    assert client.hear_end() == b"+STRAY\r\n+O"


# ------------------------------------------------------------------------------------------------- when a fault begins


def test_what_came_before_does_not_count(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    client.say(SET_A)
    assert client.hear(5) == b"+OK\r\n"
    armed = proxy.arm(swallow(), command="SET")
    client.say(GET_A)
    assert client.hear(7) == b"$1\r\n1\r\n" and armed.fired == 0
    client.say(SET_A)
    assert client.hear_end() == b"" and armed.fired == 1


def test_without_a_trigger_the_next_frame_is_hit(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    client.say(SET_A)
    assert client.hear(5) == b"+OK\r\n"
    proxy.arm(drop(replies=1))
    client.say(GET_A, SET_B)
    assert client.hear_end() == b"$1\r\n1\r\n"


def test_new_connections_only_and_their_handshake_spared(proxy: FaultProxy, wire: Connect) -> None:
    old = wire()
    old.say(encode("PING"))
    assert old.hear(7) == b"+PONG\r\n"
    armed = proxy.arm(swallow(), new_only=True, skip=2)
    old.say(SET_A, SET_B, GET_A)
    assert old.hear(17) == b"+OK\r\n+OK\r\n$1\r\n1\r\n" and armed.fired == 0
    new = wire()
    new.say(encode("PING"), encode("PING"), GET_A)
    assert new.hear_end() == b"+PONG\r\n+PONG\r\n"


def test_disarm(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    proxy.arm(swallow(), command="SET").disarm()
    client.say(SET_A)
    assert client.hear(5) == b"+OK\r\n"


def test_subscriptions_are_answered_once_for_each_channel(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    proxy.arm(swallow(), command="PING")
    client.say(encode("HELLO", "3"), encode("SUBSCRIBE", "a", "b"), encode("SUBSCRIBE"), SET_A, encode("PING"))
    heard = client.hear_end()
    assert heard.count(b"subscribe\r\n") == 2 and heard.endswith(b"+OK\r\n")


# -------------------------------------------------------------------------------------------------------- connections


@pytest.mark.parametrize("tcp", [False, True])
def test_refuse_and_admit(server: Server, tcp: bool) -> None:
    with FaultProxy(server.unix_url, tcp=tcp) as proxy:
        with Wire(proxy.url).socket as before:
            before.sendall(encode("PING"))
            assert before.recv(64) == b"+PONG\r\n"
            proxy.refuse()
            with pytest.raises(ConnectionRefusedError):
                Wire(proxy.url)
            before.sendall(encode("PING"))
            assert before.recv(64) == b"+PONG\r\n", "an open connection lives on"
            proxy.admit()
            with Wire(proxy.url).socket as after:
                after.sendall(encode("PING"))
                assert after.recv(64) == b"+PONG\r\n"
        assert proxy.accepted == 2


def test_hang_up_on_new_connections(proxy: FaultProxy, wire: Connect) -> None:
    proxy.hanging_up = True
    assert wire().hear_end() == b""
    proxy.wait_for(lambda each: each.accepted == 1)
    assert proxy.links == []


def test_a_dead_upstream_and_another_one(server: Server, start_server: Callable[..., Server]) -> None:
    own = start_server()
    with FaultProxy(own.url) as proxy:
        with Wire(proxy.url).socket as client:
            client.sendall(encode("PING"))
            assert client.recv(64) == b"+PONG\r\n"
            own.stop()
            assert client.recv(64) == b""
        with Wire(proxy.url).socket as client:
            assert client.recv(64) == b""
        proxy.upstream = server.unix_url
        with Wire(proxy.url).socket as client:
            client.sendall(encode("PING"))
            assert client.recv(64) == b"+PONG\r\n"


def test_waiting_in_vain_says_what_there_is(proxy: FaultProxy, wire: Connect) -> None:
    client = wire()
    client.say(encode("PING"))
    assert client.hear(7) == b"+PONG\r\n"
    with pytest.raises(AssertionError, match=r"link 0 open, 1 commands, 1 replies"):
        proxy.wait_for_request(b"SET", timeout=0.01)
    with pytest.raises(AssertionError, match=r"swallow\(1 reply\) at command, fired 0"):
        proxy.arm(swallow(), command="SET").wait(timeout=0.01)


@pytest.mark.parametrize(
    "call",
    [
        lambda proxy: drop(),
        lambda proxy: drop(replies=1, reply_bytes=1),
        lambda proxy: drop(replies=-1),
        lambda proxy: swallow(replies=1, pushes=1),
        lambda proxy: replace(b"", replies=0),
        lambda proxy: split(0),
        lambda proxy: proxy.arm(swallow(), command="SET", after=b"a"),
        lambda proxy: proxy.arm(drop(request_bytes=1), on_push=b"a"),
    ],
)
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
def test_nonsense_is_refused(proxy: FaultProxy, call: Callable[[FaultProxy], object]) -> None:
    with pytest.raises(ValueError):
        call(proxy)


# --------------------------------------------------------------------------------------------------------- frames


FRAMES = [
    b"+OK\r\n", b"-ERR x\r\n", b":-5\r\n", b"$3\r\nabc\r\n", b"$0\r\n\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n",
    b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(12345678901234567890\r\n", b"=7\r\ntxt:abc\r\n", b"!5\r\nERR x\r\n",
    b"*2\r\n*1\r\n:1\r\n$2\r\n\r\n\r\n",
    b"%1\r\n+a\r\n*2\r\n:1\r\n:2\r\n", b"~2\r\n:1\r\n:2\r\n", b">2\r\n+a\r\n+b\r\n", b"|1\r\n+ttl\r\n:5\r\n$1\r\nx\r\n",
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_whole_and_in_crumbs(size: int) -> None:
    stream, framer = b"".join(FRAMES), resp.Framer(resp.frame_end)
    cut = [frame for at in range(0, len(stream), size) for frame in framer.feed(stream[at : at + size])]
    assert cut == FRAMES and framer.take() == b"" and not framer.opaque


def test_garbage_turns_a_stream_opaque() -> None:
    framer = resp.Framer(resp.frame_end)
    assert framer.feed(b"+OK\r\nwhat\r\n+O") == [b"+OK\r\n", b"what\r\n+O"]
    assert framer.opaque and framer.feed(b"K") == [b"K"]


def test_commands_are_read_back() -> None:
    words = [b"SET", b"a\r\nb", b"", b"7"]
    assert resp.words(encode(*words)) == words and resp.words(b"PING  x\r\n") == [b"PING", b"x"]
    assert resp.command_end(b"PING\r\nPING\r\n") == 6 and resp.command_end(b"PIN") == -1


# ------------------------------------------------------------------------------------------------------ fake server


def test_fake_server_shakes_hands_as_the_real_one(server: Server, probe: redis.Redis) -> None:
    if server.kind == "valkey":
        pytest.skip("its list of modules differs")
    talk = [
        encode(*words.split())
        for words in ("HELLO 3", "CLIENT SETNAME x", "SELECT 0", "SUBSCRIBE a b", "CONFIG GET maxmemory-policy",
                      "SCRIPT LOAD return", "COMMAND INFO nope", "PING")
    ]  # fmt: skip
    heard = []
    with FakeServer(kind="redis", version=server.version) as fake:
        for url in (server.unix_url, fake.url):
            client = Wire(url)
            with client.socket:
                client.say(*talk)
                text = b""
                while b"+PONG\r\n" not in text:
                    text += client.socket.recv(4096)
                heard.append(text.partition(b"+PONG\r\n")[0])
    theirs, ours = [resp.Framer(resp.frame_end).feed(text) for text in heard]
    assert [without_id(frame) for frame in ours] == [without_id(frame) for frame in theirs]


def without_id(frame: bytes) -> bytes:
    head, found, tail = frame.partition(b"$2\r\nid\r\n:")
    return head + found + tail.partition(b"\r\n")[2]


def test_fake_server_follows_its_script() -> None:
    script: list[Reply] = [b"+ONE\r\n", (b"+T", b"WO\r\n"), SILENCE, lambda words: b"+%b\r\n" % words[1], CLOSE]
    with FakeServer(script, handshake={"CLIENT ID": b":77\r\n"}) as fake:
        client = Wire(fake.url)
        with client.socket:
            client.say(encode("CLIENT", "ID"), SET_A, SET_A, SET_A, GET_A)
            assert client.hear(21) == b":77\r\n+ONE\r\n+TWO\r\n+a\r\n"
            fake.send(b">stray")
            assert client.hear(6) == b">stray"
            client.say(GET_A)
            assert client.hear_end() == b""
        with Wire(fake.url).socket as other:
            other.sendall(GET_A)
            fake.wait_for(lambda each: each.unexpected == [[b"GET", b"a"]])
            fake.say(b"+MORE\r\n")
            other.sendall(GET_A)
            assert other.recv(64) == b"+MORE\r\n"
        assert fake.accepted == 2


# ------------------------------------------------------------------------------------------------------------ faces


async def test_a_body_runs_on_both_faces(face: Face) -> None:
    async def three() -> int:
        return int(await face.get(3))

    def four() -> int:
        return 4

    def fails() -> None:
        raise KeyError("five")

    results = await face.together([three, four, fails])
    assert results[:2] == [3, 4] and isinstance(results[2], KeyError)
    assert await face.start(four).get() == 4
    with pytest.raises(KeyError):
        await face.start(fails).get()


def test_a_body_that_suspends_is_no_body_for_threads() -> None:
    import asyncio

    with pytest.raises(AssertionError, match="awaited something of asyncio"):
        drive(asyncio.sleep(0))


def test_a_task_left_behind_fails_the_test() -> None:
    import asyncio

    async def forgetful() -> None:
        forgetful.task = asyncio.get_running_loop().create_task(asyncio.Event().wait())  # type: ignore[attr-defined]

    with pytest.raises(AssertionError, match="tasks left behind"):
        Face("asyncio", "python").run(forgetful())
