"""The settings of a lock that can be changed after it was made.

Never here: which values make sense (`arguments.py`), what redis-py takes for them (`redis_py.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastlock._protocol import keeping
from fastlock._protocol.arguments import as_ms, as_name, as_wait
from fastlock._protocol.base_lock import BaseLock
from fastlock._protocol.renewal import check_timeout


def mutable_setting(name: str, changed: Callable[[Any, Any], Any]) -> Any:
    """A descriptor for a setting of a lock that can be changed after the lock was made. changed: returns the value to
    keep, and updates on the lock what depends on it."""
    if name in vars(BaseLock):  # BaseLock is compiled
        read, write = vars(BaseLock)[name].__get__, vars(BaseLock)[name].__set__
    else:
        attribute = f"_{name}"
        read = operator.attrgetter(attribute)

        def write(lock: Any, value: object) -> None:
            lock.__dict__[attribute] = value

    return property(read, lambda lock, value: write(lock, changed(lock, value)))


def _set_name(lock: Any, value: object) -> Any:
    lock._key = as_name(value, lock._encoding)
    return value


def _set_timeout(lock: Any, value: float | None) -> Any:
    if lock._renewal is not None:
        check_timeout(value)
    if lock._keep_ms:
        keeping.check_timeout(value)
    lock._ms = 0 if value is None else as_ms(value)
    return value


class MutableSettings:
    """The settings of a client's lock that can be changed later, for the acquires from then on."""

    __slots__ = ()

    if not TYPE_CHECKING:
        name = mutable_setting("name", _set_name)
        timeout = mutable_setting("timeout", _set_timeout)
        sleep = mutable_setting("sleep", lambda lock, value: as_wait(value, "sleep"))
        blocking_timeout = mutable_setting(
            "blocking_timeout", lambda lock, value: value if value is None else as_wait(value, "blocking_timeout")
        )
