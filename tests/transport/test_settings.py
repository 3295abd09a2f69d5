"""Server addresses and credentials: URLs, options, redis-py's pools, TLS; and that no secret is ever shown.

Values only: nothing connects here. fastlock reads a URL as redis-py does, wherever both accept it.
"""

from __future__ import annotations

import inspect
import logging
import ssl
import traceback
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.connection import parse_url

import fastlock
import fastlock.asyncio
from fastlock._transport import settings
from fastlock._transport.settings import Settings, settings_from_options, settings_from_pool, settings_from_url

SECRET = "s3cr3t-pa55"

# ----------------------------------------------------------------------------------------------------------------- URLs

URLS: list[tuple[str, dict[str, Any]]] = [
    ("redis://", {"host": "localhost", "port": 6379, "db": 0, "path": None, "tls": None}),
    ("redis://db.example", {"host": "db.example", "port": 6379}),
    ("redis://db.example:1234/7", {"host": "db.example", "port": 1234, "db": 7}),
    ("valkey://db.example:1234/7", {"host": "db.example", "port": 1234, "db": 7, "tls": None}),
    ("redis://[::1]:7/1", {"host": "::1", "port": 7, "db": 1}),
    ("redis://127.0.0.1/0?", {"host": "127.0.0.1"}),
    ("redis://?db=3", {"host": "localhost", "db": 3}),
    ("redis://h/1?db=5", {"db": 5}),
    ("redis://h/%31/", {"db": 1}),
    ("redis://user@h", {"username": "user", "password": None}),
    ("redis://:pa55@h", {"username": None, "password": "pa55"}),
    ("redis://us%40er:p%40%2F%3A%23%3F%25%20%C3%A9@h", {"username": "us@er", "password": "p@/:#?% é"}),
    ("redis://h?username=u&password=p", {"username": "u", "password": "p"}),
    ("unix:///run/x.sock", {"path": "/run/x.sock", "db": 0}),
    ("unix:///run/x.sock?db=3", {"path": "/run/x.sock", "db": 3}),
    ("unix://u:p%40@/run/a%20b.sock?db=1", {"path": "/run/a b.sock", "username": "u", "password": "p@", "db": 1}),
    ("redis://h?socket_timeout=2.5&socket_connect_timeout=1", {"reply_timeout": 2.5, "connect_timeout": 1.0}),
    ("redis://h?reply_timeout=2.5&connect_timeout=1", {"reply_timeout": 2.5, "connect_timeout": 1.0}),
    ("redis://h?max_connections=4", {"max_connections": 4}),
    ("redis://h?client_name=shop", {"client_name": "shop"}),
    ("redis://h?socket_keepalive=no", {"keepalive": False}),
    ("redis://h?socket_keepalive=yes", {"keepalive": True}),
]


@pytest.mark.parametrize(("url", "expected"), URLS, ids=[url for url, _ in URLS])
def test_url_means_the_same_as_in_redis_py(url: str, expected: dict[str, Any]) -> None:
    found = settings_from_url(url)
    assert {name: getattr(found, name) for name in expected} == expected
    theirs = parse_url(url.replace("valkey://", "redis://"))
    for name in ("host", "port", "db", "username", "password", "path"):
        if name in theirs:
            assert getattr(found, name) == theirs[name], name


IGNORED = (
    "decode_responses=yes protocol=2 health_check_interval=5 timeout=2 retry_on_timeout=1 encoding=latin-1 lib_name=x"
)


@pytest.mark.parametrize("option", IGNORED.split())
def test_options_without_meaning_here_are_accepted(option: str) -> None:
    assert settings_from_url(f"redis://h?{option}") == settings_from_url("redis://h")


def test_keywords_override_the_url() -> None:
    found = settings_from_url(
        "redis://u:p@h:1/2?socket_timeout=3", db=9, password="other", reply_timeout=1, max_connections=2
    )
    assert (found.host, found.port, found.db, found.username, found.password) == ("h", 1, 9, "u", "other")
    assert found.max_connections == 2


BAD_URLS: list[tuple[Any, Any, str]] = [
    *((url, ValueError, "url must start with one of redis://") for url in ("", "h:6379", "http://h", "redis:/h")),
    *((url, TypeError, "url must be a str") for url in (None, b"redis://h", 5)),
    *((f"redis://h:{port}", ValueError, "port") for port in ("x", "65536", "-1", "6379x", "6379:1")),
    *((f"redis://h/{db}", ValueError, "db") for db in ("x", "-1", "1/2", "1.5", "0x1", "%D9%A1", "99999999999")),
    ("redis://h?db=x", ValueError, "db"),
    ("redis://h?db=1&db=2", ValueError, "'db' is given twice"),
    ("redis://h?wat=1", TypeError, "'wat'"),
    ("redis://h?max_conections=1", TypeError, "'max_conections'"),
    *((f"redis://h?{name}=1", (ValueError, TypeError), name) for name in ("ssl", "tls", "locate", "keepalive_options")),
    *((f"redis://h?{name}=1", (ValueError, TypeError), name) for name in ("impl", "settings", "credential_provider")),
    *((f"redis://h?{name}=x", (ValueError, TypeError), name) for name in ("socket_timeout", "max_connections", "port")),
    *((f"redis://h?{name}=x", (ValueError, TypeError), name) for name in ("reply_timeout", "connect_timeout")),
    *((f"redis://h?{name}=0", ValueError, "timeout") for name in ("socket_timeout", "socket_connect_timeout")),
    ("redis://h?max_connections=0", ValueError, "max_connections must be between 1"),
    ("redis://h?client_name=a%20b", ValueError, "client_name"),
    ("redis://h?client_name=%0d%0aQUIT", ValueError, "client_name"),
    ("redis://a b", ValueError, "spaces"),
    ("redis://h%0a", ValueError, "host"),
    *((url, ValueError, "path") for url in ("unix://", "unix://?db=1", "unix:///x%00y")),
]  # fmt: skip


@pytest.mark.parametrize(("url", "kind", "message"), BAD_URLS, ids=[repr(url) for url, _, _ in BAD_URLS])
@pytest.mark.parametrize("module", [fastlock, fastlock.asyncio], ids=["threads", "asyncio"])
def test_invalid_url_is_refused_with_a_message(url: Any, kind: Any, message: str, module: Any) -> None:
    with pytest.raises(kind, match=message):
        module.Client.from_url(url)


@pytest.mark.parametrize("url", ["rediss://h?ssl_cert_reqs=wat", "rediss://h?ssl_ca_certs=/no/such/file"])
def test_invalid_tls_option_of_a_url_is_named_in_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match="ssl"):
        settings_from_url(url)


# -------------------------------------------------------------------------------------------------------------- secrets


def texts_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + repr(error.args)


@pytest.mark.parametrize(
    "url",
    [
        f"http://:{SECRET}@h",
        f":{SECRET}@h:6379",
        f"redis://:{SECRET}@h:x",
        f"redis://:{SECRET}@h:99999",
        f"redis://:{SECRET}@h/x",
        f"redis://:{SECRET}@h?db=x",
        f"redis://:{SECRET}@h?socket_timeout=x",
        f"redis://:{SECRET}@h?wat=1",
        f"redis://:{SECRET}@a b",
        f"redis://:{SECRET}@h?max_connections=0",
        f"redis://:{SECRET}@h?db=1&db=2",
        f"redis://:12/{SECRET}@h/0",
        f"redis://:12?{SECRET}@h/0",
        f"redis://:12#{SECRET}@h/0",
        f"redis://user:12/{SECRET}@h",
        f"redis://:ab/{SECRET}@h/0",
        f"redis://:[{SECRET}@h/0",
        f"unix://:{SECRET}@",
        f"redis://h?password={SECRET}&password=x",
        f"redis://h?password={SECRET}&db=x",
    ],
)
def test_no_error_repeats_a_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises((ValueError, TypeError)) as caught:
        settings_from_url(url)
    lines = [line for line in texts_of(caught.value).splitlines() if SECRET in line]
    assert [line for line in lines if "from_url(" not in line and url not in line] == []
    assert SECRET not in str(caught.value)
    assert SECRET not in caplog.text


class Provider(redis.CredentialProvider):
    """A credential provider with fixed credentials."""

    def __init__(self, *found: str) -> None:
        self.found = found

    def get_credentials(self) -> Any:
        return self.found

    def __repr__(self) -> str:
        return f"Provider{self.found}"


@pytest.mark.parametrize("module", [fastlock, fastlock.asyncio], ids=["threads", "asyncio"])
def test_no_repr_shows_a_secret(module: Any) -> None:
    secretive = [
        settings_from_url(f"redis://user:{SECRET}@h"),
        settings_from_url("redis://h", password=SECRET),
        settings_from_options({"credential_provider": Provider("u", SECRET)}),
        settings_from_url(f"rediss://:{SECRET}@h", ssl_password=SECRET),
    ]
    for each in secretive:
        client = module.Client(_settings=each)
        for shown in (each, each.endpoint, client, client.lock("x"), client._transport):
            assert SECRET not in repr(shown) + str(shown) + f"{shown}"


def test_credential_provider_is_called_each_time() -> None:
    assert settings_from_url("redis://u:p@h").credentials() == ("u", "p")
    assert settings_from_url("redis://h").credentials() == (None, None)
    provider = Provider(SECRET)
    found = settings_from_options({"credential_provider": provider})
    assert found.credentials() == (None, SECRET)
    provider.found = ("u", "next")
    assert found.credentials() == ("u", "next")


# -------------------------------------------------------------------------------------------------------------- options

BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception]]] = [
    *(({name: value}, TypeError) for name in ("connect_timeout", "reply_timeout") for value in ("1", True, [])),
    *(({name: value}, ValueError) for name in ("connect_timeout", "reply_timeout") for value in (0, -1, float("nan"))),
    *(({name: float("inf")}, ValueError) for name in ("connect_timeout", "reply_timeout")),
    *(({name: value}, TypeError) for name in ("port", "db", "max_connections") for value in ("1", True, 1.0)),
    *(({name: -1}, ValueError) for name in ("port", "db", "max_connections")),
    *(({"port": 65536}, ValueError), ({"db": 2**31}, ValueError), ({"max_connections": 10_001}, ValueError)),
    *(({"host": value}, ValueError) for value in ("", " ", "a b", "h\r\n", "h\0", "redis://h:6379", "unix:///s")),
    *(({"host": value}, TypeError) for value in (b"h", 5)),
    *(({"path": value}, ValueError) for value in ("", "a\0b")),
    *(({"client_name": value}, ValueError) for value in ("a b", "a\n", "é", "\x7f")),
]


@pytest.mark.parametrize(("options", "kind"), BAD_OPTIONS, ids=[repr(options) for options, _ in BAD_OPTIONS])
def test_invalid_option_is_named(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(options))):
        settings_from_options(options)
    assert settings_from_options({}) == Settings()


def test_option_that_is_none_counts_as_not_given() -> None:
    names = (
        "host",
        "port",
        "db",
        "password",
        "socket_timeout",
        "unix_socket_path",
        "ssl",
        "client_name",
        "max_connections",
    )
    assert settings_from_options(dict.fromkeys(names)) == Settings()


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(AttributeError):
        settings_from_url("redis://h").host = "other"  # type: ignore[misc]


@pytest.mark.parametrize("given", [{}, {"socket_keepalive_options": {}}])
def test_tcp_keepalive_is_on_by_default(given: dict[str, Any]) -> None:
    assert dict(settings_from_options(given).socket_options()) == settings._KEEPALIVE
    other = settings_from_options({"socket_keepalive_options": {4: 10}, "socket_keepalive": True})
    assert other.socket_options() == [(4, 10)]


# ------------------------------------------------------------------------------------------------------------------ TLS


@pytest.mark.parametrize("url", ["rediss://h", "valkeys://h", "rediss://h:1/2?ssl_min_version=771"])
def test_tls_verifies_certificate_and_name_by_default(url: str) -> None:
    context = settings_from_url(url).tls
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("query", "options", "verify", "name"),
    [
        ("ssl_cert_reqs=none", {}, ssl.CERT_NONE, False),
        ("ssl_check_hostname=false", {}, ssl.CERT_REQUIRED, False),
        ("", {"ssl_cert_reqs": ssl.CERT_NONE}, ssl.CERT_NONE, False),
        ("ssl_cert_reqs=none", {"ssl_cert_reqs": "required"}, ssl.CERT_REQUIRED, True),
        ("ssl_cert_reqs=required", {}, ssl.CERT_REQUIRED, True),
    ],
)
def test_tls_options_are_honoured(query: str, options: Any, verify: ssl.VerifyMode, name: bool) -> None:
    context = settings_from_url(f"rediss://h?{query}", **options).tls
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (verify, name)


def test_tls_by_keyword_and_its_versions() -> None:
    context = settings_from_options({"ssl": True, "ssl_min_version": ssl.TLSVersion.TLSv1_3}).tls
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert settings_from_options({"ssl": False, "ssl_cert_reqs": "none"}).tls is None
    assert settings_from_url("redis://h?ssl_cert_reqs=required").tls is None


def lowered(purpose: Any = ssl.Purpose.SERVER_AUTH) -> ssl.SSLContext:
    """A context with a low minimum version, as OpenSSL's configuration sets it on some systems."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_default_certs(purpose)
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    return context


def test_tls_is_at_least_1_2_whatever_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssl, "create_default_context", lowered)
    for options in ({}, {"ssl_min_version": None}):
        context = settings_from_options({"ssl": True, **options}).tls
        assert context is not None and context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_higher_minimum_version_of_the_system_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def raised() -> ssl.SSLContext:
        context = lowered()
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    monkeypatch.setattr(ssl, "create_default_context", raised)
    context = settings_from_options({"ssl": True}).tls
    assert context is not None and context.minimum_version == ssl.TLSVersion.TLSv1_3


@pytest.mark.parametrize("given", ["771", 771, ssl.TLSVersion.TLSv1_2])
def test_given_minimum_version_is_used(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssl, "create_default_context", lowered)
    for one in (
        settings_from_options({"ssl": True, "ssl_min_version": given}),
        settings_from_url(f"rediss://h?ssl_min_version={int(given)}"),
    ):
        assert one.tls is not None and one.tls.minimum_version == ssl.TLSVersion.TLSv1_2
    with pytest.warns(DeprecationWarning):
        lower = settings_from_url("rediss://h?ssl_min_version=769").tls
    assert lower is not None and lower.minimum_version == ssl.TLSVersion.TLSv1


def test_verify_flags_may_be_values_or_names() -> None:
    strict, partial = ssl.VerifyFlags.VERIFY_X509_STRICT, ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    for given in (
        [strict, partial],
        "VERIFY_X509_STRICT, VERIFY_X509_PARTIAL_CHAIN",
        "[VERIFY_X509_STRICT,VERIFY_X509_PARTIAL_CHAIN]",
    ):
        found = settings_from_options({"ssl": True, "ssl_include_verify_flags": given}).tls
        assert found is not None and found.verify_flags & (strict | partial) == strict | partial
        without = settings_from_options({"ssl": True, "ssl_exclude_verify_flags": given}).tls
        assert without is not None and not without.verify_flags & (strict | partial)
    found = settings_from_url("rediss://h?ssl_include_verify_flags=VERIFY_X509_STRICT").tls
    assert found is not None and found.verify_flags & strict


WRONG_TLS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"ssl_cert_reqs": "wat"}, ValueError),
    ({"ssl_min_version": "x"}, ValueError),
    ({"ssl_min_version": 5}, ValueError),
    ({"ssl_ciphers": "wat"}, ValueError),
    ({"ssl_certfile": "/no/such/file"}, ValueError),
    ({"ssl_ca_data": "no certificate"}, ValueError),
    ({"ssl_include_verify_flags": "WAT"}, ValueError),
    ({"ssl_ca_cert": "/misspelt"}, TypeError),
]


@pytest.mark.parametrize(("options", "kind"), WRONG_TLS, ids=lambda value: str(value))
def test_invalid_tls_option_is_named(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(options))):
        settings_from_options({"ssl": True, **options})


def test_url_that_turns_verification_off_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings_from_url("rediss://h?ssl_cert_reqs=required")
    assert not caplog.records
    settings_from_url("rediss://h?ssl_cert_reqs=none")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# ---------------------------------------------------------------------------------------------------------------- pools


def pools(**options: Any) -> list[Any]:
    """redis-py's pools of both kinds, made with the same options."""
    return [
        redis.ConnectionPool(**options),
        redis.BlockingConnectionPool(**options),
        redis.Redis(**options).connection_pool,
        redis.asyncio.ConnectionPool(**options),
        redis.asyncio.Redis(**options).connection_pool,
    ]


def test_plain_pool_gives_address_and_credentials() -> None:
    options = {
        "host": "h",
        "port": 1,
        "db": 2,
        "username": "u",
        "password": "p",
        "client_name": "c",
        "socket_timeout": 3,
    }
    for pool in pools(**options, socket_connect_timeout=4, socket_keepalive=True, decode_responses=True):
        found = settings_from_pool(pool)
        assert (found.host, found.port, found.db, found.username, found.password) == ("h", 1, 2, "u", "p")
        assert (found.client_name, found.reply_timeout, found.connect_timeout) == ("c", 3, 4)
        assert (found.tls, found.path, found.keepalive) == (None, None, True)


def test_default_pool_gives_default_settings() -> None:
    for pool in pools():
        found = settings_from_pool(pool)
        assert (found.host, found.port, found.db, found.password) == ("localhost", 6379, 0, None)
        assert found.max_connections == Settings().max_connections


def test_max_connections_of_a_pool_is_not_adopted() -> None:
    assert settings_from_pool(redis.ConnectionPool(max_connections=1)).max_connections == Settings().max_connections


@pytest.mark.parametrize("module", [redis, redis.asyncio], ids=["threads", "asyncio"])
def test_pools_of_urls(module: Any) -> None:
    found = settings_from_pool(module.ConnectionPool.from_url("unix://u:p@/run/x.sock?db=3"))
    assert (found.path, found.db, found.username, found.password) == ("/run/x.sock", 3, "u", "p")
    found = settings_from_pool(module.Redis(unix_socket_path="/run/y.sock", db=1).connection_pool)
    assert (found.path, found.db) == ("/run/y.sock", 1)
    found = settings_from_pool(module.Redis.from_url("rediss://:p@h:5/1").connection_pool)
    assert found.tls is not None
    assert (found.host, found.port, found.db, found.password) == ("h", 5, 1, "p")
    compares = int(redis.__version__.split(".")[0]) >= 6  # redis-py compares host names by default
    assert (found.tls.verify_mode, found.tls.check_hostname) == (ssl.CERT_REQUIRED, compares)
    for check in (True, False):
        known = settings_from_pool(module.Redis.from_url(f"rediss://h?ssl_check_hostname={check}").connection_pool).tls
        assert known is not None and known.check_hostname is check
    found = settings_from_pool(module.Redis(ssl=True, ssl_cert_reqs="none", ssl_check_hostname=False).connection_pool)
    assert found.tls is not None
    assert found.tls.verify_mode == ssl.CERT_NONE
    assert settings_from_pool(module.Redis(ssl=False, ssl_cert_reqs="none").connection_pool).tls is None


@pytest.mark.parametrize("module", [redis, redis.asyncio], ids=["threads", "asyncio"])
def test_sentinels_of_redis_py_count_as_not_given(module: Any) -> None:
    """Versions of redis-py differ in which options have a sentinel, and in its value."""
    assert settings._SENTINELS, "redis-py has moved its sentinel"
    for sentinel in filter(None, settings._SENTINELS):
        names = ("socket_keepalive_options", "socket_timeout", "ssl_ca_certs", "ssl_min_version", "username")
        pool = module.Redis(ssl=True).connection_pool
        pool.connection_kwargs.update(dict.fromkeys(names, sentinel))
        found = settings_from_pool(pool)
        assert (found.keepalive_options, found.reply_timeout, found.username) == (None, Settings().reply_timeout, None)
        assert found.tls is not None and found.tls.verify_mode == ssl.CERT_REQUIRED


@pytest.mark.parametrize("module", [redis, redis.asyncio], ids=["threads", "asyncio"])
def test_every_option_of_redis_py_is_accepted(module: Any) -> None:
    """A drop-in accepts any client; an option that redis-py adds later must not break it."""
    given = {"socket_timeout": 7, "health_check_interval": 3, "protocol": 3}
    own = {"retry_on_error": [OSError], "encoding": "latin-1", "single_connection_client": False, "client_name": "c"}
    known = inspect.signature(module.Redis.__init__).parameters
    options = {name: value for name, value in {**given, **own}.items() if name in known}
    assert settings_from_pool(module.Redis(**options).connection_pool).reply_timeout == 7
    pool = module.ConnectionPool(host="h")
    pool.connection_kwargs.update(an_option_of_tomorrow=1, ssl_option_of_tomorrow=2)
    assert settings_from_pool(pool).host == "h"


@pytest.mark.parametrize("module", [redis, redis.asyncio], ids=["threads", "asyncio"])
def test_credential_provider_of_a_pool_is_used(module: Any) -> None:
    found = settings_from_pool(module.Redis(credential_provider=Provider("u", SECRET)).connection_pool)
    assert found.credentials() == ("u", SECRET)
    assert SECRET not in repr(found)


def test_pool_of_sentinel_is_refused_with_a_message() -> None:
    from redis.sentinel import Sentinel

    pool = Sentinel([("h", 1)]).master_for("m").connection_pool
    with pytest.raises(TypeError, match="Sentinel"):
        settings_from_pool(pool)
