"""Sockets: how a thread opens one to a server, and the options that threads and asyncio set on theirs. Never here: what
is sent."""

from __future__ import annotations

import socket
from typing import Any

from fastlock import _native as native
from fastlock._stream_errors import broken, by_handler
from fastlock._transport.settings import Settings


def open_socket(settings: Settings) -> Any:
    """A connected socket, which blocks, but not under TLS. Broken: refused, not reachable, or not trusted."""
    sock = None
    try:
        if settings.path is not None:
            sock = _connected(settings, socket.AF_UNIX, settings.path)
        else:
            host, port = settings.host, settings.port
            sock = _connected_to(settings, host, port)
            tune_socket(sock, settings)
            if settings.tls is not None:
                sock = socket.socket(fileno=sock.detach())
                sock.settimeout(settings.connect_timeout)
                sock = settings.tls.wrap_socket(sock, server_hostname=host)
        sock.setblocking(settings.tls is None)  # the stream sets for how long it blocks
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError) and not by_handler(error):
            raise broken(error) from error
        raise
    return sock


def _connected_to(settings: Settings, host: str, port: int) -> Any:
    """As `socket.create_connection`, which gevent and eventlet replace."""
    failure = OSError(f"{host} has no address")
    try:
        # As bytes: to encode a str would turn an error that a signal handler raises meanwhile into another one
        name = host.encode() if host.isascii() else host
        for family, _, _, _, address in native.getaddrinfo(name, port, 0, socket.SOCK_STREAM):
            try:
                return _connected(settings, family, address)
            except OSError as error:
                if by_handler(error):
                    raise
                failure = error
        raise failure
    finally:
        del failure  # else its traceback and this frame would keep each other alive


def _connected(settings: Settings, family: int, address: tuple[object, ...] | str) -> Any:
    sock = native.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(settings.connect_timeout)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def tune_socket(sock: socket.socket, settings: Settings) -> None:
    """Set TCP_NODELAY, so that small packets are not delayed, and keepalive probes, which detect a peer that is gone
    without closing the connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if settings.keepalive:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in settings.socket_options():
            number = getattr(socket, option, None) if isinstance(option, str) else option
            if number is not None:
                sock.setsockopt(socket.IPPROTO_TCP, number, value)


def shut(sock: socket.socket) -> None:
    """Shut a socket down, which wakes the threads that read or write there."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # it was shut down before, or by the server
        if by_handler(error):
            raise
