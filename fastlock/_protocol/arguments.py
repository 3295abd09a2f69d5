"""Arguments, checked before anything is sent: values in, values or a clear error out. No I/O, no state."""

from __future__ import annotations

import math

MAX_BYTES = 65536  # of a name or token: a server takes 512 MiB, but then every reply that echoes it is as long
MAX_MS = 2**53  # the largest integer that a script's numbers hold exactly; some 285,000 years

MAX_WAIT = 1_000_000_000  # seconds: some 31 years; longer is None

RESERVED = b"fastlock:"  # keys that fastlock itself keeps start so; no lock may be taken for one

Name = str | bytes | bytearray | memoryview


def as_bytes(value: object, what: str, encoding: str = "utf-8") -> bytes:
    """The exact bytes of a name or token.

    Raises TypeError for anything but str, bytes, bytearray or memoryview; ValueError when it is empty, longer than 64
    KiB or cannot be encoded.
    """
    if type(value) is not bytes:
        if isinstance(value, str):
            try:
                value = value.encode(encoding)
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{what} cannot be encoded as {encoding}: {error.reason}; give bytes instead"
                ) from None
        elif isinstance(value, (bytes, bytearray, memoryview)):
            value = bytes(value)
        else:
            raise TypeError(f"{what} must be str, bytes or memoryview, not {type(value).__name__}")
    if not value:
        raise ValueError(f"{what} must not be empty")
    if len(value) > MAX_BYTES:
        raise ValueError(f"{what} must be at most {MAX_BYTES} bytes long, not {len(value)}")
    return bytes(value)


def as_name(value: object, encoding: str = "utf-8", what: str = "name") -> bytes:
    """The key of a lock: exactly the bytes of its name. Errors as `as_bytes`; the prefix of queues and fence
    counters is refused. what: the argument's name, for errors."""
    if type(value) is str and value.isascii() and encoding == "utf-8":
        text = value
        name = text.encode()
        if not 0 < len(name) <= MAX_BYTES:
            name = as_bytes(value, what)
    else:
        name = as_bytes(value, what, encoding)
    if name.startswith(RESERVED):
        raise ValueError(f"{what} must not start with {RESERVED.decode()!r}: queues and fence counters live there")
    return name


def as_flag(value: object, what: str) -> bool:
    """True or False. TypeError: anything else, as the "no" of a configuration counts as true in Python, and None as
    false."""
    if value is not True and value is not False:
        raise TypeError(f"{what} must be True or False, not {value!r:.40}")
    return value


def as_number(value: object, what: str) -> float:
    """A finite number of seconds. TypeError: not an int or float (bool is neither). ValueError: NaN or infinite."""
    kind = type(value)
    if kind not in (int, float) and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"{what} must be a number of seconds (int or float), not {kind.__name__}")
    number: float = value  # type: ignore[assignment]  # as was checked
    if not -math.inf < number < math.inf:
        raise ValueError(f"{what} must be a finite number of seconds, not {value!r}")
    return number


def as_ms(value: object, what: str = "timeout") -> int:
    """Seconds as whole milliseconds, for a lease. ValueError: below 0.001 s or above 2**53 ms. Errors as
    `as_number`."""
    if type(value) is int and 0 < value < 1_000_000:
        return value * 1000
    if type(value) is float and 0.001 <= value < 1_000_000:
        return int(value * 1000 + 1e-6)
    seconds = as_number(value, what)
    if seconds < 0.001:
        none = {"timeout": ", or None for a lease without end", "keep": ", or None to keep no lease"}.get(what, "")
        raise ValueError(f"{what} must be at least 0.001 seconds{none}, not {value!r}")
    if seconds > MAX_MS / 1000:
        raise ValueError(f"{what} must be at most {MAX_MS // 1000} seconds (2**53 ms), not {value!r}")
    return int(seconds * 1000 + 1e-6)  # 0.29 * 1000 is 289.99999999999994


def as_wait(value: object, what: str) -> float:
    """Seconds to wait, zero allowed. ValueError: negative, or over 31 years. Errors as `as_number`."""
    if type(value) is float and 0 <= value <= MAX_WAIT:
        return value
    seconds = as_number(value, what)
    if not 0 <= seconds <= MAX_WAIT:
        raise ValueError(f"{what} must be between 0 and {MAX_WAIT} seconds, not {value!r:.40}")
    return seconds
