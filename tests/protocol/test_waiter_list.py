"""The linked list of waiters behaves as a Python list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlock._protocol.waiters import Waiter, WaiterList

pytestmark = pytest.mark.usefixtures("impl")  # Waiter is compiled
MS = 10_000


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_waiter_list_behaves_as_a_list(steps: list[tuple[bool, int]]) -> None:
    waiter_list, model = WaiterList(), list[Waiter]()
    waiters = [Waiter("name", b"name", MS, False) for _ in range(8)]
    for joins, number in steps:
        waiter = waiters[number]
        if not joins:
            waiter_list.remove(waiter)  # also a waiter that is not in the list
            model = [each for each in model if each is not waiter]
        elif waiter not in model:
            waiter_list.add(waiter)
            model.append(waiter)
        assert list(waiter_list) == model and len(waiter_list) == waiter_list.count == len(model)
        assert (waiter_list.first, waiter_list.last) == ((model[0], model[-1]) if model else (None, None))
        assert [each.linked for each in waiters] == [each in model for each in waiters]
    for waiter in waiters:
        waiter_list.remove(waiter)
        assert waiter.previous is waiter.next is None, "a waiter that left keeps others alive"
