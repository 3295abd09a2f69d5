"""Holders: callers that acquire a lock beside the test's body and release it when told. Nothing here decides."""

from __future__ import annotations

import threading
from typing import Any

from support.apis import Api, Job
from support.child_client import SOON, until


class Holder:
    """A thread or task that enters a lock, notes it, and leaves it when it is told to."""

    def __init__(self, api: Api, lock: Any, entered: list[Any] | None = None, name: object = None) -> None:
        self.api, self.lock = api, lock
        self.lease: Any = None
        self.order = entered if entered is not None else []
        self.name = name
        self.inside, self.told = threading.Event(), threading.Event()
        self.job: Job = api.start(self._run)

    async def _run(self) -> None:
        async with self.api.within(self.lock) as lease:
            self.lease = lease
            self.order.append(self.name)
            self.inside.set()
            if self.api.is_async:
                await until(self.api, self.told.is_set, "the word to leave", 60)
            else:
                assert self.told.wait(60)

    async def entered(self) -> Any:
        """Wait until it is inside; returns the lease."""
        await until(self.api, lambda: self.inside.is_set() or self.job.finished.is_set(), "a holder inside")
        if not self.inside.is_set():
            await self.job.get()
        return self.lease

    async def leave(self) -> None:
        """Have it leave the lock; returns when it has. Raises what leaving raises."""
        self.told.set()
        await self.job.get(SOON)
