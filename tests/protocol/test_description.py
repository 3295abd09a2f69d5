"""Who holds a name, without a server: what connections tell of their process, how own leases and names are found."""

from __future__ import annotations

import math
import os
import platform
from typing import Any

import pytest

import fastlock
from fastlock._locks import own
from fastlock._protocol import commands, identity, inventory
from fastlock._protocol.lease import process_id


def test_what_a_connection_tells() -> None:
    told = identity.told()
    assert len(told) < 130 and all(33 <= each <= 126 for each in told)
    processes = identity.read_clients(b"id=1 name=" + told + b" db=0\nid=2 name=fastlock(x:1@h) lib-name=\n")
    assert processes.by_id == {process_id().decode(): (platform.node(), os.getpid())} and processes.complete
    assert not identity.read_clients(b"id=1 name=" + told + b" db=0\n").complete


@pytest.mark.parametrize("host", ["a b\n=)", "ü" * 300, ""])
def test_a_host_with_an_odd_name(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: host)
    told = identity.told()
    assert all(33 <= each <= 126 for each in told)
    (process,) = identity.read_clients(b"id=1 name=" + told + b" db=0\n").by_id.values()
    assert process.pid == os.getpid() and len(process.host) == min(len(host), 64)


def test_objects_that_run_code_are_left_alone() -> None:
    class Odd:
        @property
        def __class__(self) -> Any:
            raise AssertionError("it was asked for its class")

    odd = Odd()
    client = fastlock.Client("/nowhere")
    lock = client.lock("a")
    lock._leases[None] = fastlock.Lease("a", b"a", b"fl:" + b"0" * 32, math.inf)
    found = own.own_leases([b"a"])
    assert found[b"a", b"0" * 32] == (own.Own(None, 0.0, 1)) and odd is not None


@pytest.mark.parametrize("name", [b"a", b"{a}", b"a{b}c", b"{}", b"}{", b"\xff{x"])
def test_a_queue_tells_its_name(name: bytes) -> None:
    assert inventory._of_queue(commands.queue_key(name)) == name


@pytest.mark.parametrize(
    "key", [b"fastlock:queue:", b"fastlock:queue:a", b"fastlock:queue:{{a}}", b"fastlock:queue::a"]
)
def test_a_key_that_is_no_queue(key: bytes) -> None:
    assert inventory._of_queue(key) is None
