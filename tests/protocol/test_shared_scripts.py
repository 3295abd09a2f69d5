"""The scripts on names that several may hold, each called by itself on a real server: what it answers, what it leaves.

Scripts and operations in any order of events: test_shared_walks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from support.child_client import NAME, QUEUE, SOON

from fastlock._protocol import commands
from fastlock._protocol.commands import READER, SEMAPHORE, WRITER, downgrade, hand_over, join, look, renew_many

KEY, CHANNEL = NAME.encode(), b"fastlock:" + b"c" * 32
ADDRESS = commands.address(CHANNEL, 1.0)
LEASE, LONG = 5_000, 60_000  # milliseconds
READS, READS_TOO, WRITES = (
    commands.shared_token(b"fl:" + digit * 32, mode) for digit, mode in ((b"1", READER), (b"2", READER), (b"3", WRITER))
)
PERMITS = [commands.shared_token(b"fl:" + digit * 32, SEMAPHORE, (1, 1)) for digit in (b"4", b"5", b"6")]


def run(probe: redis.Redis, call: tuple[bytes, ...]) -> Any:
    """The server's reply to the call of a script, whether or not it knows that."""
    return probe.execute_command("EVAL", commands.script_of(call).text, *call[2:])


@pytest.fixture
def subscribed(probe: redis.Redis) -> Iterator[None]:
    """Somebody listens to CHANNEL, as its client is there."""
    with probe.pubsub() as listening:
        listening.subscribe(CHANNEL)
        assert listening.get_message(timeout=SOON)
        yield


# ------------------------------------------------------------------------------------------------------------- leases


def test_a_lease_lasts_its_milliseconds_at_least(probe: redis.Redis) -> None:
    """It is counted from a time that was cut to milliseconds. The second reader finds the name held."""
    for number in range(10):
        name = b"%d" % number
        for token in (READS, READS_TOO):
            seconds, micros = probe.time()
            assert run(probe, join(name, token, b"", LEASE))[0] == 1
            assert probe.zscore(name, token) * 1000 >= seconds * 1_000_000 + micros + LEASE * 1000


def test_the_name_has_no_end_while_a_lease_has_none(probe: redis.Redis) -> None:
    run(probe, join(KEY, READS, b"", LEASE))
    run(probe, join(KEY, READS_TOO, b"", 0))
    assert probe.pttl(NAME) == -1
    assert run(probe, hand_over(KEY, READS_TOO)) == 1
    assert 0 < probe.pttl(NAME) <= LEASE + 1


def test_a_lease_that_has_ended_is_not_renewed(probe: redis.Redis) -> None:
    """Another reader keeps the name, and the ended lease with it until the next acquire."""
    for token in (READS, READS_TOO):
        run(probe, join(KEY, token, b"", LONG))
    probe.zadd(NAME, {READS_TOO: 1})
    assert run(probe, renew_many([KEY, KEY], [READS, READS_TOO], [LONG, LONG])) == [1, 0]
    assert probe.zscore(NAME, READS_TOO) == 1


# --------------------------------------------------------------------------- a writer that the server has made a reader


@pytest.fixture
def downgraded(probe: redis.Redis) -> None:
    """WRITES reads, and its holder does not know yet."""
    run(probe, join(KEY, WRITES, b"", LEASE))
    assert run(probe, downgrade(KEY, WRITES)) == 1


def test_a_downgrade_that_is_sent_again_is_confirmed(probe: redis.Redis, downgraded: None) -> None:
    assert run(probe, downgrade(KEY, WRITES)) == 1
    assert run(probe, downgrade(KEY, READS[:-1] + WRITER)) == 0, "it holds nothing"


def test_it_is_renewed_by_the_token_that_it_wrote_by(probe: redis.Redis, downgraded: None) -> None:
    assert run(probe, renew_many([KEY], [WRITES], [LONG])) == [1]
    assert probe.zrange(NAME, 0, -1) == [WRITES[:-1] + READER] and probe.pttl(NAME) > LEASE + 1


def test_it_is_released_by_the_token_that_it_wrote_by(probe: redis.Redis, downgraded: None) -> None:
    assert run(probe, hand_over(KEY, WRITES)) == 1 and not probe.exists(NAME)


# ------------------------------------------------------------------------------------------------------------- fences


def test_fences_rise_whatever_becomes_of_the_counter(probe: redis.Redis) -> None:
    """Lost, as by a restart, or ahead of the clock, as that was set back."""

    def fence() -> int:
        granted, _, number = run(probe, join(KEY, READS, b"", LEASE, fenced=True))
        assert granted == 1 and run(probe, hand_over(KEY, READS)) == 1
        return int(number)

    first, counter = fence(), commands.fence_key(KEY)
    probe.delete(counter)
    assert fence() > first
    probe.set(counter, 2 * first)
    assert [fence(), fence()] == [2 * first + 1, 2 * first + 2]


# -------------------------------------------------------------------------------------------------------------- queues


def test_a_queue_is_kept_while_somebody_asks(probe: redis.Redis) -> None:
    run(probe, join(KEY, WRITES, b"", LONG))
    for ask in (join, look):
        probe.persist(QUEUE)
        assert run(probe, ask(KEY, READS, ADDRESS, LEASE))[0] == 0
        assert 0 < probe.pttl(QUEUE) <= commands.QUEUE_KEPT_MS


def test_of_two_kinds_in_a_queue_those_of_the_first_are_granted(probe: redis.Redis, subscribed: None) -> None:
    """A reader waits as the writer's lease ends, and then somebody takes the name for that of a semaphore."""
    run(probe, join(KEY, WRITES, b"", LEASE))
    assert run(probe, join(KEY, READS, ADDRESS, LEASE))[0] == 0
    probe.delete(NAME)
    assert run(probe, join(KEY, PERMITS[0], ADDRESS, LEASE))[0] == 0
    assert probe.zrange(NAME, 0, -1) == [READS] and probe.zrange(QUEUE, 0, -1) == [ADDRESS + PERMITS[0]]
    assert run(probe, hand_over(KEY, READS)) == 1
    assert run(probe, look(KEY, PERMITS[0], ADDRESS, LEASE))[0] == 1


@pytest.mark.parametrize("fenced", [False, True])
def test_a_reader_grants_no_permits(probe: redis.Redis, subscribed: None, fenced: bool) -> None:
    """Its script does not know how many there are: those who wait for them ask for themselves."""
    held, *waiting = PERMITS
    run(probe, join(KEY, held, b"", LEASE))
    for token in waiting:
        assert run(probe, join(KEY, token, ADDRESS, LEASE))[0] == 0
    probe.delete(NAME)
    assert run(probe, join(KEY, READS, ADDRESS, LEASE, fenced))[0] == 0 and not probe.exists(NAME)
    assert [run(probe, look(KEY, token, ADDRESS, LEASE))[0] for token in waiting] == [1, 0]
