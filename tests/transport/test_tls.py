"""TLS: a real handshake, valid and invalid certificates, records that cut replies, shared connections."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support import nested
from support.apis import Api
from support.tls import Authority, TlsFront

import fastlock
from fastlock.embedded import Server


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "localhost", "127.0.0.1")


@pytest.fixture(params=[65536, 7], ids=["whole", "in pieces"])
def front(request: pytest.FixtureRequest, authority: Authority, server: Server) -> Iterator[TlsFront]:
    with TlsFront(authority, server.path, records=request.param) as front:
        yield front


async def test_locks_work_over_tls(api: Api, front: TlsFront, authority: Authority, no_leaks: object) -> None:
    client = api.client(f"rediss://localhost:{front.port}/0", ssl_ca_certs=authority.file)
    for _ in range(20):
        lock = client.lock("a", timeout=10)
        lease = await api.enter(lock)
        assert lease.valid and await api.get(lock.owned())
        await api.get(lock.extend(10))
        assert not await api.get(client.lock("a").acquire(blocking=False))
        await api.leave(lock)
    names = [f"name:{number}" for number in range(300)]
    leases = await api.get(client.acquire_many(names))
    assert all(leases)
    assert await api.get(client.release_many(leases)) == [True] * 300


@pytest.mark.parametrize("api", ["threads"], indirect=True)
async def test_a_loss_that_came_with_the_end_of_the_connection_is_told(
    api: Api, front: TlsFront, authority: Authority, probe: redis.Redis
) -> None:
    """A release that is sent again, as its connection was closed, would count what it finds as its own doing."""
    client = api.client(f"rediss://localhost:{front.port}/0", ssl_ca_certs=authority.file)
    lock = client.lock("a", timeout=10)
    await api.enter(lock)
    probe.set("a", "somebody else")
    probe.client_kill_filter(_type="normal", skipme=True)
    (connection,) = client._transport.connections
    while connection.stream.usable():
        await api.checkpoint()
    with pytest.raises(fastlock.LockNotOwnedError):
        await api.leave(lock)
    assert client.get_stats()["losses"] == 1
    probe.delete("a")


async def test_threads_and_tasks_share_connections_over_tls(
    api: Api, front: TlsFront, authority: Authority, no_leaks: object
) -> None:
    limit = {} if api.is_async else {"max_connections": 2}
    client = api.client(f"rediss://127.0.0.1:{front.port}/0", ssl_ca_certs=authority.file, **limit)

    def worker(number: int) -> object:
        async def work() -> int:
            for repeat in range(20):
                lock = client.lock(f"lock:{number}:{repeat % 3}", timeout=10)
                lease = await api.enter(lock)
                assert lease.valid, lease
                await api.leave(lock)
            return number

        return work

    assert await api.together([worker(number) for number in range(8)]) == list(range(8))


whole_records = pytest.mark.parametrize("front", [65536], indirect=True, ids=["whole"])
one_server = pytest.mark.parametrize("server", ["valkey"], indirect=True)  # where its kind makes no difference


@whole_records
@one_server
@pytest.mark.parametrize("fair", [True, False])
async def test_threads_and_tasks_wait_over_tls(
    api: Api, front: TlsFront, authority: Authority, server: Server, fair: bool, no_leaks: object
) -> None:
    """Where the thread that reads waits for a message of a grant, and the others join beside it."""
    clients = [
        api.client(f"rediss://localhost:{front.port}/0", ssl_ca_certs=authority.file),
        api.client(server.unix_url),
    ]
    holders = 0

    def worker(number: int) -> object:
        async def work() -> int:
            nonlocal holders
            lock = clients[number % 2].lock("a", timeout=10, fair=fair)
            for _ in range(10):
                await api.enter(lock)
                holders += 1
                await api.checkpoint()
                assert holders == 1
                holders -= 1
                await api.leave(lock)
            return number

        return work

    assert await api.together([worker(number) for number in range(8)]) == list(range(8))


@whole_records
@one_server
async def test_a_kept_name_is_recalled_over_tls(
    api: Api, front: TlsFront, authority: Authority, server: Server, no_leaks: object
) -> None:
    keeper = api.client(f"rediss://localhost:{front.port}/0", ssl_ca_certs=authority.file)
    other = api.client(server.unix_url)
    lock = keeper.lock("a", timeout=10, keep=10)
    while not keeper.get_stats()["kept_acquires"]:
        await api.enter(lock)
        await api.leave(lock)
    wanted = other.lock("a", timeout=10)
    await api.enter(wanted)
    await api.leave(wanted)
    assert keeper.get_stats()["recalls"] == 1


@whole_records
@one_server
def test_signal_handlers_use_locks_over_tls(front: TlsFront, authority: Authority, server: Server, impl: str) -> None:
    """Also while their own thread sends or receives."""
    report = nested.report(f"rediss://localhost:{front.port}/0?ssl_ca_certs={authority.file}", 8, 2)
    assert (report["implementation"], report["stalls"], report["wrong"], report["left"]) == (impl, 0, [], [])
    assert report["strikes"] > 50 and not report["refused"], report


async def test_certificate_of_an_unknown_authority_is_refused(api: Api, authority: Authority, server: Server) -> None:
    with TlsFront(authority, server.path) as front:
        client = api.client(f"rediss://localhost:{front.port}/0")
        with pytest.raises(redis.exceptions.ConnectionError, match=r"(?i)certificate"):
            await api.get(client.lock("a").acquire())


async def test_certificate_of_another_host_is_refused(api: Api, tmp_path: Path, server: Server) -> None:
    elsewhere = Authority(tmp_path, "elsewhere.example")
    with TlsFront(elsewhere, server.path) as front:
        client = api.client(f"rediss://localhost:{front.port}/0", ssl_ca_certs=elsewhere.file)
        with pytest.raises(redis.exceptions.ConnectionError, match=r"(?i)certificate|hostname"):
            await api.get(client.lock("a").acquire())
        trusting = api.client(
            f"rediss://localhost:{front.port}/0", ssl_ca_certs=elsewhere.file, ssl_check_hostname=False
        )
        assert await api.get(trusting.lock("a").acquire())


async def test_tls_to_a_server_without_tls_raises_a_connection_error(api: Api, server: Server) -> None:
    port = server.tcp_url.rpartition(":")[2].partition("/")[0]
    client = api.client(f"rediss://127.0.0.1:{port}/0", ssl_cert_reqs="none", connect_timeout=0.5)
    with pytest.raises((redis.exceptions.ConnectionError, redis.exceptions.TimeoutError), match=r"127.0.0.1:\d+: \w"):
        await api.get(client.lock("a").acquire())


async def test_minimum_tls_version_is_honoured(api: Api, tmp_path: Path, server: Server) -> None:
    """771 in a URL means TLS 1.2; 772 means 1.3, which this server does not support."""
    authority = Authority(tmp_path, "localhost")
    authority.context.maximum_version = ssl.TLSVersion.TLSv1_2
    with TlsFront(authority, server.path) as front:
        url = f"rediss://localhost:{front.port}/0?ssl_min_version="
        client = api.client(f"{url}771", ssl_ca_certs=authority.file)
        lock = client.lock("a")
        assert await api.get(lock.acquire())
        await api.get(lock.release())
        with pytest.raises(redis.exceptions.ConnectionError, match=r"(?i)version|alert|eof|reset|closed"):
            await api.get(api.client(f"{url}772", ssl_ca_certs=authority.file).lock("a").acquire())
