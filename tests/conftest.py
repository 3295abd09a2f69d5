"""Cells of the tests: server x API x implementation, as fixtures with ids; and the header of the session.

A test names what it needs: `server` (run on valkey, redis, floor), `api` (the API: threads, asyncio), `layer` (core,
fallback), `impl`: the implementation of the process, which is one in a session, chosen by FASTLOCK_IMPL before it
starts. --only-impl leaves out what does not depend on that, --one-server-each repeats few tests on another server,
--long runs what is left to `make test-long`. An `async def` test is run by its API's `Api`; without one, in an event
loop. Helpers live in support/, decisions of fastlock nowhere here. Restrict by --servers=valkey,redis --apis=threads;
--loop=uvloop for asyncio.
"""

from __future__ import annotations

import asyncio
import fnmatch
import gc
import importlib
import importlib.metadata
import inspect
import os
import platform
import re
import signal
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from support.apis import Api
from support.faultproxy import FaultProxy
from support.latch import Latch
from support.run_steps import Clock
from support.servers import KINDS, Servers, leftovers
from support.streams import LONG

import fastlock
from fastlock._locks import paths, plain
from fastlock._protocol import lease, local_queue
from fastlock._transport import aio, waiting
from fastlock.embedded import Server, ServerBinary

LAYERS = {"core": "fastlock._core", "fallback": "fastlock._fallback"}
AXES = {"server": KINDS, "api": ("threads", "asyncio"), "layer": tuple(LAYERS), "impl": (fastlock.IMPLEMENTATION,)}
OPTIONS = {"server": "--servers", "api": "--apis"}
# Tests of the client alone, whatever the server: the oldest server adds nothing to a newer one.
OFF_FLOOR = {
    *("faults/test_late", "faults/test_scale", "faults/test_soak"),
    *("interrupts/test_interrupted_loops", "interrupts/test_interrupts"),
    *("locks/test_client", "locks/test_decorator", "locks/test_differential", "locks/test_dropin", "locks/test_stats"),
    *("locks/test_dropin_refusals", "locks/test_names_and_settings", "locks/test_sharing", "locks/test_waiting_cost"),
    "helpers/test_leader",
    *("transport/test_connections", "transport/test_credentials", "transport/test_fork", "transport/test_loops"),
}
# Tests that are much the same on each server: each of them runs on one of its servers, in turn.
ON_ONE_EACH = {"cli/test_holders", "interrupts/test_interrupted_loops", "kinds/test_describe", "locks/test_recall"}
IN_ALL_CELLS = "kinds"  # the folder whose other tests --one-server-each leaves as they are
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")
SERVERS = pytest.StashKey[Servers]()
MISSING = pytest.StashKey[dict[str, str]]()
CELLS = pytest.StashKey[dict[str, tuple[str, ...]]]()


# ------------------------------------------------------------------------------------------------------- the session


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastlock")
    for axis, option in OPTIONS.items():
        group.addoption(option, default=",".join(AXES[axis]), help=f"only these, of {','.join(AXES[axis])}")
    group.addoption("--only-impl", action="store_true", help="only tests that depend on the implementation")
    group.addoption("--long", action="store_true", help="only tests that `make test` leaves to `make test-long`")
    group.addoption("--one-server-each", action="store_true", help="each test on one of its servers, in turn")
    group.addoption("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="event loop of the asyncio tests")
    group.addoption("--clear-crash", action="store_true", help="forget in which test earlier sessions died")


def _wanted(config: pytest.Config, axis: str) -> list[str]:
    if axis not in OPTIONS:
        return list(AXES[axis])
    values = str(config.getoption(OPTIONS[axis])).split(",")
    if unknown := sorted(set(values) - set(AXES[axis])):
        raise pytest.UsageError(f"{OPTIONS[axis]}: {', '.join(unknown)} is none of {', '.join(AXES[axis])}")
    return values


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it for what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # child processes would inherit that Ctrl-C is ignored
    # for child processes as well
    asked = os.environ.setdefault("FASTLOCK_IMPL", "cython" if IN_CI else fastlock.IMPLEMENTATION)
    if asked != fastlock.IMPLEMENTATION:
        raise pytest.UsageError(f"the implementation is {fastlock.IMPLEMENTATION!r}, {asked!r} was asked for")
    servers = config.stash[SERVERS] = Servers()
    missing = config.stash[MISSING] = {}
    config.stash[CELLS] = {}
    config.addinivalue_line("markers", "long: runs in `make test-long` only")
    config.addinivalue_line("markers", "fastpath(name): about the fast path of `threads` or `tasks`, skipped without")
    for kind in _wanted(config, "server"):
        if isinstance(reason := servers.binaries[kind], str):
            missing[kind] = reason
    for layer, module in LAYERS.items():
        if reason := _cannot_import(module):
            missing[layer] = reason
    _wanted(config, "api")
    if missing and IN_CI:
        raise pytest.UsageError(f"CI is set, so every cell must run, but: {missing}")
    cache = getattr(config, "cache", None)
    if cache is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Latch(cache.mkdir("crash-latch"), config.getoption("--clear-crash")))


def _cannot_import(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported: {error}"
    return ""


def pytest_unconfigure(config: pytest.Config) -> None:
    if servers := config.stash.get(SERVERS, None):
        servers.stop()


def pytest_report_header(config: pytest.Config) -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("redis", "hiredis"))
    lines = [f"fastlock: IMPLEMENTATION={fastlock.IMPLEMENTATION}, {platform.python_implementation()} "
             f"{platform.python_version()}, {versions}, loop {config.getoption('--loop')}"]  # fmt: skip
    for kind in _wanted(config, "server"):
        binary = config.stash[SERVERS].binaries[kind]
        if isinstance(binary, ServerBinary):
            lines.append(f"server {kind}: {binary.kind} {binary.version}, {binary.path}")
    axes = [axis for axis in AXES if axis != "layer" or not config.getoption("--only-impl")]
    only = ", only what depends on the implementation" if config.getoption("--only-impl") else ""
    lines.append("cells: " + " x ".join("/".join(_wanted(config, axis)) for axis in axes) + only)
    lines += [f"!!!!! WILL NOT RUN: {name}: {reason} !!!!!" for name, reason in config.stash[MISSING].items()]
    return lines


# --------------------------------------------------------------------------------------------------------- the tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    marked = {each.strip() for name in names for each in (name.split(",") if isinstance(name, str) else name)}
    for axis, values in AXES.items():
        needed = axis in metafunc.fixturenames
        if needed and axis not in marked:
            if axis == "server" and _name(metafunc.definition.path) in OFF_FLOOR:
                values = tuple(value for value in values if value != "floor")
            metafunc.parametrize(axis, values, ids=values, indirect=True)


def _name(path: Path) -> str:
    """A test file as in OFF_FLOOR: its folder and its name."""
    return f"{path.parent.name}/{path.stem}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {axis: _wanted(config, axis) for axis in AXES}
    chosen: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        cell = {axis: str(parameters[axis]) for axis in AXES if axis in parameters}
        config.stash[CELLS][item.nodeid] = tuple(cell.values())
        out = any(value.partition("+")[0] not in wanted[axis] for axis, value in cell.items())
        for mark in item.iter_markers("fastpath"):
            if getattr(paths, mark.args[0]) is plain:
                item.add_marker(pytest.mark.skip(reason=f"the fast path of {mark.args[0]} is not there"))
        elsewhere = "impl" not in cell and config.getoption("--only-impl")
        elsewhere |= (item.get_closest_marker("long") is not None) is not config.getoption("--long")
        (dropped if out or elsewhere else chosen).append(item)
    chosen = _on_one_server_each(chosen, dropped, config.getoption("--one-server-each"))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = chosen


def _on_one_server_each(items: list[pytest.Item], dropped: list[pytest.Item], all_tests: bool) -> list[pytest.Item]:
    """Of each test, or each in ON_ONE_EACH, and each of its other parameters, the item of one server, which its name
    chooses."""
    cells: dict[str, list[pytest.Item]] = {}
    for item in items:
        server = getattr(getattr(item, "callspec", None), "params", {}).get("server")
        alike = _name(item.path) in ON_ONE_EACH or (all_tests and item.path.parent.name != IN_ALL_CELLS)
        words = [word for word in re.split(r"[-\[\]]", item.nodeid) if not alike or word != server]
        cells.setdefault("-".join(words), []).append(item)
    chosen = {each[zlib.crc32(name.encode()) % len(each)] for name, each in cells.items()}
    dropped += [item for item in items if item not in chosen]
    return [item for item in items if item in chosen]


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # plugins that run last use gc.get_referrers


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run `async def` tests, by their API where they have one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    known = inspect.signature(pyfuncitem.obj).parameters
    body = pyfuncitem.obj(**{name: value for name, value in pyfuncitem.funcargs.items() if name in known})
    api = pyfuncitem.funcargs.get("api")
    if isinstance(api, Api):
        api.run(body)
    else:
        asyncio.run(body)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.stats.get(outcome, []):
            cell = config.stash[CELLS].get(getattr(report, "nodeid", ""), ())
            counts.setdefault(cell, Counter())[outcome] += 1
    terminalreporter.section("cells", sep="-")
    for cell, counted in sorted(counts.items()):
        figures = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counted.items()))
        terminalreporter.write_line(f"{' x '.join(cell) or '(no cell)':<36} {figures}")


# ------------------------------------------------------------------------------------------------------ the fixtures


@pytest.fixture(scope="module", autouse=True)
def small_collections() -> None:
    """Freeze garbage collection of earlier tests: thousands of tests and their reports stay until the end, and tests
    run many collections, which need not scan them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> Servers:
    """All servers of the session; tests mostly want `server` or `start_server`."""
    return pytestconfig.stash[SERVERS]


@pytest.fixture
def server(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """The session's server of one kind, flushed; unix socket and TCP. A test may not stop it, see `start_server`."""
    kind = getattr(request, "param", "valkey")
    _skip_if_missing(request, kind)
    return servers.clean(kind)


@pytest.fixture
def probe(server: Server, servers: Servers) -> redis.Redis:
    """A redis-py client of `server`, bytes in and out, to see what fastlock has done."""
    return servers.probe(server)


@pytest.fixture
def start_server(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Callable[..., Server]]:
    """start_server(kind="valkey", *, tcp=False, password=None, args=()): a server for one test, which may kill it."""
    started: list[Server] = []

    def start(kind: str = "valkey", **keywords: Any) -> Server:
        _skip_if_missing(request, kind)
        started.append(servers.start(kind, **keywords))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def impl(request: pytest.FixtureRequest) -> str:
    """ "cython" or "python": the implementation of this process, on which the test depends."""
    return str(request.param)


@pytest.fixture
def layer(request: pytest.FixtureRequest) -> ModuleType:
    """The core, compiled, or its fallback in Python: both can be used in one process, whichever its locks use."""
    _skip_if_missing(request, request.param)
    return importlib.import_module(LAYERS[request.param])


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets: one for the stream (small buffers; blocking, as in the transports), one for the test."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.settimeout(LONG)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def api(request: pytest.FixtureRequest, impl: str) -> Api:
    """The API, threads or asyncio, see support/apis.py. "asyncio+uvloop" (indirect) selects that event loop."""
    name, _, loop = str(request.param).partition("+")
    return Api(name, uvloop="uvloop" in (loop, request.config.getoption("--loop")) and name == "asyncio")


@pytest.fixture
def proxy(request: pytest.FixtureRequest, server: Server) -> Iterator[FaultProxy]:
    """A fault proxy in front of `server`'s unix socket."""
    if "no_leaks" in request.fixturenames:
        # made before, so that it checks after this proxy has forwarded all that it holds
        request.getfixturevalue("no_leaks")
    with FaultProxy(server.unix_url) as proxy:
        yield proxy


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the protocol and of the leases, set by the test."""
    clock = Clock()
    monkeypatch.setattr(lease, "now", clock)
    return clock


@pytest.fixture
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters do not recheck every second: without a message or a lease that ends they never find out."""
    for module in (local_queue, waiting, aio):
        monkeypatch.setattr(module, "RECHECK_SECONDS", 3600.0)
    monkeypatch.setattr(local_queue, "NEAR", 0)


@pytest.fixture
def no_waiters(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At the end no client of `api` may still know of a waiter, or of a lease that circulates."""
    clients: list[Any] = []
    make = api.client

    def client(url: str, **keywords: Any) -> Any:
        clients.append(make(url, **keywords))
        return clients[-1]

    monkeypatch.setattr(api, "client", client)
    yield
    queues = [each._transport.queues for each in clients]
    assert [(each.by_key, each.by_entry) for each in queues] == [({}, {})] * len(queues)


class NoLeaks:
    """Checks at the end of a test that no key is left, but for those that the test declares."""

    def __init__(self) -> None:
        self.patterns: list[str] = []

    def allow(self, *patterns: str) -> None:
        """Names of keys that may be left, * and ? as in shells."""
        self.patterns += patterns

    def check(self, probe: redis.Redis) -> None:
        """AssertionError if there are undeclared keys."""
        bad = [
            description
            for key, description in leftovers(probe)
            if not any(fnmatch.fnmatchcase(key.decode("utf-8", "backslashreplace"), each) for each in self.patterns)
        ]
        assert not bad, f"keys left behind: {', '.join(bad)}"


@pytest.fixture
def no_leaks(probe: redis.Redis) -> Iterator[NoLeaks]:
    """The test must leave no key in `server`; no_leaks.allow("name", "fence:*") declares exceptions."""
    leaks = NoLeaks()
    yield leaks
    leaks.check(probe)


@pytest.fixture
def server_config(probe: redis.Redis) -> Iterator[Callable[..., None]]:
    """server_config(maxmemory_policy="allkeys-lru"): CONFIG SET for the duration of one test."""
    before: dict[str, Any] = {}

    def change(**settings: str) -> None:
        for name, value in settings.items():
            name = name.replace("_", "-")
            before.setdefault(name, probe.config_get(name)[name])
            probe.config_set(name, value)

    yield change
    for name, value in before.items():
        probe.config_set(name, value)


def _skip_if_missing(request: pytest.FixtureRequest, name: str) -> None:
    if reason := request.config.stash[MISSING].get(name):
        pytest.skip(f"{name}: {reason}")
