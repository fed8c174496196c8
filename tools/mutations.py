"""Damage to messages, for fuzzing decoders: bits, lengths and places of bytes, and the values inside JSON and msgpack.

``mutated(random, corpus)`` is a function of its generator alone, so that a seed gives the same input again.
"""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

MAX_MUTATIONS = 4
"""Done one after another to one input."""
MAX_NESTING = 3000
MAX_REPEATED_BYTES = 1 << 16

_EDGES: list[Any] = [
    None, True, False, -1, 0, 1, 127, 255, 65_536, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, -(2**63),
    2**64 - 1, 0.5, -0.0, 1e308, -1e308, 5e-324, "", " ", "1-2", "0-0-0", "-1", "9" * 30, "nan", "a.b", ">", "\x00",
    "\r\n", "\ud800", "漢", "x" * 5000, [], [[]], {}, {"": None}, {"schema": 2}, b"", b"\xff" * 8,
]  # fmt: skip
_BYTES = [
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\n", b"\r\n", b"{", b"}", b"[", b"]", b'"', b"\\u", b"\\ud800", b"e999",
    b"NaN", b"null", b"-", b"9" * 40, b"data:", b"data: [DONE]\n\n", b"\xc1", b"\xdb\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc7\x01\xff\x00", b"\xef\xbf\xbf",
    b"\xed\xa0\x80",
]  # fmt: skip
_LENGTHS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)

Mutation = Callable[[Random, bytes, Sequence[bytes]], bytes]


def mutated(random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return one damaged message of a corpus of valid ones."""
    data = random.choice(corpus)
    for _ in range(1 if random.random() < 0.5 else random.randint(2, MAX_MUTATIONS)):
        data = random.choice(MUTATIONS)(random, data, corpus)
    return data


def _flip_bit(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    damaged = bytearray(data)
    damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    return bytes(damaged)


def _truncate(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
    return data[:end] if random.random() < 0.7 else data[start:]


def _splice(random: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    other = random.choice(corpus)
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


def _insert(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = random.randint(0, len(data))
    end = at if random.random() < 0.5 else min(len(data), at + random.randint(1, 8))
    return data[:at] + random.choice(_BYTES) + data[end:]


def _overwrite_length(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    size = random.choice((1, 2, 4))
    if len(data) < size:
        return data
    at = random.randint(0, len(data) - size)
    value = random.choice(_LENGTHS) & ((1 << (8 * size)) - 1)
    return data[:at] + value.to_bytes(size, random.choice(("little", "big"))) + data[at + size :]


def _repeat(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start = random.randint(0, len(data))
    part = data[start : start + random.randint(1, 64)]
    if not part:
        return data
    return data[:start] + part * random.randint(2, max(2, MAX_REPEATED_BYTES // len(part) // 64)) + data[start:]


def _nest(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if random.random() < 0.9:  # slow, and one in a while says as much
        return _insert(random, data, ())
    at, depth = random.randint(0, len(data)), random.randint(1, MAX_NESTING)
    opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"\x91", b""), (b"\x81\xa1a", b"")))
    return data[:at] + opening * depth + (b"1" + closing * depth if random.random() < 0.5 else b"") + data[at:]


def _change_json(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Change values inside one line of JSON, with ``data:`` before it or not."""
    lines = data.split(b"\n")
    index = random.randrange(len(lines))
    prefix = b"data: " if lines[index].startswith(b"data:") else b""
    try:
        value = json.loads(lines[index][5:] if prefix else lines[index])
        lines[index] = prefix + json.dumps(_changed(random, value), default=repr).encode()
    except (ValueError, RecursionError):
        return _flip_bit(random, data, ())
    return b"\n".join(lines)


def _change_msgpack(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    try:
        return msgspec.msgpack.encode(_changed(random, msgspec.msgpack.decode(data)))
    except (ValueError, RecursionError, OverflowError, TypeError, msgspec.MsgspecError):
        return _overwrite_length(random, data, ())


def _changed(random: Random, value: Any) -> Any:
    """Return ``value`` with one of its parts replaced, removed, added or doubled."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        rest = {one: held for one, held in value.items() if one != key}
        match random.randrange(8):
            case 0:
                return rest
            case 1:
                return {**rest, random.choice(("", "schema", "extra", str(key) + "x")): value[key]}
            case _:
                return {**value, key: _changed(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.85:
        index = random.randrange(len(value))
        match random.randrange(8):
            case 0:
                return value[:index] + value[index + 1 :]
            case 1:
                return value[:index] + [value[index]] * random.randint(2, 50) + value[index:]
            case _:
                return [*value[:index], _changed(random, value[index]), *value[index + 1 :]]
    if isinstance(value, bytes) and value and random.random() < 0.85:
        return random.choice((_flip_bit, _truncate, _overwrite_length, _change_msgpack))(random, value, (value,))
    if isinstance(value, int) and random.random() < 0.3:
        return value + random.choice((-1, 1))
    return random.choice(_EDGES)


MUTATIONS: tuple[Mutation, ...] = (
    _flip_bit, _truncate, _splice, _insert, _overwrite_length, _repeat, _nest,
    _change_json, _change_json, _change_json, _change_msgpack, _change_msgpack, _change_msgpack,
)  # fmt: skip
