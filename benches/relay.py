"""A network in front of the server: a process that forwards each byte in both directions, half a round trip later.

Beside a server on the same machine the round trips decide what a lock costs; this makes them long enough to be seen.
What waits for its time is in `_relay`, which is compiled. Bytes of one direction never overtake each other, and
pipelined commands are delayed side by side. Run as `python -m fastlock.benches.relay`, by `Relay`.
"""

from __future__ import annotations

import socket
import statistics
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, urlsplit

from .contention.clients import exact_sleeps
from .processes import Lines, Process, end_all, to_parent
from .raw import HOST, RawSocket, address, encrypted

START_SECONDS = 30.0
PING_SECONDS = 0.2
MOST_EXCESS = 0.3e-3  # seconds that waking up may cost: more of them are those of a machine that is busy just now


class Relay:
    """The parent's end: `url` leads to the server through a network, which costs no time until `delay` says so."""

    def __init__(self, url: str, seconds: float = 0.0) -> None:
        self._process = Process(f"{__package__}.relay")
        where = address(url)
        place = {key: where[key] for key in ("path", "host", "port") if key in where}
        login = ":".join(quote(where.get(key) or "", safe="") for key in ("username", "password")).removesuffix(":")
        scheme, query = ("rediss", f"?{urlsplit(url).query}") if encrypted(url) else ("redis", "")
        try:
            port = self._ask({"upstream": place, "seconds": 0.0})["port"]
            self.url = f"{scheme}://{login}{login and '@'}{HOST}:{port}/{where.get('db') or 0}{query}"
            self.delay(seconds)
        except BaseException:
            self.close()
            raise

    def delay(self, seconds: float) -> None:
        """Make a round trip take so many seconds from now on, in the median; 0: as long as it takes. What waking up
        costs, which may be a tenth of a millisecond, is measured, and taken off what bytes are held back for."""
        self.hold_back(seconds)
        if seconds:
            excess = min(_round_trip(self.url) - seconds, MOST_EXCESS)
            self.hold_back(max(0.0, seconds - excess))

    def hold_back(self, seconds: float) -> None:
        """Make a round trip take so many seconds longer than it takes by itself."""
        self._ask({"seconds": seconds})

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self._process.send(order)
        answer = self._process.receive(START_SECONDS)
        if answer is None:
            raise TimeoutError("the relay does not answer")
        return answer

    def close(self) -> None:
        """End the relay, and with it all connections through it."""
        end_all([self._process])


def _round_trip(url: str) -> float:
    """Seconds of a round trip, in the median."""
    ping = RawSocket(url)
    try:
        return statistics.median(ping.ping_pairs(PING_SECONDS)) / 2e9
    finally:
        ping.close()


def why_not(url: str) -> str:
    """Why there can be no relay before this server; '' if there can."""
    if find_spec(f"{__package__}._relay") is None:
        return "the relay is not compiled"
    if encrypted(url) and address(url)["host"] != HOST:
        return f"with TLS, clients would see {HOST} where the certificate says another host"
    return ""


def main() -> None:
    """Serve as the parent's messages say, until the parent closes this end."""
    from ._relay import Wires

    parent = to_parent()
    order = parent.receive() or {}
    exact_sleeps()
    upstream, wires = order["upstream"], Wires(order["seconds"] / 2)
    with socket.create_server((HOST, 0), backlog=1024) as listener:
        for source in (parent, listener):
            wires.watch(source.fileno())
        parent.send({"port": listener.getsockname()[1]})
        while True:
            if wires.serve() == listener.fileno():
                _connect(wires, listener, upstream)
            elif not _obey(wires, parent):
                return


def _connect(wires: Any, listener: socket.socket, upstream: dict[str, Any]) -> None:
    client = listener.accept()[0]
    try:
        server = _upstream_socket(upstream)
    except OSError:
        client.close()
        return
    for end in (client, server):
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wires.connect(client.detach(), server.detach())


def _upstream_socket(upstream: dict[str, Any]) -> socket.socket:
    if "path" not in upstream:
        return socket.create_connection((upstream["host"], upstream["port"]))
    server = socket.socket(socket.AF_UNIX)
    server.connect(upstream["path"])
    return server


def _obey(wires: Any, parent: Lines) -> bool:
    """Do as the parent's next message says. False: there is none, as the parent has closed its end."""
    try:
        order = parent.receive() or {}
    except EOFError:
        return False
    wires.delay = order["seconds"] / 2
    parent.send({})
    return True


if __name__ == "__main__":
    main()
