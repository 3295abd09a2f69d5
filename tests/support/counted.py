"""A user's function that counts its calls, as `once` and `refill` get it, and what it may wait for. No decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastlock._protocol import renewal
from support.apis import Api
from support.child_client import until


class Counted:
    """A function that returns the number of its call, after it has done what `before` does. `errors` are raised first,
    from the last one on."""

    def __init__(self, api: Api, before: Callable[[], Any] = lambda: None) -> None:
        self.api, self.before = api, before
        self.calls = self.inside = 0
        self.most = 0  # how many of its calls ran at once
        self.errors: list[Exception] = []

    async def _call(self) -> int:
        self.calls += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        number = self.calls
        try:
            await self.api.get(self.before())
            await self.api.checkpoint()
            if self.errors:
                raise self.errors.pop()
            return number
        finally:
            self.inside -= 1

    @property
    def native(self) -> Callable[..., Any]:
        """The function, as a user of this API would write it."""
        return self.api.native(self._call)


def after_waits(api: Api, clients: list[Any], count: int) -> Callable[[], Any]:
    """Something for a function to wait for: that so many callers of these clients have to wait."""
    found = lambda: sum(each.get_stats()["waits"] for each in clients) >= count  # noqa: E731
    return api.native(lambda: until(api, found, "callers that wait"))


def after_renewals(api: Api, client: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Something for a function to wait for: that the lease under which it runs was renewed, often."""
    monkeypatch.setattr(renewal, "DUE_PART", 0.01)
    return api.native(lambda: until(api, lambda: client.get_stats()["renewals"] >= 2, "renewals"))
