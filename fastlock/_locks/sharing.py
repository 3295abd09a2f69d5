"""How a value that one caller of a client made reaches those of the client that wait behind it, without a command each.

They wait in the queue of the lock under which the value is made, and get it one after the other; who gets it looks here
first. Never here: waiting, reading, keeping.
"""

from __future__ import annotations

import weakref


class Shared:
    """The last value of a key that a caller of this client has seen, as long as any of them is about to make one."""

    __slots__ = ("__weakref__", "raw", "serial")

    def __init__(self) -> None:
        self.raw = b""
        self.serial = 0  # counts the values

    def put(self, raw: bytes) -> None:
        """Share a value that stands on the server now."""
        self.raw = raw
        self.serial += 1


class SharedByKey:
    """The `Shared` of each key. Two threads that ask at once may get two, and then share nothing."""

    def __init__(self) -> None:
        self._by_key: weakref.WeakValueDictionary[bytes, Shared] = weakref.WeakValueDictionary()

    def of(self, key: bytes) -> Shared:
        """That of a key."""
        return self._by_key.setdefault(key, Shared())
