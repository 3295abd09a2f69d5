"""What `_core.pyx` offers, for type checkers; `make lint` compares it with the compiled module."""

from typing import Any, Final, Protocol, final

from hiredis import ProtocolError as ProtocolError
from hiredis import PushNotification as PushNotification
from hiredis import Reader as Reader

IMPLEMENTATION: str
ABI: int
BUILD: str
MAX_REPLY: int
MAX_DEPTH: int
