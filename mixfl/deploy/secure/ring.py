"""Vectors of integers mod 2^bits: masks from a seed, sums, and packing without a wasted bit.

A vector may have parts of different width. Integers are kept in the smallest unsigned type that
holds them; they wrap around there, and only their lowest bits count.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

CHUNK = 1 << 20  # bytes of a keystream made at a time: they stay in the cache


class Segment(NamedTuple):
    bits: int
    length: int

    @property
    def dtype(self) -> np.dtype:
        size = next(size for size in (1, 2, 4, 8) if self.bits <= 8 * size)
        return np.dtype(f"<u{size}")

    @property
    def bytes(self) -> int:
        return -(-self.length * self.bits // 8)


Layout = tuple[Segment, ...]
Vector = list[np.ndarray]


def zeros(layout: Layout) -> Vector:
    return [np.zeros(s.length, s.dtype) for s in layout]


def size(layout: Layout) -> int:
    """The bytes of a packed vector."""
    return sum(s.bytes for s in layout)


def checked(vector: Sequence[np.ndarray], layout: Layout) -> None:
    given = [(a.dtype, a.shape) for a in vector]
    if given != [(s.dtype, (s.length,)) for s in layout]:
        raise ValueError(f"expected a vector of the layout {layout}, got {given}")


def add_mask(vector: Vector, layout: Layout, seed: bytes, sign: int = 1) -> None:
    """Adds, in place, the mask that follows from a seed of 32 bytes, or subtracts it."""
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), None).encryptor()
    most = min(CHUNK, max((a.nbytes for a in vector), default=0))
    buffer, nothing = bytearray(most + 64), bytes(most)  # a cipher wants room for a block more
    operation = np.add if sign > 0 else np.subtract
    for values, segment in zip(vector, layout, strict=True):
        for part in _chunks(values, segment.dtype.itemsize):
            length = stream.update_into(memoryview(nothing)[: part.nbytes], buffer)
            mask = np.frombuffer(buffer, segment.dtype, length // segment.dtype.itemsize)
            operation(part, mask, out=part)


def _chunks(values: np.ndarray, itemsize: int) -> Iterator[np.ndarray]:
    step = CHUNK // itemsize
    for start in range(0, len(values), step):
        yield values[start : start + step]


def add(total: Vector, vector: Sequence[np.ndarray]) -> None:
    for t, v in zip(total, vector, strict=True):
        np.add(t, v, out=t)


def reduced(vector: Vector, layout: Layout) -> Vector:
    """With only the bits that count."""
    return [v & v.dtype.type((1 << s.bits) - 1) for v, s in zip(vector, layout, strict=True)]


def pack(vector: Vector, layout: Layout) -> bytes:
    return b"".join(_pack(v, s) for v, s in zip(reduced(vector, layout), layout, strict=True))


def unpack(data: bytes, layout: Layout) -> Vector:
    """`data` must have the size of the layout."""
    if len(data) != size(layout):
        raise ValueError(f"expected {size(layout)} bytes, got {len(data)}")
    vector, start = [], 0
    for segment in layout:
        vector.append(_unpack(data[start : start + segment.bytes], segment))
        start += segment.bytes
    return vector


def _pack(values: np.ndarray, segment: Segment) -> bytes:
    """Eight integers take as many bytes as one has bits."""
    bits = segment.bits
    if bits == 8 * segment.dtype.itemsize:
        return values.tobytes()
    eights = np.zeros((-(-len(values) // 8), 8), values.dtype)
    eights.reshape(-1)[: len(values)] = values
    out = np.zeros((len(eights), bits), np.uint8)
    for i in range(8):
        for byte in range(i * bits // 8, ((i + 1) * bits - 1) // 8 + 1):
            shift = 8 * byte - i * bits
            moved = eights[:, i] >> shift if shift >= 0 else eights[:, i] << -shift
            out[:, byte] |= moved.astype(np.uint8)
    return out.tobytes()[: segment.bytes]


def _unpack(data: bytes, segment: Segment) -> np.ndarray:
    bits, dtype = segment.bits, segment.dtype
    if bits == 8 * dtype.itemsize:
        return np.frombuffer(data, dtype).copy()
    count = -(-segment.length // 8)
    packed = np.zeros((count, bits), np.uint8)
    packed.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
    out = np.zeros((count, 8), dtype)
    for i in range(8):
        for byte in range(i * bits // 8, ((i + 1) * bits - 1) // 8 + 1):
            shift = 8 * byte - i * bits
            wide = packed[:, byte].astype(dtype)
            out[:, i] |= wide << shift if shift >= 0 else wide >> -shift
    out &= dtype.type((1 << bits) - 1)
    return out.reshape(-1)[: segment.length].copy()
