"""Which path the acquires and releases of all locks take: the fast one where it is there, else the plain one.

Never here: the paths.
"""

from __future__ import annotations

from typing import Any

from fastlock._implementation import fast_path
from fastlock._locks import plain

threads: Any = fast_path("threads") or plain
tasks: Any = fast_path("tasks") or plain
