"""Where a server is and how to log in. URLs, passwords, TLS options and pools are redis-py's; here they become
`Settings`.

Beside `_errors.py` the only module that imports redis-py. Never here: sockets, commands.
"""

from __future__ import annotations

import inspect
import logging
import math
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis.asyncio.connection
import redis.connection
import redis.utils

SCHEMES = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}

# redis-py's options that mean something else, or nothing, to a client that speaks RESP3 and reconnects by itself.
_IGNORED = frozenset(
    (
        *("decode_responses", "encoding", "encoding_errors", "health_check_interval", "legacy_responses", "lib_name"),
        *("lib_version", "protocol", "retry", "retry_on_error", "retry_on_timeout", "single_connection_client"),
        *("socket_read_size", "timeout", "ssl_validate_ocsp", "ssl_validate_ocsp_stapled", "ssl_ocsp_context"),
        "ssl_ocsp_expected_cert",
    )
)
_OF_CLIENTS = frozenset(("confirm_release", "queue"))
_OF_LOCKS = frozenset(("auto_renew", "blocking", "blocking_timeout", "fair", "fence", "keep", "sleep"))
_NOT_IN_URL = frozenset(
    (
        "credential_provider",
        "keepalive",
        "keepalive_options",
        "retry",
        "socket_keepalive_options",
        "ssl",
        "tls",
    )
)
_RENAMED = {
    "socket_timeout": "reply_timeout",
    "socket_connect_timeout": "connect_timeout",
    "unix_socket_path": "path",
    "socket_keepalive": "keepalive",
    "socket_keepalive_options": "keepalive_options",
}
# Seconds of silence, between probes, and probes: as redis-py has had them since 8.0.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# What redis-py puts into a pool for an option that was not given. The module that has it depends on redis-py's version.
_SENTINELS = [getattr(module, "SENTINEL", None) for module in (redis.utils, redis.connection, redis.asyncio.connection)]
_TLS_FLOOR = ssl.TLSVersion.TLSv1_2
_CERT_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything needed to open a connection. Checked; secrets are kept out of its repr."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    credential_provider: Any = field(default=None, repr=False)
    client_name: str | None = None
    connect_timeout: float = 5.0
    reply_timeout: float = 5.0
    max_connections: int = 16
    retry_first_connect: bool = False  # else a server that was never reached is taken for a wrong address
    keepalive: bool = True
    keepalive_options: dict[Any, int] | None = None
    socket_type: int = 0
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_text("host", self.host)
        if "://" in self.host:  # not shown: it may hold a password
            raise ValueError("host must be a name or an address, not a URL: that goes to `Client.from_url`")
        for name in ("connect_timeout", "reply_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
        for name, low, high in (("port", 0, 65535), ("db", 0, 2**31 - 1), ("max_connections", 1, 10_000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if not low <= value <= high:
                raise ValueError(f"{name} must be between {low} and {high}, not {value}")
        for name in ("username", "password"):
            value = getattr(self, name)
            if isinstance(value, bytes):
                object.__setattr__(self, name, value.decode())
            elif value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a str or bytes, not {type(value).__name__}")
        for name in ("path", "client_name"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} must be a str, not {type(getattr(self, name)).__name__}")
        if self.path is not None and (not self.path or "\0" in self.path):
            raise ValueError("path must name a unix socket")
        if self.client_name is not None and not (
            self.client_name.isascii() and self.client_name.isprintable() and " " not in self.client_name
        ):
            raise ValueError("client_name must be printable ASCII without spaces")

    @property
    def endpoint(self) -> str:
        """For messages: where the server is, without secrets."""
        return self.path if self.path is not None else f"{self.host}:{self.port}"

    def credentials(self) -> tuple[str | None, str | None]:
        """(user, password), from the credential provider where there is one. Raises what the provider raises."""
        if self.credential_provider is None:
            return self.username, self.password
        return _pair(self.credential_provider.get_credentials())

    async def credentials_async(self) -> tuple[str | None, str | None]:
        """(user, password), for asyncio: from the provider's `get_credentials_async`, where it has one, as those of
        redis-py 5.1 and newer do."""
        ask = getattr(self.credential_provider, "get_credentials_async", None)
        return self.credentials() if ask is None else _pair(await ask())

    def socket_options(self) -> list[tuple[Any, int]]:
        """TCP options as (constant or its name, value), beyond SO_KEEPALIVE itself."""
        options: dict[Any, int] = self.keepalive_options or _KEEPALIVE
        return list(options.items())


_OPTIONS = Settings.__dataclass_fields__.keys() - {"retry_first_connect"}


def _pair(found: Sequence[str | bytes | None]) -> tuple[str | None, str | None]:
    """(user, password) from what a credential provider returns: both, or the password alone."""
    texts = [each.decode() if isinstance(each, bytes) else each for each in found]
    user, password = texts if len(texts) == 2 else (None, *texts)
    return user, password


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    if not value or any(char.isspace() or not char.isprintable() for char in value):
        raise ValueError(f"{name} must not be empty nor hold spaces or control characters")


def client_options(options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a client, without the mistake of who means the timeout of its locks: that is no option
    of a pool of redis-py's here, and a TypeError."""
    if "timeout" in options:
        raise TypeError(
            "timeout is a setting of each lock, client.lock(name, timeout=...); how long a client waits for an answer "
            "is its reply_timeout"
        )
    return options


def settings_from_url(url: str, **overrides: object) -> Settings:
    """Settings from redis:// rediss:// unix:// valkey:// valkeys:// with redis-py's query options.

    Keyword arguments win over the URL. ValueError names what is wrong, and never repeats the password.
    """
    if not isinstance(url, str):
        raise TypeError(f"url must be a str, not {type(url).__name__}")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(f"url must start with one of {', '.join(f'{name}://' for name in SCHEMES)}")
    plain = f"{SCHEMES[scheme]}://{rest}"
    _check_url(plain)
    _check_query(plain)
    # typed since redis-py 8
    options: dict[str, Any] = redis.connection.parse_url(plain)  # type: ignore[no-untyped-call,unused-ignore]
    for name in ("reply_timeout", "connect_timeout"):  # which redis-py does not know, and leaves as text
        if name in options:
            options[name] = _seconds(name, options[name])
    kind = options.pop("connection_class", None)
    if plain.startswith("rediss:"):
        options["ssl"] = True
    if plain.startswith("unix:") and (kind is None or not options.get("path")):
        raise ValueError("url: a unix:// URL needs the path of a socket, as in unix:///run/redis.sock?db=0")
    return settings_from_options(options | overrides)


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"url: {name} must be a number of seconds, not {text!r}") from None


def _check_url(url: str) -> None:
    """Refuse what redis-py accepts: it uses db 0 for a db that it cannot parse, and the first of two equal options."""
    if any(char.isspace() or not char.isprintable() for char in url):
        raise ValueError(
            "url: must not hold spaces or control characters (in a password they are written as %20 and so on)"
        )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(
            "url: cannot be read (in a password, write characters like @ : / ? # as %40 and so on)"
        ) from None
    if parts.fragment or url.endswith("#"):
        raise ValueError("url: no part may start with # (in a password it is written %23)")
    try:
        parts.port  # noqa: B018
    except ValueError:
        raise ValueError("url: the port must be a number between 0 and 65535") from None
    if parts.scheme != "unix" and parts.path.strip("/"):
        db = unquote(parts.path).strip("/")
        if not (db.isascii() and db.isdigit()):
            raise ValueError("url: the db must be a number (in a password, / is written %2F and # is written %23)")
    try:
        options = parse_qs(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else {}
    except ValueError:
        raise ValueError("url: an option has no value (in a password, ? is written %3F)") from None
    for name, values in options.items():
        if len(values) > 1:
            raise ValueError(f"url: option {name!r} is given twice")


def _check_query(url: str) -> None:
    for name, values in parse_qs(urlsplit(url).query, keep_blank_values=True).items():
        if name in _NOT_IN_URL:
            raise ValueError(f"url: {name!r} is no option of a URL")
        if name == "ssl_cert_reqs" and values == ["none"]:
            logging.getLogger("fastlock").warning("a URL turns the verification of its server's certificate off")


def _place_of(name: str) -> str:
    """Where an option belongs that is none of a connection."""
    if name in _OF_CLIENTS:
        return f": it is a setting of the client, as in Client.from_url(url, {name}=False)"
    return f": it is a setting of each lock, client.lock(name, {name}=...)" if name in _OF_LOCKS else ""


def settings_from_options(options: dict[str, Any]) -> Settings:
    """Settings from redis-py's connection options (as keywords, from a URL, or from a pool)."""
    known: dict[str, Any] = {}
    tls: dict[str, Any] = {}
    for name, value in options.items():
        if any(value is sentinel for sentinel in _SENTINELS if sentinel is not None):
            continue
        if name in _TLS_OPTIONS:
            tls[name] = value
        elif name in _RENAMED:
            if value is not None:
                known[_RENAMED[name]] = value
        elif name in _OPTIONS or name == "ssl":
            if value is not None:
                known[name] = value
        elif name not in _IGNORED:
            raise TypeError(f"unknown connection option {name!r}{_place_of(name)}")
    if known.pop("ssl", False):
        try:
            known["tls"] = _tls_context(**tls)
        except (OSError, ValueError) as error:  # a file that is missing or no certificate, an unknown word
            raise ValueError(f"TLS options ({', '.join(sorted(tls))}): {error}") from None
    return Settings(**known)


Flags = str | Iterable[str | ssl.VerifyFlags] | None


def _tls_context(
    *,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | bytes | None = None,
    ssl_password: str | None = None,
    ssl_cert_reqs: str | int | None = "required",
    ssl_check_hostname: object = True,
    ssl_ca_certs: str | None = None,
    ssl_ca_path: str | None = None,
    ssl_ca_data: str | bytes | None = None,
    ssl_min_version: str | int | None = None,
    ssl_ciphers: str | None = None,
    ssl_include_verify_flags: Flags = None,
    ssl_exclude_verify_flags: Flags = None,
) -> ssl.SSLContext:
    """redis-py's TLS options as a context. Certificate and host name are verified and TLS is 1.2 at least, unless the
    options say otherwise.

    Made here, as versions of redis-py differ in the options that they know and read from a URL.
    """
    context = ssl.create_default_context()
    context.check_hostname = False  # first: while it is set, verify_mode cannot be CERT_NONE
    context.verify_mode = _verify_mode(ssl_cert_reqs)
    context.check_hostname = bool(ssl_check_hostname) and context.verify_mode != ssl.CERT_NONE
    context.verify_flags |= _verify_flags(ssl_include_verify_flags)
    context.verify_flags &= ~_verify_flags(ssl_exclude_verify_flags)
    if ssl_keyfile and not ssl_certfile:
        raise ValueError("ssl_keyfile is the key of a certificate, and ssl_certfile is not given")
    if ssl_certfile:
        context.load_cert_chain(ssl_certfile, ssl_keyfile, ssl_password)
    if ssl_ca_certs or ssl_ca_path or ssl_ca_data:
        context.load_verify_locations(ssl_ca_certs, ssl_ca_path, ssl_ca_data)
    if ssl_min_version is not None:
        context.minimum_version = ssl.TLSVersion(int(ssl_min_version))
    elif context.minimum_version < _TLS_FLOOR:  # as OpenSSL's configuration may have it
        context.minimum_version = _TLS_FLOOR
    if ssl_ciphers is not None:
        context.set_ciphers(ssl_ciphers)
    return context


_TLS_OPTIONS = frozenset(_tls_context.__kwdefaults__ or ())


def _verify_mode(value: str | int | None) -> ssl.VerifyMode:
    """The verify mode of redis-py's ssl_cert_reqs: a word, one of ssl's own values, or None for no verification."""
    if value is None:
        return ssl.CERT_NONE
    if isinstance(value, str) and value not in _CERT_REQS:
        raise ValueError(f"ssl_cert_reqs must be one of {', '.join(_CERT_REQS)}, not {value!r}")
    return _CERT_REQS[value] if isinstance(value, str) else ssl.VerifyMode(value)


def _verify_flags(value: Flags) -> ssl.VerifyFlags:
    """Verify flags, given as ssl's own or as their names: a URL holds names, as in
    ?ssl_include_verify_flags=VERIFY_X509_STRICT,..."""
    flags: Iterable[str | ssl.VerifyFlags] = value.strip("[]").split(",") if isinstance(value, str) else value or ()
    found = ssl.VerifyFlags(0)
    for each in flags:
        if isinstance(each, str) and each.strip() not in ssl.VerifyFlags.__members__:
            raise ValueError(f"there is no verify flag {each!r}")
        found |= ssl.VerifyFlags[each.strip()] if isinstance(each, str) else each
    return found


def settings_from_pool(pool: Any) -> Settings:
    """Settings of a redis-py connection pool, sync or asyncio. Options of the pool that fastlock does not know are
    ignored."""
    if hasattr(pool, "sentinel_manager"):
        raise TypeError("fastlock does not support redis-py's Sentinel pools yet: give the master's own address")
    bases = getattr(pool.connection_class, "__mro__", ())
    _check_transport(pool.connection_class, bases)
    known = _RENAMED.keys() | _OPTIONS - {"max_connections"}
    secure = any("SSL" in base.__name__ for base in bases)
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name in known or (secure and name in _TLS_OPTIONS)
    }
    if secure and "ssl_check_hostname" not in options:
        options["ssl_check_hostname"] = _checks_names(bases)
    for name in ("port", "db"):  # redis-py accepts them as strings, as they are in environment variables
        if isinstance(options.get(name), str):
            options[name] = int(options[name])
    return replace(settings_from_options(options | {"ssl": secure}), retry_first_connect=True)


def _checks_names(bases: tuple[type, ...]) -> bool:
    """Whether connections of this class check the server's name against its certificate by default: those of redis-py
    do so since version 6."""
    for base in bases:
        known = inspect.signature(vars(base).get("__init__", lambda: None)).parameters.get("ssl_check_hostname")
        if known is not None:
            return bool(known.default)
    return True


def _check_transport(kind: object, bases: tuple[type, ...]) -> None:
    """Raise TypeError for a pool whose connections lead somewhere else than to the address that it names.

    fastlock opens connections of its own. That is no loss where a connection class adds to redis-py's (it counts, logs,
    closes differently). One that opens its sockets itself goes through a tunnel, or stays in the process: then the
    locks would be on another server than the data, and nobody would notice.
    """
    if any(base.__module__.partition(".")[0] == "fakeredis" for base in bases):
        raise TypeError(
            "redis is a client of fakeredis, which keeps its keys in this process; locks need a server: give a client "
            "of a real one, as `fastlock.embedded.Server()` starts for a test"
        )
    opener = next((base for base in bases if "_connect" in vars(base)), None)
    if opener is None or opener.__module__.partition(".")[0] not in ("redis", "valkey"):
        raise TypeError(
            f"{getattr(kind, '__name__', kind)} opens its connections in a way of its own (`_connect`), which fastlock "
            "would bypass: give a client whose connection_class does not, or use a fastlock Client with the address"
        )
