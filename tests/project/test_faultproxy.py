"""The fault proxy does exactly what was armed, to the byte: raw sockets on one side, a real server on the other.

The client here is a socket that sends known bytes; the server itself tells what was executed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import redis
from support.faultproxy import FaultProxy, delay, drop, inject, replace, split, stall, swallow
from support.faults import Pause
from support.raw_client import RawClient
from support.resp import encode

from fastlock.embedded import Server

SET_A, SET_B, GET_A = encode("SET", "a", "1"), encode("SET", "b", "2"), encode("GET", "a")


@pytest.fixture
def raw(proxy: FaultProxy) -> Iterator[Callable[[], RawClient]]:
    """raw(): a new raw connection through the proxy."""
    with contextlib.ExitStack() as stack:

        def connect() -> RawClient:
            made = RawClient(proxy.url)
            stack.callback(made.socket.close)
            return made

        yield connect


Connect = Callable[[], RawClient]


# ------------------------------------------------------------------------------------------------------- faithfulness


def test_forwards_and_notes_everything(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    client.send(SET_A, GET_A)
    assert client.receive(12) == b"+OK\r\n$1\r\n1\r\n"
    proxy.wait_for_request(GET_A)
    (connection,) = proxy.connections
    assert connection.requests == proxy.requests == SET_A + GET_A and connection.replies == b"+OK\r\n$1\r\n1\r\n"
    assert (
        proxy.commands == [[b"SET", b"a", b"1"], [b"GET", b"a"]] and proxy.accepted == 1 and proxy.open == [connection]
    )
    client.socket.close()
    proxy.wait_for(lambda _: connection.done)
    assert proxy.open == []


def test_one_write_stays_one_write(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    client.send(encode("PING") * 100)
    assert client.receive(700) == b"+PONG\r\n" * 100
    assert len(proxy.commands) == 100


def test_half_a_command_waits_for_the_other_half(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    for byte in SET_A:
        client.send(bytes([byte]))
    assert client.receive(5) == b"+OK\r\n"


def test_bytes_that_are_no_resp_pass_unchanged(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    client.send(b"*x\r\n")
    assert client.receive_end().startswith(b"-ERR Protocol error")


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
def test_drop_after_request_bytes(proxy: FaultProxy, raw: Connect, probe: redis.Redis, count: int) -> None:
    client = raw()
    client.send(encode("PING"))
    assert client.receive(7) == b"+PONG\r\n"
    proxy.arm(drop(request_bytes=count), command="SET")
    client.send(SET_A, SET_B)
    client.receive_end()
    (connection,) = proxy.connections
    proxy.wait_for(lambda _: connection.done)
    assert connection.requests == encode("PING") + (SET_A + SET_B)[:count]
    assert probe.exists("a") == (count >= len(SET_A)) and probe.exists("b") == (count >= len(SET_A + SET_B))


@pytest.mark.parametrize("count", [0, 1, 4, 5, 7])
def test_drop_after_reply_bytes(proxy: FaultProxy, raw: Connect, probe: redis.Redis, count: int) -> None:
    client = raw()
    proxy.arm(drop(reply_bytes=count), command="SET")
    client.send(encode("PING"), SET_A, GET_A)
    assert client.receive_end() == b"+PONG\r\n" + b"+OK\r\n$1\r\n1\r\n"[:count]
    assert probe.get("a") == b"1"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_drop_after_replies(proxy: FaultProxy, raw: Connect, count: int) -> None:
    client = raw()
    proxy.arm(drop(replies=count), command="SET")
    client.send(encode("PING"), SET_A, SET_B, GET_A)
    assert client.receive_end() == b"+PONG\r\n" + b"+OK\r\n" * count
    proxy.wait_for(lambda each: each.connections[0].done)


@pytest.mark.parametrize("count", [0, 7])
def test_drop_by_reset(server: Server, count: int) -> None:
    with FaultProxy(server.url) as proxy:
        client = RawClient(proxy.url)
        with client.socket:
            proxy.arm(drop(reply_bytes=count, reset=True))
            client.send(encode("PING"))
            with pytest.raises(ConnectionResetError):
                while client.socket.recv(64):
                    pass
                raise AssertionError("the connection ended without a reset")


def test_cut_executes_what_was_forwarded(proxy: FaultProxy, raw: Connect, probe: redis.Redis) -> None:
    one, other = raw(), raw()
    held = proxy.arm(stall())
    for client, data in ((one, SET_A), (other, SET_B)):
        client.send(data)
    proxy.wait_for(lambda each: [bool(connection.held) for connection in each.connections] == [True, True])
    assert held.fired == 2
    proxy.cut()
    assert one.receive_end() == other.receive_end() == b""
    assert probe.mget("a", "b") == [b"1", b"2"]


# ------------------------------------------------------------------------------------------ replies lost, held, forged


def test_swallow_hits_the_reply_to_that_command_in_a_pipeline(
    proxy: FaultProxy, raw: Connect, probe: redis.Redis
) -> None:
    client = raw()
    armed = proxy.arm(swallow(close=False), after=b"$1\r\nb\r\n")
    client.send(SET_A, SET_B, GET_A)
    assert client.receive(12) == b"+OK\r\n$1\r\n1\r\n"
    assert armed.fired == 1 and probe.get("b") == b"2"
    client.send(SET_B)
    assert client.receive(5) == b"+OK\r\n", "a fault hits once"


def test_swallow_and_close(proxy: FaultProxy, raw: Connect, probe: redis.Redis) -> None:
    client = raw()
    armed = proxy.arm(swallow(), command="set")
    client.send(SET_A)
    assert client.receive_end() == b""
    armed.wait()
    assert probe.get("a") == b"1"
    again = raw()
    again.send(SET_A)
    assert again.receive(5) == b"+OK\r\n"


def test_swallow_several_times(proxy: FaultProxy, raw: Connect) -> None:
    armed = proxy.arm(swallow(), command="SET", times=2)
    for _ in range(2):
        client = raw()
        client.send(SET_A)
        assert client.receive_end() == b""
    client = raw()
    client.send(SET_A)
    assert client.receive(5) == b"+OK\r\n" and armed.fired == 2


def test_pushes_are_no_replies(proxy: FaultProxy, raw: Connect, probe: redis.Redis) -> None:
    client = raw()
    client.send(encode("HELLO", "3"), encode("SUBSCRIBE", "c", "d"))
    proxy.wait_for(lambda each: each.connections[0].reply_frames == 3)
    lost = proxy.arm(swallow(pushes=1, close=False))
    answers = proxy.arm(replace(b"+CHANGED\r\n"), command="PING")
    assert probe.publish("c", "first") == 1 and probe.publish("c", "second") == 1
    client.send(encode("PING"))
    received = b""
    while not received.endswith(b"+CHANGED\r\n"):
        received += client.socket.recv(4096)
    assert b"second" in received and b"first" not in received
    assert lost.fired == 1 and answers.fired == 1


def test_fault_at_a_push(proxy: FaultProxy, raw: Connect, probe: redis.Redis) -> None:
    client = raw()
    client.send(encode("HELLO", "3"), encode("SUBSCRIBE", "c"))
    proxy.wait_for(lambda each: each.connections[0].reply_frames == 2)
    armed = proxy.arm(drop(pushes=0), on_push=b"second")
    probe.publish("c", "first")
    probe.publish("c", "second")
    received = client.receive_end()
    assert b"first" in received and b"second" not in received and armed.fired == 1


def test_stall_and_resume_replies(proxy: FaultProxy, raw: Connect, probe: redis.Redis) -> None:
    client, other = raw(), raw()
    armed = proxy.arm(stall(), command="SET", times=1)
    client.send(encode("PING"), SET_A, GET_A)
    assert client.receive(7) == b"+PONG\r\n"
    proxy.wait_for(lambda each: any(connection.held == {"reply"} for connection in each.connections))
    assert probe.get("a") == b"1", "the server has executed"
    other.send(SET_B)
    assert other.receive(5) == b"+OK\r\n", "the other connection goes on"
    armed.resume()
    assert client.receive(12) == b"+OK\r\n$1\r\n1\r\n"


def test_stalled_requests_arrive_after_their_client_is_gone(
    proxy: FaultProxy, raw: Connect, probe: redis.Redis
) -> None:
    client = raw()
    armed = proxy.arm(stall("request"), command="SET")
    client.send(SET_A)
    proxy.wait_for(lambda each: each.connections[0].held == {"request"})
    client.socket.close()
    assert probe.get("a") is None
    armed.resume()
    proxy.wait_for(lambda each: each.connections[0].done)
    assert probe.get("a") == b"1"


def test_delay_and_split_change_nothing_but_time(proxy: FaultProxy, raw: Connect) -> None:
    armed = [proxy.arm(delay(0.001)), proxy.arm(split(1)), proxy.arm(split(3, "request"))]
    for _ in range(2):
        client = raw()
        client.send(SET_A, GET_A)
        assert client.receive(12) == b"+OK\r\n$1\r\n1\r\n"
    assert [each.fired for each in armed] == [2, 2, 2]
    assert proxy.requests == (SET_A + GET_A) * 2


def test_split_cuts_frames_with_pauses() -> None:
    effect = split(3, pause=0.5).effect()
    next(effect)
    assert effect.send((b"+PONG\r\n", False)) == [b"+PO", Pause(0.5), b"NG\r", Pause(0.5), b"\n", Pause(0.5)]


def test_inject(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    proxy.arm(inject(b"+STRAY\r\n"), command="SET")
    client.send(encode("PING"), SET_A)
    assert client.receive(20) == b"+PONG\r\n+STRAY\r\n+OK\r\n"
    proxy.inject(b"+NOW\r\n")
    assert client.receive(6) == b"+NOW\r\n"


def test_replace(proxy: FaultProxy, raw: Connect, probe: redis.Redis) -> None:
    client = raw()
    proxy.arm(replace(b"-READONLY no\r\n"), command="SET")
    client.send(SET_A, GET_A)
    assert client.receive(21) == b"-READONLY no\r\n$1\r\n1\r\n"
    assert probe.get("a") == b"1"


def test_two_faults_at_one_command(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    proxy.arm(inject(b"+STRAY\r\n"), command="SET")
    proxy.arm(drop(reply_bytes=10), command="SET")
    client.send(SET_A)
    assert client.receive_end() == b"+STRAY\r\n+O"


# ------------------------------------------------------------------------------------------------- when a fault begins


def test_earlier_commands_do_not_trigger_a_fault(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    client.send(SET_A)
    assert client.receive(5) == b"+OK\r\n"
    armed = proxy.arm(swallow(), command="SET")
    client.send(GET_A)
    assert client.receive(7) == b"$1\r\n1\r\n" and armed.fired == 0
    client.send(SET_A)
    assert client.receive_end() == b"" and armed.fired == 1


def test_without_a_trigger_the_next_frame_is_hit(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    client.send(SET_A)
    assert client.receive(5) == b"+OK\r\n"
    proxy.arm(drop(replies=1))
    client.send(GET_A, SET_B)
    assert client.receive_end() == b"$1\r\n1\r\n"


def test_only_new_connections_after_their_handshake(proxy: FaultProxy, raw: Connect) -> None:
    old = raw()
    old.send(encode("PING"))
    assert old.receive(7) == b"+PONG\r\n"
    armed = proxy.arm(swallow(), new_only=True, skip=2)
    old.send(SET_A, SET_B, GET_A)
    assert old.receive(17) == b"+OK\r\n+OK\r\n$1\r\n1\r\n" and armed.fired == 0
    new = raw()
    new.send(encode("PING"), encode("PING"), GET_A)
    assert new.receive_end() == b"+PONG\r\n+PONG\r\n"


def test_skipped_commands_are_no_triggers(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    proxy.arm(swallow(), command="PING", skip=2)
    client.send(encode("PING") * 3)
    assert client.receive_end() == b"+PONG\r\n" * 2


def test_disarm(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    proxy.arm(swallow(), command="SET").disarm()
    client.send(SET_A)
    assert client.receive(5) == b"+OK\r\n"


def test_subscriptions_are_answered_once_for_each_channel(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    proxy.arm(swallow(), command="PING")
    client.send(encode("HELLO", "3"), encode("SUBSCRIBE", "a", "b"), encode("SUBSCRIBE"), SET_A, encode("PING"))
    received = client.receive_end()
    assert received.count(b"subscribe\r\n") == 2 and received.endswith(b"+OK\r\n")


# -------------------------------------------------------------------------------------------------------- connections


@pytest.mark.parametrize("tcp", [False, True])
def test_refuse_and_admit(server: Server, tcp: bool) -> None:
    with FaultProxy(server.unix_url, tcp=tcp) as proxy:
        with RawClient(proxy.url).socket as before:
            before.sendall(encode("PING"))
            assert before.recv(64) == b"+PONG\r\n"
            proxy.refuse()
            with pytest.raises(ConnectionRefusedError):
                RawClient(proxy.url)
            before.sendall(encode("PING"))
            assert before.recv(64) == b"+PONG\r\n", "an open connection lives on"
            proxy.admit()
            with RawClient(proxy.url).socket as after:
                after.sendall(encode("PING"))
                assert after.recv(64) == b"+PONG\r\n"
        assert proxy.accepted == 2


def test_hang_up_on_new_connections(proxy: FaultProxy, raw: Connect) -> None:
    proxy.hanging_up = True
    assert raw().receive_end() == b""
    proxy.wait_for(lambda each: each.accepted == 1)
    assert proxy.connections == []


def test_a_dead_upstream_and_another_one(server: Server, start_server: Callable[..., Server]) -> None:
    own = start_server()
    with FaultProxy(own.url) as proxy:
        with RawClient(proxy.url).socket as client:
            client.sendall(encode("PING"))
            assert client.recv(64) == b"+PONG\r\n"
            own.stop()
            assert client.recv(64) == b""
        with RawClient(proxy.url).socket as client:
            assert client.recv(64) == b""
        proxy.upstream = server.unix_url
        with RawClient(proxy.url).socket as client:
            client.sendall(encode("PING"))
            assert client.recv(64) == b"+PONG\r\n"


def test_a_wait_that_times_out_shows_the_state(proxy: FaultProxy, raw: Connect) -> None:
    client = raw()
    client.send(encode("PING"))
    assert client.receive(7) == b"+PONG\r\n"
    with pytest.raises(AssertionError, match=r"connection 0 open, 1 commands, 1 replies"):
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
def test_invalid_faults_are_refused(proxy: FaultProxy, call: Callable[[FaultProxy], object]) -> None:
    with pytest.raises(ValueError):
        call(proxy)
