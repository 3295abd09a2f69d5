"""A writer that goes on to read, where the server does not answer, or answers that the lock is lost."""

from __future__ import annotations

from support.run_steps import MINE, Clock, lost, run_steps

import fastlock
from fastlock import _errors as errors
from fastlock._locks.shared import is_writer
from fastlock._protocol import commands
from fastlock._protocol.lease import Lease
from fastlock._protocol.undo import ScriptUndo


def test_a_writer_whose_downgrade_was_not_answered_writes_no_more(clock: Clock, impl: str) -> None:
    """It may have been executed, so others may read already; it is sent again, whatever became of it."""
    lock = fastlock.Client().rw_lock("a").write
    token = commands.shared_token(MINE, commands.WRITER)
    lease = Lease("a", b"a", token, clock() + 10)
    lease._reads = 1
    ran = run_steps(clock, lock._release_of(lease), lost(retry_for=0), lost(retry_for=0), ...)
    assert isinstance(ran.raised, errors.ConnectionError)
    assert not is_writer(lease) and (lease.depth, lease.valid) == (1, True)
    assert [undo.call for undo in ran.of(ScriptUndo)] == [commands.downgrade(b"a", token)]


def test_a_writer_whose_downgrade_was_not_sent_writes_on(clock: Clock, impl: str) -> None:
    lock = fastlock.Client().rw_lock("a").write
    lease = Lease("a", b"a", commands.shared_token(MINE, commands.WRITER), clock() + 10)
    lease._reads = 1
    ran = run_steps(clock, lock._release_of(lease), lost(sent=False, retry_for=0), lost(sent=False, retry_for=0), ...)
    assert isinstance(ran.raised, errors.ConnectionError) and not ran.of(ScriptUndo)
    assert is_writer(lease) and lease.depth == 2


def test_a_lock_that_its_downgrade_finds_lost_is_held_no_more(clock: Clock, impl: str) -> None:
    """Its holder may acquire it anew."""
    lock = fastlock.Client().rw_lock("a")
    lease = Lease("a", b"a", commands.shared_token(MINE, commands.WRITER), clock() + 10)
    lease._reads = 1
    lock.write._keep_lease(lock.write._owner(), lease)
    ran = run_steps(clock, lock.write._release_of(lease), [0])
    assert isinstance(ran.raised, fastlock.LockNotOwnedError)
    assert (lock.write.lease, lock.read.lease, lease.depth) == (None, None, 0)
