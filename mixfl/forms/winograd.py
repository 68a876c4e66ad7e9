"""Convolutions with small kernels and stride 1 in fewer multiplications (Winograd).

The results of a convolution in a tile of m places come from m + r - 1 places of x, where r is the
kernel's size. Take x and the kernel as polynomials: their product is known from its values at
m + r - 1 points, and each value is one multiplication. So a tile of 4 x 4 results of a 3 x 3 kernel
needs 36 multiplications per pair of channels in place of 144. Going to these values (`B x`, `G w`)
and back (`A`) are products with small matrices, which pay off with many channels: see `tiling`.

The points decide the rounding. With these ones, the error is about twice that of the plain product
(tests/forms/test_winograd.py). Inside, x is [examples, *places, C] and w is [*kernel, C, D].
"""

import functools
import math
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mixfl.forms.blocks import mapped, summed

POINTS = (0, 3 / 4, -3 / 4, 3 / 2, -3 / 2)
TILES = {1: (1,), 3: (4, 2), 5: (2,)}  # results of a tile, by the kernel's size
# Measured on two kinds of CPU cores, in multiplications of a large product:
COPY = 10  # what copying a number costs
CLEARLY = 1.3  # by how much the cost must be lower


class Tiling(NamedTuple):
    """In each dimension, of places or of results."""

    kernel: tuple[int, ...]
    tile: tuple[int, ...]  # results of a tile
    out: tuple[int, ...]  # results
    tiles: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        """Results of all tiles: those beyond `out` are cut off."""
        return tuple(m * n for m, n in zip(self.tile, self.tiles, strict=True))

    @property
    def points(self) -> tuple[int, ...]:
        return tuple(m + r - 1 for m, r in zip(self.tile, self.kernel, strict=True))


def tiling(kernel, out, C: int, D: int) -> Tiling | None:
    """The cheapest tiles; None if the plain product is about as cheap."""
    plain = math.prod(out) * math.prod(kernel) * (C * D + COPY * C)
    if math.prod(kernel) == 1 or not all(r in TILES for r in kernel):
        return None
    tiles = product(*(TILES[r] for r in kernel))
    ways = [Tiling(tuple(kernel), tile, tuple(out), counts(out, tile)) for tile in tiles]
    cheapest = min(ways, key=lambda t: cost(t, C, D))
    return cheapest if CLEARLY * cost(cheapest, C, D) < plain else None


def counts(out, tile) -> tuple[int, ...]:
    """How many tiles cover the results."""
    return tuple(-(-o // m) for o, m in zip(out, tile, strict=True))


def cost(t: Tiling, C: int, D: int) -> float:
    """Of an example, in multiplications."""
    a, m = math.prod(t.points), math.prod(t.tile)
    return math.prod(t.tiles) * (a * C * D + a * a * C + a * m * D + COPY * (a * C + m * D))


@functools.cache
def matrices(kernel: tuple[int, ...], tile: tuple[int, ...]):
    """A [results, points], G [points, kernel], B [points, places] of a tile, all dimensions in one:
    A ((G w) * (B x)) is the convolution."""
    one: np.ndarray = np.ones((1, 1))
    A = G = B = one
    for r, m in zip(kernel, tile, strict=True):
        a = m + r - 1
        A, G = np.kron(A, values(m, a).T), np.kron(G, values(r, a))
        B = np.kron(B, np.linalg.inv(values(a, a)).T)
    return A, G, B


def values(coefficients: int, points: int) -> np.ndarray:
    """From a polynomial's coefficients to its values at the points, the last of them infinity."""
    if points == 1:
        return np.ones((1, 1))
    finite = np.vander(POINTS[: points - 1], coefficients, increasing=True)
    return np.vstack([finite, np.eye(coefficients)[-1]])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def convolved(t: Tiling, x, w):
    """[examples, *out, D]"""
    A, _, _ = _matrices(t, x.dtype)

    def block(batch, U):
        (x,), D = batch, U.shape[-1]
        M = jnp.einsum("atc,acd->atd", _of_places(t, x), U)
        return untiled(t, (A @ M.reshape(len(M), -1)).reshape(-1, len(x), *t.tiles, D))

    return mapped(block, _numbers(t, w), [x], _to_points(t, w))


def _backward(t: Tiling, kept, dy):
    x, w = kept
    (C, D), (A, G, B) = w.shape[-2:], _matrices(t, x.dtype)

    def block(batch, U):
        x, dy = batch
        dM = (A.T @ tiled(t, dy)).reshape(len(U), -1, D)
        dV = jnp.einsum("atd,acd->atc", dM, U).reshape(len(U), -1)
        dx = overlapped(t, (B.T @ dV).reshape(-1, len(x), *t.tiles, C))
        # XLA is slow at products of this kind, and fast if one side is transposed before.
        V = separate(jnp.swapaxes(_of_places(t, x), 1, 2))
        return jnp.einsum("act,atd->acd", V, dM), dx

    dU, dx = summed(block, _numbers(t, w), [x, dy], _to_points(t, w))
    return dx, (G.T @ dU.reshape(len(dU), -1)).reshape(w.shape)


convolved.defvjp(lambda t, x, w: (convolved(t, x, w), (x, w)), _backward)


def _numbers(t: Tiling, w) -> int:
    """Of an example, in what a block computes."""
    return math.prod(t.tiles) * math.prod(t.points) * sum(w.shape[-2:])


def _matrices(t: Tiling, dtype):
    return [jnp.asarray(m, dtype) for m in matrices(t.kernel, t.tile)]


def _to_points(t: Tiling, w):
    """[points, C, D]"""
    G = _matrices(t, w.dtype)[1]
    return (G @ w.reshape(G.shape[1], -1)).reshape(-1, *w.shape[-2:])


def _of_places(t: Tiling, x):
    """The values at the points of each tile's places: [points, examples * tiles, C]."""
    B, (examples, *places, C) = _matrices(t, x.dtype)[2], x.shape
    dims = len(places)
    reach = [-(-a // m) for a, m in zip(t.points, t.tile, strict=True)]
    counts = [n + r - 1 for n, r in zip(t.tiles, reach, strict=True)]
    apart = [n for pair in zip(counts, t.tile, strict=True) for n in pair]
    more = [n * m - p for n, m, p in zip(counts, t.tile, places, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((0, n, 0) for n in more), (0, 0, 0)])
    order = [*range(2, 2 * dims + 1, 2), 0, *range(1, 2 * dims, 2), 2 * dims + 1]
    x = separate(x.reshape(examples, *apart, C).transpose(order))
    for d, (m, a, n) in enumerate(zip(t.tile, t.points, t.tiles, strict=True)):
        shifted = [
            lax.slice_in_dim(
                lax.slice_in_dim(x, s, s + n, axis=dims + 1 + d), 0, min(m, a - s * m), axis=d
            )
            for s in range(reach[d])
        ]
        x = separate(lax.concatenate(shifted, d))
    return (B @ x.reshape(len(B), -1)).reshape(len(B), -1, C)


def separate(x):
    """So that XLA does not mix the computation of x with what follows: its copies are faster."""
    return lax.optimization_barrier(x)


def untiled(t: Tiling, y):
    """[results of a tile, examples, *tiles, D] -> [examples, *out, D]"""
    dims, examples, D = len(t.tile), y.shape[1], y.shape[-1]
    y = y.reshape(*t.tile, *y.shape[1:])
    order = [dims, *(i for d in range(dims) for i in (dims + 1 + d, d)), 2 * dims + 1]
    y = y.transpose(order).reshape(examples, *t.whole, D)
    return lax.slice(y, (0,) * y.ndim, (examples, *t.out, D))


def tiled(t: Tiling, dy):
    """The transpose of `untiled`: [results of a tile, examples * tiles * D]."""
    dims, (examples, *_, D) = len(t.tile), dy.shape
    more = [n - o for n, o in zip(t.whole, t.out, strict=True)]
    dy = lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), *((0, n, 0) for n in more), (0, 0, 0)])
    apart = [n for pair in zip(t.tiles, t.tile, strict=True) for n in pair]
    dy = dy.reshape(examples, *apart, D)
    order = [*range(2, 2 * dims + 1, 2), 0, *range(1, 2 * dims, 2), 2 * dims + 1]
    return dy.transpose(order).reshape(math.prod(t.tile), -1)


def overlapped(t: Tiling, parts):
    """[places of a tile, examples, *tiles, C] -> [examples, *places of x, C], where the places that
    several tiles have are added up."""
    dims, (examples, C) = len(t.tile), (parts.shape[1], parts.shape[-1])
    parts = parts.reshape(*t.points, *parts.shape[1:])
    counts = list(t.tiles)
    for d, (m, a) in enumerate(zip(t.tile, t.points, strict=True)):
        reach = -(-a // m)  # tiles that a tile's places reach into
        shifted = []
        for s in range(reach):
            part = lax.slice_in_dim(parts, s * m, min((s + 1) * m, a), axis=d)
            pads = [(0, 0, 0)] * parts.ndim
            pads[d] = (0, m - part.shape[d], 0)
            pads[dims + 1 + d] = (s, reach - 1 - s, 0)
            shifted.append(lax.pad(part, jnp.zeros((), parts.dtype), pads))
        parts = sum(shifted[1:], shifted[0])
        counts[d] += reach - 1
    order = [dims, *(i for d in range(dims) for i in (dims + 1 + d, d)), 2 * dims + 1]
    whole = [n * m for n, m in zip(counts, t.tile, strict=True)]
    x = parts.transpose(order).reshape(examples, *whole, C)
    places = [o + r - 1 for o, r in zip(t.out, t.kernel, strict=True)]
    return lax.slice(x, (0,) * x.ndim, (examples, *places, C))
