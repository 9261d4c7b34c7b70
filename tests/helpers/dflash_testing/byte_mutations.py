"""Random changes of bytes: of any bytes, of the values of a JSON document, and of the numbers in a text."""

import json
import random
import re
from copy import deepcopy
from typing import Any

NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][+-]?\d+)?")
NUMBERS = (
    b"0", b"-1", b"1", b"-5", b"255", b"65536", b"1000000", b"2147483648", b"4294967296", b"4611686018427387904",
    b"9223372036854775808", b"18446744073709551616", b"1e308", b"1e999", b"-1e999", b"0.5", b"NaN", b"-Infinity",
    b"9" * 200, b"9" * 5000,
)  # fmt: skip
PIECES = (
    b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\ud800",
    b"\n", b"\r\n", b"\x1b[2J", b"[" * 2000, b'{"a":' * 2000, b"null", b"true", b"../../etc/passwd",
    b'"\\u001b[31m\\nerror: forged"', b"\xe2\x80\xae", b"A" * 3000,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -5, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "..", "/etc/passwd", "a\nerror: forged", "\x1b]0;t\x07", "\ud800", "\0",
    "y" * 3000, [], {}, [[]], [None], [1, 2, 3], ["0"], [-1], [2**62, 2**62], [0] * 500, {"a": {"b": {}}},
)  # fmt: skip


def mutate(base: bytes, generator: random.Random) -> bytes:
    """One to four random changes, or now and then random bytes alone."""
    kind = generator.random()
    if kind < 0.02:
        return generator.randbytes(generator.randrange(400))
    data = _change_values(base, generator) if kind < 0.5 else base
    for _ in range(generator.choice((0, 1) if data is not base else (1, 1, 2, 4))):
        data = generator.choice(CHANGES)(data, generator)
    return data


def _flip(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 3, 20))):
        if changed:
            changed[generator.randrange(len(changed))] = generator.randrange(256)
    return bytes(changed)


def _cut(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.randrange(len(data) + 1)]


def _insert(data: bytes, generator: random.Random) -> bytes:
    place = generator.randrange(len(data) + 1)
    piece = generator.choice(PIECES) if generator.random() < 0.7 else generator.randbytes(generator.randrange(40))
    return data[:place] + piece + data[place:]


def _move(data: bytes, generator: random.Random) -> bytes:
    """Remove, repeat or swap a piece."""
    begin, end = sorted(generator.randrange(len(data) + 1) for _ in range(2))
    end = min(end, begin + 4000)
    piece = data[begin:end]
    return data[:begin] + generator.choice((b"", piece * 2, piece[::-1])) + data[end:]


def _renumber(data: bytes, generator: random.Random) -> bytes:
    """Replace a number in a text."""
    found = list(NUMBER.finditer(data[:20_000]))
    if not found:
        return _flip(data, generator)
    chosen = generator.choice(found)
    return data[: chosen.start()] + generator.choice(NUMBERS) + data[chosen.end() :]


CHANGES = (_flip, _cut, _insert, _move, _renumber, _renumber)


def _change_values(data: bytes, generator: random.Random) -> bytes:
    """Change values of the first line that is JSON; other bytes stay. Bytes that are not JSON are returned as is."""
    lines = data.split(b"\n") if len(data) < 100_000 else [data]
    order = list(range(len(lines)))
    generator.shuffle(order)
    for place in [-1] if len(lines) == 1 or generator.random() < 0.5 else order[:2]:
        text = data if place < 0 else lines[place]
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        for _ in range(generator.choice((1, 1, 2))):
            value = _with_another_value(value, generator)
        changed = json.dumps(value).encode()
        return changed if place < 0 else b"\n".join([*lines[:place], changed, *lines[place + 1 :]])
    return data


def _any_value(generator: random.Random) -> Any:
    return deepcopy(generator.choice(VALUES))


def _with_another_value(value: Any, generator: random.Random) -> Any:
    """The value, with a value at a random place in it replaced, removed, added or moved."""
    if not isinstance(value, dict | list) or not value or generator.random() < 0.03:
        return _any_value(generator)
    holder, key = value, _a_key(value, generator)
    while isinstance(holder[key], dict | list) and holder[key] and generator.random() < 0.8:
        holder = holder[key]
        key = _a_key(holder, generator)
    kind = generator.random()
    if kind < 0.6:
        holder[key] = _any_value(generator)
    elif kind < 0.8:
        del holder[key]
    elif isinstance(holder, dict):
        holder[generator.choice(("x", "", "a\nb", "__class__", *holder))] = _any_value(generator)
    else:
        holder[key:key] = [holder[key]] * generator.choice((1, 2, 50))
    return value


def _a_key(holder: Any, generator: random.Random) -> Any:
    return generator.choice(list(holder)) if isinstance(holder, dict) else generator.randrange(len(holder))
