"""Why clients and locks cannot be copied or pickled. Never here: the copying of a lease, which can be."""

from __future__ import annotations

from typing import NoReturn


class Uncopyable:
    """A client or a lock: to copy or pickle it raises TypeError, and says what to do instead."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self)
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be copied or pickled, as its connections and leases "
            "cannot: share the client between the threads or tasks of a process, and make another, from the same URL, "
            "in each other process or loop. A lock is made anew there by its name; what can be sent is a Lease"
        )
