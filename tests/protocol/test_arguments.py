"""Arguments, checked before anything is sent: tables of accepted values and their meaning, and of refused values."""

from __future__ import annotations

import array
import math
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastlock._protocol import arguments

pytestmark = pytest.mark.usefixtures("impl")
no_reset = [HealthCheck.function_scoped_fixture]  # the implementation is the same in each example
seeded = settings(derandomize=True, deadline=None, max_examples=300, suppress_health_check=no_reset)


class Text(str):
    """A subclass of str."""


class Raw(bytes):
    """A subclass of bytes, with a wrong length."""

    def __len__(self) -> int:
        return 1


class Seconds(float):
    """A subclass of float, as numpy's."""


# --------------------------------------------------------------------------------------------------------------- names

NAMES: list[tuple[Any, bytes]] = [
    ("sku:42", b"sku:42"),
    (b"sku:42", b"sku:42"),
    ("a b", b"a b"),
    (" ", b" "),
    ("\0", b"\0"),
    ("\r\n", b"\r\n"),
    ("{tag}:x}{", b"{tag}:x}{"),
    ("größe/锁/🔒", "größe/锁/🔒".encode()),
    (b"\xff\xfe\x00\r\n$-1\r\n", b"\xff\xfe\x00\r\n$-1\r\n"),
    (bytearray(b"abc"), b"abc"),
    (memoryview(b"abc"), b"abc"),
    (memoryview(b"a-b-c")[::2], b"abc"),
    (memoryview(bytearray(b"cba"))[::-1], b"abc"),
    (memoryview(array.array("H", [0x6161, 0x6262])), b"aabb"),
    (memoryview(b"abcd").cast("B", (2, 2)), b"abcd"),
    (Text("abc"), b"abc"),
    (Raw(b"abc"), b"abc"),
    ("x" * 65536, b"x" * 65536),
    ("é" * 32768, "é".encode() * 32768),
    ("fastlock", b"fastlock"),
    ("my fastlock:x", b"my fastlock:x"),
]


@pytest.mark.parametrize(("value", "key"), NAMES, ids=lambda value: repr(value)[:30])
def test_a_name_is_exactly_its_bytes(value: Any, key: bytes) -> None:
    found = arguments.as_name(value)
    assert found == key
    assert type(found) is bytes
    assert arguments.as_bytes(value, "token") == key


def test_a_name_is_copied_from_a_mutable_buffer() -> None:
    buffer = bytearray(b"before")
    names = [arguments.as_name(buffer), arguments.as_name(memoryview(buffer))]
    buffer[:] = b"after!"
    assert names == [b"before", b"before"]


NO_NAMES: list[tuple[Any, type[Exception], str]] = [
    *((empty, ValueError, "must not be empty") for empty in ("", b"", bytearray(), memoryview(b""), Text(""))),
    *((long, ValueError, "at most 65536 bytes") for long in ("x" * 65537, b"x" * 65537, "é" * 32769, bytearray(65537))),
    ("\ud800", ValueError, r"cannot be encoded as utf-8.*bytes"),
    ("a\udcff", ValueError, "cannot be encoded"),
    *(
        (reserved, ValueError, "fastlock:")
        for reserved in ("fastlock:", b"fastlock:fence:{x}", bytearray(b"fastlock:1"))
    ),
    *((wrong, TypeError, type(wrong).__name__) for wrong in (None, 5, 1.5, True, ["x"], ("x",), {"x"}, object(), str)),
]


@pytest.mark.parametrize(("value", "kind", "words"), NO_NAMES, ids=lambda value: repr(value)[:30])
def test_an_invalid_name_is_refused(value: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        arguments.as_name(value)
    assert str(caught.value).startswith("name must") or str(caught.value).startswith("name cannot")
    assert len(str(caught.value)) < 200
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "utf-16", "ascii", "cp500"])
@pytest.mark.parametrize("text", ["abc", "x" * 40_000])
def test_a_name_is_encoded_as_the_redis_client_encodes(encoding: str, text: str) -> None:
    if len(text.encode(encoding)) <= arguments.MAX_BYTES:
        assert arguments.as_name(text, encoding) == text.encode(encoding)
        assert arguments.as_bytes(text, "token", encoding) == text.encode(encoding)
    else:
        with pytest.raises(ValueError, match="65536"):
            arguments.as_name(text, encoding)
    with pytest.raises(ValueError, match=r"cannot be encoded as ascii.*bytes instead"):
        arguments.as_name("é", "ascii")


def test_a_token_may_begin_with_fastlock() -> None:
    assert arguments.as_bytes("fastlock:x", "token") == b"fastlock:x"
    with pytest.raises(TypeError, match=r"^token must be"):
        arguments.as_bytes(None, "token")
    with pytest.raises(ValueError, match=r"^token must not be empty"):
        arguments.as_bytes(b"", "token")


@seeded
@given(st.text(max_size=50) | st.binary(max_size=50))
def test_any_text_is_a_name_or_a_value_error(value: str | bytes) -> None:
    try:
        expected = value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError:
        expected = b""
    if expected and not expected.startswith(b"fastlock:"):
        assert arguments.as_name(value) == expected
    else:
        with pytest.raises(ValueError, match="name"):
            arguments.as_name(value)


# ------------------------------------------------------------------------------------------------------------- numbers

MS: list[tuple[Any, int]] = [
    *((1, 1000), (10, 10_000), (999_999, 999_999_000), (1_000_000, 1_000_000_000), (0.001, 1), (0.0015, 1), (0.5, 500)),
    *((0.29, 290), (0.57, 570), (1.1, 1100), (2.675, 2675), (1e-3, 1), (Seconds(0.25), 250), (86_400.0, 86_400_000)),
    *((2**53 / 1000, 2**53), (2**53 // 1000, 2**53 // 1000 * 1000), (9_007_199_254_740, 9_007_199_254_740_000)),
]


@pytest.mark.parametrize(("value", "ms"), MS)
def test_seconds_are_whole_milliseconds(value: Any, ms: int) -> None:
    found = arguments.as_ms(value)
    assert found == ms
    assert type(found) is int


NO_MS: list[tuple[Any, type[Exception], str]] = [
    *((small, ValueError, "at least 0.001") for small in (0, 0.0, -0.0, -1, -0.5, 0.0009, 1e-300, -(10**400))),
    *((large, ValueError, "at most") for large in (9_007_199_254_741, 2**53, 1e18, 1e300, 10**400)),
    *((odd, ValueError, "finite") for odd in (math.nan, math.inf, -math.inf, Seconds("nan"))),
    *(
        (wrong, TypeError, type(wrong).__name__)
        for wrong in (True, False, "10", b"10", Decimal(1), Fraction(1), 1j, [])
    ),
    (None, TypeError, "NoneType"),
]


@pytest.mark.parametrize(("value", "kind", "words"), NO_MS, ids=lambda value: repr(value)[:25])
@pytest.mark.parametrize("what", ["timeout", "additional_time"])
def test_an_invalid_lease_time_is_refused_by_name(value: Any, kind: type[Exception], words: str, what: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        arguments.as_ms(value, what)
    assert str(caught.value).startswith(f"{what} must be ")


def test_a_lease_is_rounded_down_to_milliseconds() -> None:
    rng = random.Random(5)
    for _ in range(20_000):
        ms = rng.randint(1, 10 ** rng.randint(1, 9))
        assert arguments.as_ms(ms / 1000) == ms
        asked = rng.uniform(0.001, 10 ** rng.randint(0, 9))
        exact = Fraction(asked) * 1000
        assert exact - 1 - Fraction(1, 1000) < arguments.as_ms(asked) < exact + Fraction(1, 100_000)


@pytest.mark.parametrize("value", [0, 0.0, 1, 0.1, 1e-9, 3600, 1e8, Seconds(2.0)])
def test_waits_may_be_zero(value: Any) -> None:
    assert arguments.as_wait(value, "sleep") == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *((value, ValueError) for value in (-1, -1e-9, -math.inf, math.inf, math.nan, 1e300, 10**400, -(10**400))),
        *((value, TypeError) for value in (True, False, None, "1", b"1", Decimal(1), Fraction(1, 2), [1])),
    ],
    ids=lambda value: repr(value)[:25],
)
@pytest.mark.parametrize("what", ["sleep", "blocking_timeout"])
def test_an_invalid_wait_is_refused_by_name(value: Any, kind: type[Exception], what: str) -> None:
    with pytest.raises(kind, match=f"^{what} must be ") as caught:
        arguments.as_wait(value, what)
    assert len(str(caught.value)) < 200


@seeded
@given(st.floats() | st.integers())
def test_any_number_is_a_valid_wait_or_a_value_error(value: float) -> None:
    try:
        seconds = arguments.as_wait(value, "sleep")
    except ValueError:
        return
    assert 0 <= 1e6 + seconds < math.inf
