"""The list of those who wait, against a list of Python."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlock._protocol.local_queue import Waiter, WaiterList

pytestmark = pytest.mark.usefixtures("impl")  # what waits is compiled
MS = 10_000


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_a_line_is_a_list_from_which_anybody_may_go(steps: list[tuple[bool, int]]) -> None:
    line, model = WaiterList(), list[Waiter]()
    waiters = [Waiter("name", b"name", MS, False) for _ in range(8)]
    for comes, number in steps:
        waiter = waiters[number]
        if not comes:
            line.remove(waiter)  # also who is not there
            model = [each for each in model if each is not waiter]
        elif waiter not in model:
            line.add(waiter)
            model.append(waiter)
        assert list(line) == model and len(line) == line.count == len(model)
        assert (line.first, line.last) == ((model[0], model[-1]) if model else (None, None))
        assert [each.linked for each in waiters] == [each in model for each in waiters]
    for waiter in waiters:
        line.remove(waiter)
        assert waiter.previous is waiter.next is None, "who left keeps nobody alive"
