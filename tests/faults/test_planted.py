"""Mistakes that were made once, planted again: the test that was written for each has to fail.

Mistakes about holders and waiters are planted in the model and its replay (test_handover_model.py,
test_handover_replay.py), mistakes about signals in the program that is interrupted (test_interrupts.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from support.apis import Api
from support.scripts import in_scripts

from fastlock._protocol import batch, commands
from fastlock._transport import aio, sync
from fastlock.embedded import Server
from tests.faults import test_late as late
from tests.locks import test_fence

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


@contextlib.contextmanager
def planted(plant: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    """Plant a mistake; the test that runs in this block has to fail."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            yield


async def test_fences_reserved_but_not_used_are_detected(api: Api, server: Server, probe: redis.Redis) -> None:
    scripts = commands.ENTER_LUA, commands.HAND_OVER_LUA, commands.LEAVE_LUA
    with planted(in_scripts("last + 1)", "last + 1000000)", *scripts)):
        await test_fence.test_fences_do_not_run_ahead_of_the_clock(api, server, probe, fair=True)


async def test_batch_that_sends_an_already_released_lease_is_detected(
    api: Api, server: Server, probe: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with planted(lambda patch: patch.setattr(batch, "begin_releases", lambda _, at: at)):
        await late.test_batch_does_not_release_the_lease_of_the_next_local_holder(
            api, server, probe, None, monkeypatch, caplog
        )


async def test_dropped_undo_is_detected(api: Api, server: Server, probe: redis.Redis) -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        forgets: Callable[[Any, Any], None] = lambda transport, _: transport.pending_undos.clear()  # noqa: E731
        patch.setattr(sync.SyncTransport, "flush_undos_over", forgets)
        patch.setattr(aio.AsyncTransport, "_post_pending_undos", forgets)

    with planted(plant):
        await late.test_acquire_executed_long_after_it_was_abandoned_is_undone(api, server, probe, None)
