"""Arrays as small whole numbers that add up, and back.

    y     = rotation of a                  within each row of the array, shared by the round
    code  = round_at_random(y / step)      whole numbers in [-L, L]; the mean of code * step is y
    a'    = rotation back of code * step

A row is what the first axis counts. So a rotation never mixes rows of a table: a row of zeros stays
zeros, and rows that different clients hold add up. In an array of one axis, such as a bias, a row
is one number, and is not rotated.

The rotation spreads a few large numbers over many: random signs, then Hadamard matrices on blocks
of 512 numbers. The rest of a row is cut into smaller powers of two, so nothing is padded. The
entries of the matrices are +-1 and their factors are powers of two. Up to the product with `step`,
the way back is therefore exact: on sums of codes too, as long as their numbers fit (`restored`).
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HALF = 15  # bits of a sum's lower half
MOST = 512  # numbers in a block: with codes of 16 bits, the way back fits float32's 24 bits


def largest(bits: int) -> int:
    """L: codes of b bits are symmetric, so they add up without a bias."""
    return 2 ** (bits - 1) - 1


def blocks(row: int) -> Iterator[tuple[int, int, int]]:
    """The blocks of a row: start, number of blocks, numbers in each (a power of two)."""
    start, size = 0, MOST
    while start < row:
        if count := (row - start) // size:
            yield start, count, size
            start += count * size
        size //= 2


def signs(key: Any) -> jax.Array:
    """Of a block's numbers, from the round's two shared words."""
    words = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.rademacher(words, (MOST,), jnp.int32)


def as_rows(a):
    """[rows, numbers in a row]."""
    return a.reshape(1, 1) if a.ndim == 0 else a.reshape(a.shape[0], -1)


def rotated(a, signs) -> jax.Array:
    """y, of the same shape, in float32."""
    rows = as_rows(a.astype(jnp.float32))

    def turn(block, size):
        return _hadamard(block * signs[:size].astype(jnp.float32)) * 2.0 ** -(_log(size) // 2)

    return _blockwise(turn, rows).reshape(a.shape)


def restored(codes, signs) -> jax.Array:
    """What `rotated` made into `codes`, in float32, for step = 1. `codes` are of one client, or
    sums over clients. Integers stay integers until the last conversion. Codes as float32 are exact
    too, if they are of one client."""

    def turned(block):
        if not jnp.issubdtype(block.dtype, jnp.integer):
            return _hadamard(block)
        high, low = block >> HALF, block & (2**HALF - 1)  # so that no product exceeds 32 bits
        both = [_hadamard(a).astype(jnp.float32) for a in (high, low)]
        return both[0] * 2.0**HALF + both[1]

    def back(block, size):
        return turned(block) * signs[:size].astype(jnp.float32) * 2.0 ** -((_log(size) + 1) // 2)

    return _blockwise(back, as_rows(codes)).reshape(codes.shape)


def rounded(y, step, most: int, uniform) -> jax.Array:
    """Codes in [-most, most], as float32. `uniform` are random numbers in [0, 1), of y's shape.
    0 stays 0."""
    code = jnp.floor(y / jnp.where(step > 0, step, 1.0) + uniform)
    return jnp.clip(jnp.where(step > 0, code, 0.0), -most, most)


def rounded_bfloat16(a, uniform) -> jax.Array:
    """One of the two nearest bfloat16 numbers, as float32."""
    bits = jax.lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32)
    draws = (uniform * 65536).astype(jnp.uint32)
    up = jax.lax.bitcast_convert_type((bits + draws) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(a), up, a).astype(a.dtype)


def uniform(key, shape: tuple[int, ...], ids=None) -> jax.Array:
    """Random numbers in [0, 1), in steps of 2^-16. With `ids`, the rows' numbers depend on their
    ids and not on their places."""
    if ids is not None:
        each = jax.vmap(lambda i: uniform(jax.random.fold_in(key, i), shape[1:]))
        return each(ids)
    size = math.prod(shape)
    words = jax.random.bits(key, (-(-size // 2),), jnp.uint32)
    halves = jnp.concatenate([words & 0xFFFF, words >> 16])[:size]
    return ((halves.astype(jnp.float32) + 0.5) / 65536).reshape(shape)


def _blockwise(function, rows):
    parts = [
        function(rows[:, at : at + count * size].reshape(-1, size), size).reshape(len(rows), -1)
        for at, count, size in blocks(rows.shape[1])
    ]
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def _hadamard(block):
    """Block [n, size] times a matrix of +-1, as two products with small matrices."""
    n, size = block.shape
    right = min(size, 32)
    left = size // right
    block = _product(block.reshape(-1, right), right)
    if left > 1:
        swapped = block.reshape(n, left, right).swapaxes(1, 2).reshape(-1, left)
        block = _product(swapped, left).reshape(n, right, left).swapaxes(1, 2)
    return block.reshape(n, size)


def _product(rows, size: int):
    if size == 1:
        return rows
    matrix = jnp.asarray(_matrix(size), rows.dtype)
    return jnp.matmul(rows, matrix, precision=jax.lax.Precision.HIGHEST)


@functools.cache
def _matrix(size: int) -> np.ndarray:
    if size == 1:
        return np.ones((1, 1), np.int8)
    half = _matrix(size // 2)
    return np.block([[half, half], [half, -half]])


def _log(size: int) -> int:
    return size.bit_length() - 1
