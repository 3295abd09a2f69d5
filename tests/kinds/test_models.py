"""Reentrant locks, read-write locks and semaphores beside plain models of them, on real servers; and mistakes in
reentrant locks, which the model has to find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.apis import Api
from support.models import Machine, Permits, ReadWrite, Reentrant

from fastlock.embedded import Server

pytestmark = pytest.mark.usefixtures("no_leaks")
CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]


def run(model: type[Machine], server: Server, api: Api, **given: Any) -> None:
    machine = type("Machine", (model,), {"server": server, "api": api})
    run_state_machine_as_test(
        machine,
        settings=settings(
            stateful_step_count=40, deadline=None, suppress_health_check=CHECKS, report_multiple_bugs=False, **given
        ),
    )


@pytest.mark.parametrize("server", ["valkey", "redis"], indirect=True)
@pytest.mark.parametrize("model", [Reentrant, ReadWrite, Permits])
def test_they_do_what_a_plain_model_does(server: Server, api: Api, model: type[Machine]) -> None:
    run(model, server, api, max_examples=7)


Plant = Callable[[pytest.MonkeyPatch, Any, str], None]  # in a class of locks, whose method of this name leaves a `with`


def leave_all(patch: pytest.MonkeyPatch, kind: Any, leave: str) -> None:
    patch.setattr(kind, "_leave_inner", lambda lock, lease: False)


def enter_as_anybody(patch: pytest.MonkeyPatch, kind: Any, leave: str) -> None:
    patch.setattr(kind, "_owner", lambda lock: None)


def share_nothing(patch: pytest.MonkeyPatch, kind: Any, leave: str) -> None:
    patch.setattr(kind, "_share", lambda lock, owners: None)


def enter_what_has_ended(patch: pytest.MonkeyPatch, kind: Any, leave: str) -> None:
    def reenter(lock: Any) -> Any:
        if (lease := lock._leases.get(lock._owner())) is not None:
            lease._depth += 1
        return lease

    patch.setattr(kind, "_reenter", reenter)


def leave_nothing_after_an_error(patch: pytest.MonkeyPatch, kind: Any, leave: str) -> None:
    real = getattr(kind, leave)

    async def nothing() -> None: ...

    def left(lock: Any, error: Any, *about: Any) -> Any:
        lease = lock.lease
        if error is None or lease is None or lease.depth < 2:
            return real(lock, error, *about)
        return nothing() if leave == "__aexit__" else None

    patch.setattr(kind, leave, left)


def count_twice(patch: pytest.MonkeyPatch, kind: Any, leave: str) -> None:
    real = kind._leave_inner

    def left(lock: Any, lease: Any) -> bool:
        return bool(real(lock, lease)) and bool(real(lock, lease) or True)

    patch.setattr(kind, "_leave_inner", left)


MISTAKES: dict[str, Plant] = {
    "an inner release frees the name": leave_all,
    "another owner enters again": enter_as_anybody,
    "another lock of the client does not know the lease": share_nothing,
    "a lease that has ended is entered again": enter_what_has_ended,
    "an error in the body leaves the depth": leave_nothing_after_an_error,
    "a release counts twice": count_twice,
}


@pytest.mark.long
@pytest.mark.parametrize("server", ["valkey"], indirect=True)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_model_finds_a_mistake(
    server: Server, api: Api, mistake: str, no_leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_leaks.allow("*")
    kind = type(api.module.Client().reentrant_lock("a"))
    MISTAKES[mistake](monkeypatch, kind, "__aexit__" if api.is_async else "__exit__")
    with pytest.raises(AssertionError):
        run(Reentrant, server, api, max_examples=60, phases=[Phase.generate], database=None, derandomize=True)
        pytest.fail("the model has not found it")  # no AssertionError
