"""Mistakes that were made once, planted again: the test that was written for each finds it.

Those about who holds and who waits are planted in the model and its replay (test_handover_model.py,
test_handover_replay.py), those about signals in the program that is struck (test_interrupts.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import test_fence
import test_late as late
from support.faces import Face
from support.scripts import in_scripts

from fastlock._protocol import batch, commands
from fastlock._transport import aio, sync
from fastlock.embedded import Server

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


@contextlib.contextmanager
def planted(plant: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    """The test that runs in it fails."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            yield


async def test_fences_that_are_reserved_and_not_used(face: Face, server: Server, probe: redis.Redis) -> None:
    old, new = "redis.call('GET', KEYS[3]) or 0) or 0) + 1", "redis.call('GET', KEYS[3]) or 0) or 0) + 1000000"
    with planted(in_scripts(old, new, commands.ENTER_LUA)):
        await test_fence.test_fences_do_not_run_ahead_of_the_clock(face, server, probe, fair=True)


async def test_a_lease_that_another_thread_released_sent_by_a_batch(
    face: Face, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with planted(lambda patch: patch.setattr(batch, "unended", lambda _, at: at)):
        await late.test_a_lease_that_is_released_meanwhile_is_not_taken_from_the_next_holder(
            face, server, probe, None, monkeypatch, caplog
        )


async def test_an_undo_that_is_dropped(face: Face, server: Server, probe: redis.Redis) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        forgets: Callable[[Any, Any], None] = lambda transport, _: transport.pending_undos.clear()  # noqa: E731
        patch.setattr(sync.SyncTransport, "_flush_undos_over", forgets)
        patch.setattr(aio.AsyncTransport, "_post_pending_undos", forgets)

    with planted(plant):
        await late.test_an_acquire_that_is_executed_long_after_it_was_abandoned_is_undone(face, server, probe, None)
