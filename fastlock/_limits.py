"""What a reply may be, for the core compiled and in Python. Never here: how that is checked."""

from __future__ import annotations

MAX_REPLY = 65536 + 64  # bytes of a string: a recall, the longest name behind a token; a longer string is dropped
MAX_FRAME = 64  # bytes around the string: a reply longer than both together is none to a lock command
MAX_ITEMS = 9999  # of one list or map: the lists of a batch have 100
MAX_LONG_REPLY = 1 << 26  # bytes where a long reply is expected: as long as the list of 150,000 clients
MAX_LONG_ITEMS = 1 << 20  # the same of lists: as many as two for each of 500,000 holders
MAX_DEPTH = 8  # of nesting: `COMMAND INFO` on Valkey 9.1 nests 6 deep, no other reply more than 3
MAX_DROPPED = 1 << 32  # bytes of a string that is dropped: a server's longest string has 1 << 29 by default
SCRIPT_NAMES = 100  # names of a script that does for many what is done for one: the server does nothing else meanwhile
