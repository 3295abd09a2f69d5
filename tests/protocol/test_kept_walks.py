"""Kept leases in any order of events: the protocol and its scripts on a real server, and mistakes in them, which the
walks have to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.functions import in_function
from support.kept_walks import KeptWalk
from support.run_steps import Clock
from support.scripts import in_scripts
from support.walk_server import set_clock
from support.walks import walk_seeds

import fastlock
from fastlock._protocol import commands, local_queue
from fastlock._protocol.belief import Confirmation
from fastlock._protocol.kept import KeptLeases
from fastlock._protocol.local_queue import LocalQueue, LocalQueues
from fastlock.embedded import Server

pytestmark = pytest.mark.parametrize("server", ["valkey"], indirect=True)


@pytest.fixture
def walks(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[range], set[str]]:
    """Carries out the walks of these seeds. Returns what was compared with the model."""
    clock = Clock()
    set_clock(monkeypatch, clock)
    monkeypatch.setattr(local_queue, "JOINS", 1)  # a name that was recalled is soon kept again

    def carry_out(seeds: range) -> set[str]:
        made: list[KeptWalk] = []

        def make(seed: int) -> KeptWalk:
            made.append(KeptWalk(server.path, clock, seed))
            return made[-1]

        walk_seeds(make, seeds)
        return {what for walk in made for what in walk.judge.compared}

    return carry_out


def test_walks_keep_the_promises_and_do_what_the_model_does(walks: Callable[[range], set[str]], impl: str) -> None:
    assert walks(range(12)) == ALL_COMPARED


ALL_COMPARED = {
    *("SET", "JOIN", "LOOK", "REL", "DEL!", "LEAVE", "EXT"),
    *("recall of K", "recall of H", "recall of A", "kept", "let go", "taken", "not waited for", "joined meanwhile"),
}
E = commands.ENTER_LUA
MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "who waits does not tell the keeper": in_scripts("if contended then\n  recall", "if false then\n  recall", E),
    "a recall of a lease that is not known yet is forgotten": in_function(
        LocalQueues.note_keepable, "if lease._raw_token in self.unknown:", "if False:"
    ),
    "nothing is kept": in_function(LocalQueue.release, "now < self.keep_until", "False"),
    "a recall is not noted": in_function(
        LocalQueue.recall, "self.keep_until, self.remote_waiters,", "_, self.remote_waiters,"
    ),
    "what was recalled is not released": in_function(
        KeptLeases.on_recall, "return held if key in self.kept else None", "return None"
    ),
    "what is being released is given out again": in_function(
        KeptLeases.released, "if queue is not None and queue.circulating is lease:", "if False:"
    ),
    "a lease is given out that does not last": in_function(
        LocalQueues.take_kept, "not ms <= (lease._deadline - now) * 1000 <= most", "False"
    ),
    "what has lapsed is not released": in_function(
        KeptLeases.lapsed, "[each for each in queues if each.keep_until <= now]", "[]"
    ),
    "what is kept stays though recalls are not heard any more": in_function(
        KeptLeases.recalls_heard, "return [] if heard else self.stop_keeping()", "return []"
    ),
    "a believed grant counts as confirmed at once": in_function(
        LocalQueue.believe, "end = min(end, now + waiter.ms / 1000)", "end = now + waiter.ms / 1000"
    ),
    "a refuted grant is believed on": in_function(
        Confirmation.answered,
        "self.queue.note_refuted(self, leases.now())",
        "self.queue.note_confirmed(self, 0, sent, self.end_from(sent))",
    ),
}


@pytest.mark.long
@pytest.mark.skipif(fastlock.IMPLEMENTATION == "cython", reason="the mistakes are planted in what would be compiled")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_walks_find_a_mistake(
    walks: Callable[[range], set[str]], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(AssertionError):
        walks(range(150))
        pytest.fail("no walk has found it")  # no AssertionError
