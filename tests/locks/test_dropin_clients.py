"""Every way of making a redis-py client, passed to the drop-ins of both APIs, against a real server on a TCP port."""

from __future__ import annotations

import inspect
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.retry
from support.apis import Api
from support.redispy import ending, module
from support.tls import Authority, TlsFront

from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("impl")
USER, PASSWORD = "locker", "s3cr#t/ü:@"


class Provider(redis.CredentialProvider):
    """Knows the user and the password, for threads and for asyncio."""

    def get_credentials(self) -> tuple[str, str]:
        return USER, PASSWORD

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()


def retry(of: Any, backoff: Any, retries: int) -> Any:
    kind = redis.asyncio.retry.Retry if of is redis.asyncio else redis.retry.Retry
    return kind(backoff, retries)


def cached(of: Any, **place: Any) -> Any:
    cache = pytest.importorskip("redis.cache")
    if "cache_config" not in inspect.signature(of.Redis.__init__).parameters:
        pytest.skip("this client of redis-py has no cache")
    return of.Redis(**place, protocol=3, cache_config=cache.CacheConfig())


def from_pool(of: Any, pool: Any) -> Any:
    if not hasattr(of.Redis, "from_pool"):
        pytest.skip("this redis-py has no Redis.from_pool")
    return of.Redis.from_pool(pool)


# Made from redis-py's module and the server.
WAYS: dict[str, Callable[[Any, Server], Any]] = {
    "constructor": lambda of, at: of.Redis(host="127.0.0.1", port=at.port),
    "positions": lambda of, at: of.Redis("127.0.0.1", at.port, 0) if of is redis else of.Redis(port=at.port, db=0),
    "default host": lambda of, at: of.Redis(port=at.port),
    "texts of the environment": lambda of, at: of.Redis(port=str(at.port), db="0"),
    "StrictRedis": lambda of, at: of.StrictRedis(host="127.0.0.1", port=at.port),
    "url": lambda of, at: of.Redis.from_url(at.tcp_url),
    "url of the module": lambda of, at: of.from_url(at.tcp_url, decode_responses=True),
    "url with options": lambda of, at: of.Redis.from_url(f"{at.tcp_url}?socket_timeout=3&health_check_interval=2"),
    "pool": lambda of, at: of.Redis(connection_pool=of.ConnectionPool(host="127.0.0.1", port=at.port)),
    "pool of a url": lambda of, at: of.Redis(connection_pool=of.ConnectionPool.from_url(at.tcp_url)),
    "own pool": lambda of, at: from_pool(of, of.ConnectionPool(host="127.0.0.1", port=at.port)),
    "blocking pool": lambda of, at: of.Redis(
        connection_pool=of.BlockingConnectionPool(host="127.0.0.1", port=at.port, max_connections=2, timeout=3)
    ),
    "small pool": lambda of, at: of.Redis(port=at.port, max_connections=1),
    "retry": lambda of, at: of.Redis(
        port=at.port, retry=retry(of, redis.backoff.ExponentialBackoff(), 3), retry_on_error=[ConnectionError]
    ),
    "protocol 2": lambda of, at: of.Redis(port=at.port, protocol=2),
    "protocol 3": lambda of, at: of.Redis(port=at.port, protocol=3),
    "health checks": lambda of, at: of.Redis(port=at.port, health_check_interval=1),
    "cache": lambda of, at: cached(of, port=at.port),
    "provider": lambda of, at: of.Redis(port=at.port, credential_provider=Provider()),
    "user": lambda of, at: of.Redis(port=at.port, username=USER, password=PASSWORD),
    "str": lambda of, at: of.Redis(port=at.port, decode_responses=True),
    "latin": lambda of, at: of.Redis(port=at.port, encoding="latin-1", encoding_errors="replace"),
    "timeouts": lambda of, at: of.Redis(port=at.port, socket_timeout=2, socket_connect_timeout=2.5),
    "no timeouts": lambda of, at: of.Redis(port=at.port, socket_timeout=None, socket_connect_timeout=None),
    "keepalive": lambda of, at: of.Redis(port=at.port, socket_keepalive=True),
    "no keepalive": lambda of, at: of.Redis(port=at.port, socket_keepalive=False),
    "keepalive options": lambda of, at: of.Redis(
        port=at.port, socket_keepalive=True, socket_keepalive_options={socket.TCP_KEEPCNT: 4}
    ),
    "no keepalive options": lambda of, at: of.Redis(port=at.port, socket_keepalive_options=None),
    "one connection": lambda of, at: of.Redis(port=at.port, single_connection_client=True),
    "named": lambda of, at: of.Redis(port=at.port, client_name="checkout", db=3),
    "unix": lambda of, at: of.Redis(unix_socket_path=at.path),
    "url of a unix socket": lambda of, at: of.Redis.from_url(at.unix_url),
}


def databases(probe: redis.Redis) -> list[str]:
    """The databases that hold a key."""
    return list(probe.info("keyspace"))


async def works(api: Api, client: Any, probe: redis.Redis) -> None:
    """Acquire and release with both ways of making a drop-in, in the database of the client."""
    here = [f"db{client.connection_pool.connection_kwargs.get('db', 0)}"]
    kind = api.module.Lock
    for lock in (kind(client, "a", timeout=5), client.lock("a", timeout=5, lock_class=kind)):
        assert await api.get(lock.acquire()) is True
        assert await api.get(lock.owned()) is True
        assert databases(probe) == here
        assert await api.get(lock.release()) is None
        await api.enter(lock)
        await api.leave(lock)
        assert databases(probe) == []


@pytest.fixture
def locker(probe: redis.Redis) -> Iterator[None]:
    probe.execute_command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", "~*", "&*", "+@all")
    yield
    probe.execute_command("ACL", "DELUSER", USER)


@pytest.mark.parametrize("way", WAYS)
async def test_any_redis_py_client_is_accepted(
    api: Api, server: Server, probe: redis.Redis, locker: None, way: str, no_leaks: Any
) -> None:
    async with ending(api, WAYS[way](module(api), server)) as client:
        await works(api, client, probe)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "localhost", "127.0.0.1")


SECURE: dict[str, Callable[[Any, int, str], Any]] = {
    "constructor": lambda of, port, ca: of.Redis(host="localhost", port=port, ssl=True, ssl_ca_certs=ca),
    "checked name": lambda of, port, ca: of.Redis(port=port, ssl=True, ssl_ca_certs=ca, ssl_check_hostname=True),
    "certificate as text": lambda of, port, ca: of.Redis(port=port, ssl=True, ssl_ca_data=Path(ca).read_text()),
    "unverified": lambda of, port, ca: of.Redis(port=port, ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False),
    "versions": lambda of, port, ca: of.Redis(
        port=port, ssl=True, ssl_ca_certs=ca, ssl_min_version=ssl.TLSVersion.TLSv1_3
    ),
    "url": lambda of, port, ca: of.Redis.from_url(f"rediss://localhost:{port}/0?ssl_ca_certs={ca}"),
    "url with a switch": lambda of, port, ca: of.Redis.from_url(
        f"rediss://localhost:{port}/0?ssl_cert_reqs=none&ssl_check_hostname=false"
    ),
}


@pytest.mark.parametrize("made_by", ["url", "pool"])
async def test_host_names_are_checked_as_in_this_redis_py(
    api: Api, server: Server, probe: redis.Redis, tmp_path: Path, made_by: str, no_leaks: Any
) -> None:
    """Without an option for it: redis-py compares the names since version 6. It does not try again, as by default it
    would for seconds."""
    elsewhere, of = Authority(tmp_path, "elsewhere.example"), module(api)
    once = {"retry": retry(of, redis.backoff.NoBackoff(), 0)}
    with TlsFront(elsewhere, server.path) as front:
        if made_by == "url":
            made = of.Redis.from_url(f"rediss://localhost:{front.port}/0?ssl_ca_certs={elsewhere.file}", **once)
        else:
            kind = of.connection.SSLConnection
            options = {"host": "localhost", "port": front.port, "ssl_ca_certs": elsewhere.file, **once}
            made = of.Redis(connection_pool=of.ConnectionPool(connection_class=kind, **options))
        async with ending(api, made) as client:
            taken = []
            for call in (client.ping, api.module.Lock(client, "a", timeout=5).acquire):
                try:
                    taken.append(bool(await api.get(call())))
                except redis.exceptions.ConnectionError as error:
                    assert "certificate" in str(error).lower()
                    taken.append(False)
            assert taken == [int(redis.__version__.split(".")[0]) < 6] * 2
            assert front.accepted == 2, "one each: to try again would not help"
    probe.delete("a")


@pytest.mark.parametrize("way", SECURE)
async def test_any_redis_py_client_over_tls_is_accepted(
    api: Api, server: Server, probe: redis.Redis, authority: Authority, way: str, no_leaks: Any
) -> None:
    with TlsFront(authority, server.path) as front:
        try:
            made = SECURE[way](module(api), front.port, authority.file)
        except TypeError as error:
            pytest.skip(f"this redis-py has no such option: {error}")
        async with ending(api, made) as client:
            await works(api, client, probe)
