"""The mutex of local queues, compiled and in Python: one thread at a time holds it, and may acquire it again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """The interpreter switches threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_one_thread_at_a_time(layer: ModuleType, frequent_switches: None) -> None:
    mutex, inside, most, total = layer.Mutex(), list[int](), 0, 0

    def work(number: int) -> None:
        nonlocal most, total
        for repeat in range(2000):
            with mutex:
                inside.append(number)
                most = max(most, len(inside))
                if repeat % 3 == 0:
                    with mutex:
                        before = total
                else:
                    before = total
                total = before + 1
                inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert most == 1 and total == 8 * 2000


def test_mutex_is_free_after_as_many_releases_as_acquires(layer: ModuleType) -> None:
    mutex, inside = layer.Mutex(), threading.Event()

    def enter() -> None:
        with mutex:
            inside.set()

    another = threading.Thread(target=enter, daemon=True)
    with pytest.raises(ZeroDivisionError), mutex:
        with mutex:
            another.start()
        assert not inside.wait(0.05)
        raise ZeroDivisionError
    assert inside.wait(30)
    another.join(30)
