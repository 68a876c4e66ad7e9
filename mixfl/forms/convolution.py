"""Convolutions as products of patches with the kernel.

XLA's own convolutions are slow inside loops on a CPU, and a round is a loop over clients and steps.
A matrix product is fast anywhere. So a convolution copies the patches that its kernel sees into the
rows of a matrix, and multiplies that by the kernel. Its two gradients are products of the same
kind. All three go through a batch in blocks whose patches stay in the cache.

`convolution` takes what lax.conv_general_dilated takes: strides, padding, dilations, groups, any
layout and number of dimensions. Inside, x is [examples, *places, C] and w is [offsets, C, D].
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mixfl.forms import winograd
from mixfl.forms.blocks import mapped, summed

PATCH = 2**12  # offsets of a kernel; larger kernels are left to XLA
WRITTEN_OUT = 64  # offsets of a depthwise kernel, at most


class Geometry(NamedTuple):
    """Which places a kernel sees: out place o and offset k see the place o * stride + k."""

    places: tuple[int, ...]  # of x
    out: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """The places from the first to the last one that an offset sees."""
        return tuple((o - 1) * s + 1 for o, s in zip(self.out, self.stride, strict=True))


# The three products


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered(g: Geometry, x, w):
    """y[o] = sum over k of x[o stride + k] w[k]: a convolution."""

    def block(batch, w):
        (x,), D = batch, w.shape[-1]
        return (patches(g, x) @ w.reshape(-1, D)).reshape(len(x), *g.out, D)

    return mapped(block, numbers(g, w), [x], w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(g: Geometry, y, w):
    """x[o stride + k] = sum over o, k of y[o] w[k]': a transposed convolution."""

    def block(batch, w):
        (y,), (K, C, D) = batch, w.shape
        parts = (y.reshape(-1, D) @ w.reshape(-1, D).T).reshape(len(y), *g.out, K * C)
        return added(g, parts, C)

    return mapped(block, numbers(g, w), [y], w)


def outer(g: Geometry, x, y, like):
    """w[k] = sum over o of x[o stride + k]' y[o]."""
    K, C, D = like.shape

    def block(batch):
        x, y = batch
        return y.reshape(-1, D).T @ patches(g, x), None  # this way round is faster

    total, _ = summed(block, numbers(g, like), [x, y])
    return total.T.reshape(K, C, D).astype(like.dtype)


def numbers(g: Geometry, w) -> int:
    """In the patches of an example. With one offset, there is nothing to keep in the cache."""
    return 0 if len(g.offsets) == 1 else math.prod(g.out) * len(g.offsets) * w.shape[1]


gathered.defvjp(
    lambda g, x, w: (gathered(g, x, w), (x, w)),
    lambda g, kept, dy: (spread(g, dy, kept[1]), outer(g, kept[0], dy, kept[1])),
)
spread.defvjp(
    lambda g, y, w: (spread(g, y, w), (y, w)),
    lambda g, kept, dx: (gathered(g, dx, kept[1]), outer(g, dx, *kept)),
)


# With stride 1, one copy of dy's patches serves both gradients


Pads = tuple[tuple[int, int], ...]  # of each dimension, before and after


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def unit(g: Geometry, pads: Pads, x, w):
    """`gathered` with stride 1, from x without its padding."""
    return gathered(g, zero_padded(x, pads), w)


def _unit_backward(g: Geometry, pads: Pads, kept, dy):
    """dx[p] = sum over k of dy[p + low - k] w[k]', and w[k] = sum over p of x[p]' dy[p + low - k]:
    both of the patches of dy, with the offsets in the reverse order."""
    x, w = kept
    (K, C, D), last = w.shape, g.offsets[-1]
    around = tuple((n - low, n - high) for n, (low, high) in zip(last, pads, strict=True))
    dy = zero_padded(dy, around)
    back = Geometry(dy.shape[1:-1], x.shape[1:-1], g.stride, g.offsets)

    def block(batch, w):
        x, dy = batch
        seen_by = patches(back, dy)
        dw = x.reshape(-1, C).T @ seen_by
        return dw, (seen_by @ w.reshape(K * D, C)).reshape(x.shape)

    turned = jnp.swapaxes(jnp.flip(w, 0), 1, 2)
    dw, dx = summed(block, numbers(back, turned), [x, dy], turned)
    return dx, jnp.flip(jnp.swapaxes(dw.reshape(C, K, D), 0, 1), 0).astype(w.dtype)


unit.defvjp(lambda g, pads, x, w: (unit(g, pads, x, w), (x, w)), _unit_backward)


def zero_padded(x, pads: Pads):
    if not any(map(any, pads)):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*p, 0) for p in pads), (0, 0, 0)])


def patches(g: Geometry, x):
    """[examples * out places, offsets * C]"""
    C = x.shape[-1]
    if len(g.offsets) == 1:
        return seen(g, x, np.array(g.offsets[0])).reshape(-1, C)

    def copy(copied, k_offset):
        k, offset = k_offset
        return lax.dynamic_update_slice_in_dim(copied, seen(g, x, offset), k * C, -1), None

    K = len(g.offsets)
    copied = jnp.zeros((len(x), *g.out, K * C), x.dtype)
    # A loop compiles in a tenth of the time of a concatenation, and is as fast.
    copied = lax.scan(copy, copied, (np.arange(K), np.array(g.offsets)))[0]
    return copied.reshape(-1, K * C)


def seen(g: Geometry, x, offset):
    """What an offset of the kernel sees: [examples, *out, C]."""
    sizes = (len(x), *g.extent, x.shape[-1])
    part = lax.dynamic_slice(x, (0, *offset, 0), sizes)
    return lax.slice(part, (0,) * x.ndim, sizes, (1, *g.stride, 1))


def added(g: Geometry, parts, C: int):
    """Adds [examples, *out, offsets * C] where the offsets see x: the transpose of `patches`."""
    total = jnp.zeros((len(parts), *g.places, C), parts.dtype)
    apart = [(0, 0, 0), *((0, 0, s - 1) for s in g.stride), (0, 0, 0)]

    def add(total, k_offset):
        k, offset = k_offset
        part = lax.dynamic_slice_in_dim(parts, k * C, C, -1)
        part = lax.pad(part, jnp.zeros((), parts.dtype), apart)
        start = (0, *offset, 0)
        part += lax.dynamic_slice(total, start, part.shape)
        return lax.dynamic_update_slice(total, part, start), None

    return lax.scan(add, total, (np.arange(len(g.offsets)), np.array(g.offsets)))[0]


# lax.conv_general_dilated


def refused(lhs, rhs, p: dict[str, Any]) -> str | None:
    """Why a convolution is left to XLA."""
    if p["batch_group_count"] != 1:
        return "batch groups"
    if lhs.dtype != rhs.dtype or not jnp.issubdtype(lhs.dtype, jnp.floating):
        return f"{lhs.dtype} times {rhs.dtype}"
    if any(d != 1 for d in p["lhs_dilation"]) and any(s != 1 for s in p["window_strides"]):
        return "strides of a transposed convolution"
    spatial = [rhs.shape[d] for d in p["dimension_numbers"].rhs_spec[2:]]
    if math.prod(spatial) > PATCH or 0 in (*lhs.shape, *rhs.shape):
        return f"a kernel of {spatial}"
    return None


def convolution(lhs, rhs, p: dict[str, Any]):
    """lax.conv_general_dilated with the parameters p of its operation."""
    layout = p["dimension_numbers"]
    out_dtype = p["preferred_element_type"] or lhs.dtype
    x = jnp.moveaxis(lhs, layout.lhs_spec, (0, lhs.ndim - 1, *range(1, lhs.ndim - 1)))
    w = jnp.moveaxis(rhs, layout.rhs_spec, (rhs.ndim - 1, rhs.ndim - 2, *range(rhs.ndim - 2)))
    groups = p["feature_group_count"]
    if groups == 1:
        y = dense(x, w, p)
    elif w.shape[-2] == 1:
        y = depthwise(x, w, groups, p)
    else:
        x_g = jnp.moveaxis(x.reshape(*x.shape[:-1], groups, -1), -2, 0)
        w_g = jnp.moveaxis(w.reshape(*w.shape[:-1], groups, -1), -2, 0)
        y = jnp.moveaxis(lax.map(lambda xw: dense(xw[0], xw[1], p), (x_g, w_g)), 0, -2)
        y = y.reshape(*y.shape[:-2], -1)
    y = jnp.moveaxis(y, (0, y.ndim - 1, *range(1, y.ndim - 1)), layout.out_spec)
    return y.astype(out_dtype)


def dense(x, w, p):
    """x [examples, *places, C], w [*kernel, C, D] -> [examples, *out, D]"""
    kernel, (C, D) = w.shape[:-2], w.shape[-2:]
    if all(d == 1 for d in p["lhs_dilation"]):
        inputs, (x, g) = x, padded(x, kernel, p)
        tiles = None
        if {*p["window_strides"], *p["rhs_dilation"]} == {1} and x.dtype.itemsize >= 4:
            tiles = winograd.tiling(kernel, g.out, C, D)
        if tiles:
            return winograd.convolved(tiles, x, w)
        if set(g.stride) == {1} and len(g.offsets) > 1 and D <= 2 * C:
            return unit(g, tuple(map(tuple, p["padding"])), inputs, w.reshape(-1, C, D))
        return gathered(g, x, w.reshape(-1, C, D))
    # A transposed convolution spreads each place of x over the kernel's places, backwards.
    places, apart = x.shape[1:-1], p["lhs_dilation"]
    offsets = every_offset(kernel, p["rhs_dilation"])
    whole = [(n - 1) * s + 1 + last for n, s, last in zip(places, apart, offsets[-1], strict=True)]
    g = Geometry(tuple(whole), places, tuple(apart), offsets)
    flipped = jnp.flip(w, range(len(kernel))).reshape(-1, C, D)
    y = spread(g, x, jnp.swapaxes(flipped, 1, 2))
    cut = [(low - last, high - last, 0)
           for (low, high), last in zip(p["padding"], offsets[-1], strict=True)]  # fmt: skip
    return lax.pad(y, jnp.zeros((), y.dtype), [(0, 0, 0), *cut, (0, 0, 0)])


def depthwise(x, w, groups: int, p):
    """Each channel has kernels of its own: w [*kernel, 1, channels * kernels of a channel]."""
    if any(d != 1 for d in p["lhs_dilation"]):
        pads = zip(p["padding"], p["lhs_dilation"], strict=True)
        x = lax.pad(
            x, jnp.zeros((), x.dtype), [(0, 0, 0), *((0, 0, d - 1) for _, d in pads), (0, 0, 0)]
        )
    x, g = padded(x, w.shape[:-2], p)
    y = channelwise(g, x, w.reshape(len(g.offsets), groups, -1))
    return y.reshape(*y.shape[:-2], -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def channelwise(g: Geometry, x, w):
    """x [examples, *places, G], w [offsets, G, m] -> [examples, *out, G, m]"""
    return _over_offsets(g, x, w)


def _over_offsets(g: Geometry, x, w):
    """The sum over the offsets of what each sees, times its weights."""

    def some(offsets, weights):
        return sum(seen(g, x, o)[..., None] * w for o, w in zip(offsets, weights, strict=True))

    parts = _parts(g.offsets)
    if len(parts) == 1:
        return some(parts[0], w)
    missing = (0, parts.shape[0] * parts.shape[1] - len(w))
    w = jnp.pad(w, (missing, *((0, 0),) * (w.ndim - 1))).reshape(*parts.shape[:2], *w.shape[1:])
    start = jnp.zeros((len(x), *g.out, *w.shape[2:]), x.dtype)
    return lax.scan(lambda y, part: (y + some(*part), None), start, (parts, w))[0]


def _parts(offsets) -> np.ndarray:
    """The offsets in parts of equal size, [parts, offsets of a part, dimensions], the last one
    filled up. A part is written out; XLA would take minutes to compile hundreds of them."""
    count = -(-len(offsets) // WRITTEN_OUT)
    size = -(-len(offsets) // count)
    filled = [*offsets, *offsets[-1:] * (count * size - len(offsets))]
    return np.array(filled).reshape(count, size, -1)


def _channelwise_backward(g: Geometry, kept, dy):
    """JAX would add up nine padded arrays for a kernel of 3 x 3, and XLA would compute all that dy
    comes from in each of them. Here dy is padded once."""
    (x, w), last, (G, m) = kept, g.offsets[-1], dy.shape[-2:]

    def some(offsets):
        sums = [jnp.sum(seen(g, x, o)[..., None] * dy, range(dy.ndim - 2)) for o in offsets]
        return jnp.stack(sums)

    parts = _parts(g.offsets)
    dw = some(parts[0]) if len(parts) == 1 else jnp.concatenate(lax.map(some, parts))[: len(w)]
    around = [
        (n, places - extent, stride - 1)
        for n, places, extent, stride in zip(last, g.places, g.extent, g.stride, strict=True)
    ]
    dy = dy.reshape(*dy.shape[:-2], G * m)
    dy = lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), *around, (0, 0, 0)])
    back = Geometry(dy.shape[1:-1], g.places, (1,) * len(last), g.offsets)
    dx = _over_offsets(back, dy, jnp.flip(w, 0).reshape(len(w), G * m, 1))
    return dx.reshape(*x.shape, m).sum(-1), dw


channelwise.defvjp(lambda g, x, w: (channelwise(g, x, w), (x, w)), _channelwise_backward)


def padded(x, kernel, p) -> tuple[Any, Geometry]:
    x = zero_padded(x, tuple(p["padding"]))
    offsets = every_offset(kernel, p["rhs_dilation"])
    stride = tuple(p["window_strides"])
    out = tuple(
        (n - 1 - last) // s + 1
        for n, s, last in zip(x.shape[1:-1], stride, offsets[-1], strict=True)
    )
    return x, Geometry(x.shape[1:-1], out, stride, offsets)


def every_offset(kernel, dilation) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(i * d for i, d in zip(index, dilation, strict=True)) for index in np.ndindex(*kernel)
    )
