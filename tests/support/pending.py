"""Pending replies that log what they got, and what replies and commands look like to plain hiredis, to compare with."""

from __future__ import annotations

from typing import Any

import hiredis


def packed(*args: bytes | int) -> bytes:
    return bytes(hiredis.pack_command(args))


class LoggedReply:
    """A pending reply, with done() and set_result(). It appends each reply that it gets to a shared log."""

    def __init__(self, log: list[Any], number: int, done: bool = False) -> None:
        self.log, self.number, self._done = log, number, done

    def done(self) -> bool:
        return self._done

    def set_result(self, reply: Any) -> None:
        self.log.append((self.number, shown(reply)))


def shown(reply: Any) -> Any:
    """A reply as something that can be compared: errors by type and text, NaN equal to itself, kinds kept apart."""
    if isinstance(reply, list):
        return type(reply).__name__, [shown(item) for item in reply]
    if isinstance(reply, dict):
        return "dict", [(shown(key), shown(value)) for key, value in reply.items()]
    return type(reply).__name__, str(reply) if isinstance(reply, Exception) else repr(reply)
