"""Max pooling with a fast gradient.

XLA finds the place of each window's maximum again on the way back, one number at a time. Here a
window's offsets are compared with its maximum, and the first that equals it gets the gradient, as
with lax.reduce_window.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WINDOW = 64  # places of a window; larger ones are left to XLA


def max_pooling(p: dict[str, Any], x):
    """lax.reduce_window_max with the parameters p of its operation. None: left to XLA."""
    window, dilation = tuple(p["window_dimensions"]), tuple(p["window_dilation"])
    plain = all(d == 1 for d in p["base_dilation"]) and jnp.issubdtype(x.dtype, jnp.floating)
    if not plain or np.prod(window) > WINDOW or 0 in x.shape:
        return None
    pads = [(low, high, 0) for low, high in p["padding"]]
    if any(low or high for low, high, _ in pads):
        x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), pads)
    offsets = tuple(
        tuple(i * d for i, d in zip(index, dilation, strict=True)) for index in np.ndindex(*window)
    )
    return largest(offsets, tuple(p["window_strides"]), x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def largest(offsets, strides, x):
    parts = seen(offsets, strides, x)
    y = parts[0]
    for part in parts[1:]:
        y = jnp.maximum(y, part)
    return y


def seen(offsets, strides, x) -> list:
    """What each offset of the window sees: arrays of the result's shape."""
    last = offsets[-1]
    extents = [(n - 1 - at) // s * s + 1 for n, at, s in zip(x.shape, last, strides, strict=True)]
    return [
        lax.slice(x, offset, [i + n for i, n in zip(offset, extents, strict=True)], strides)
        for offset in offsets
    ]


def _backward(offsets, strides, kept, dy):
    x, y = kept
    zero, dx, taken = jnp.zeros((), dy.dtype), None, None
    for offset, part in zip(offsets, seen(offsets, strides, x), strict=True):
        hit = part == y
        first = hit if taken is None else hit & ~taken
        taken = hit if taken is None else hit | taken
        pads = [
            (at, n - at - (k - 1) * s - 1, s - 1)
            for at, n, k, s in zip(offset, x.shape, y.shape, strides, strict=True)
        ]
        share = lax.pad(jnp.where(first, dy, 0), zero, pads)
        dx = share if dx is None else dx + share
    return (dx,)


def _forward(offsets, strides, x):
    y = largest(offsets, strides, x)
    return y, (x, y)


largest.defvjp(_forward, _backward)
