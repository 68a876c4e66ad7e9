"""Parses tf.train.Example without TensorFlow.

Example   { 1: Features }           Features { 1: entry, repeated }
entry     { 1: name, 2: Feature }   Feature  { 1: BytesList | 2: FloatList | 3: Int64List }
each list { 1: value, repeated; numbers may be packed into one field }
"""

from collections.abc import Iterator

import numpy as np

Feature = list[bytes] | np.ndarray


def parse_example(data: bytes) -> dict[str, Feature]:
    """Features by name: a list of bytes, or float32 or int64 numbers. ValueError if damaged."""
    by_name: dict[str, Feature] = {}
    for features in _inner(data, 1):
        for entry in _inner(features, 1):
            name, feature = b"".join(_inner(entry, 1)), b"".join(_inner(entry, 2))
            by_name[name.decode("utf-8")] = _feature(feature)
    return by_name


def _inner(data: bytes, wanted: int) -> Iterator[bytes]:
    """The contents of the fields with the number `wanted`."""
    for number, value in _fields(data):
        if number == wanted:
            if not isinstance(value, bytes):
                raise ValueError(f"field {number} is a number, expected bytes")
            yield value


def _feature(data: bytes) -> Feature:
    for values in _inner(data, 1):
        return list(_inner(values, 1))
    for values in _inner(data, 2):
        return np.frombuffer(b"".join(_inner(values, 1)), "<f4")  # ValueError if truncated
    for values in _inner(data, 3):
        parts = [
            varints(v) if isinstance(v, bytes) else np.array([v], np.uint64)
            for number, v in _fields(values) if number == 1
        ]  # fmt: skip
        return np.concatenate([np.zeros(0, np.uint64), *parts]).view(np.int64)
    return []


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The number and value (bytes or a whole number) of each field of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes extends beyond the end")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if at + i >= len(data):
            raise ValueError("a number extends beyond the end")
        byte = data[at + i]
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            return value & (2**64 - 1), at + i + 1
    raise ValueError("a number has more than 10 bytes")


def varints(data: bytes) -> np.ndarray:
    """Packed numbers, all at once: an image has 21,168 of them."""
    b = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(b < 128)
    if len(b) and (not len(ends) or ends[-1] != len(b) - 1):
        raise ValueError("packed numbers are truncated")
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    sizes = ends - starts + 1
    if len(sizes) and sizes.max() > 10:
        raise ValueError("a number has more than 10 bytes")
    values = np.zeros(len(ends), np.uint64)
    for i in range(int(sizes.max()) if len(sizes) else 0):
        more = sizes > i
        values[more] |= (b[starts[more] + i] & np.uint64(127)) << np.uint64(7 * i)
    return values
