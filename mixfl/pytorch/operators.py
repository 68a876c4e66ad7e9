"""Operators that torchax 0.0.13 lacks or gets wrong: poolings whose windows are unequal or have
gaps, and transposed convolutions with groups."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

aten = torch.ops.aten


def average_pooling(
    axes, x, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True,
    divisor_override=None,
):  # fmt: skip
    """The last window of an axis may reach beyond the padding: what is there does not count."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    kernel, pads = _each(kernel_size, axes), _each(padding, axes)
    steps = _each(stride or kernel, axes)
    windows, counts = [], []
    for size, k, step, pad in zip(x.shape[-axes:], kernel, steps, pads, strict=True):
        start = _starts(size, k, step, pad, ceil_mode)
        end = np.minimum(start + k, size + pad)
        if not count_include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, size)
        counts.append(end - start)
        windows.append((pad, max(0, start[-1] + k - size)))
    outer = [1] * (x.ndim - axes)
    sums = jax.lax.reduce_window(
        wide, np.zeros((), wide.dtype), jax.lax.add, (*outer, *kernel), (*outer, *steps),
        [*[(0, 0)] * len(outer), *windows],
    )  # fmt: skip
    count = math.prod(np.ix_(*counts)) if divisor_override is None else divisor_override
    return (sums / jnp.asarray(count, wide.dtype)).astype(x.dtype)


def max_pooling(
    axes, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=True
):  # fmt: skip
    """With gaps in the windows, if `dilation` says so."""
    from torchax.ops.jaten import max_pool

    kernel, gaps = _each(kernel_size, axes), _each(dilation, axes)
    steps, pads = _each(stride or kernel, axes), _each(padding, axes)
    if set(gaps) == {1}:
        return max_pool(x, kernel, steps, pads, gaps, ceil_mode, with_index=return_indices)
    windows = []
    for size, k, step, pad, d in zip(x.shape[-axes:], kernel, steps, pads, gaps, strict=True):
        start = _starts(size, (k - 1) * d + 1, step, pad, ceil_mode)
        places = start[:, None] + d * np.arange(k)
        windows.append((places.clip(0, size - 1), (places >= 0) & (places < size)))
    values, places = _largest(x, windows)
    return (values, places) if return_indices else values


def adaptive_max_pooling(x, output_size):
    sizes = x.shape[-len(output_size) :]
    if any(s % o for s, o in zip(sizes, output_size, strict=True)):
        return _largest(x, list(map(_adaptive, sizes, output_size)))
    return max_pooling(len(sizes), x, [s // o for s, o in zip(sizes, output_size, strict=True)])


def _largest(x, windows: list[tuple[np.ndarray, np.ndarray]]):
    """Of each window, and where it is. For each axis: the places [window, place] of all windows,
    and which of them are in it."""
    axes = len(windows)
    sizes, output_size = x.shape[-axes:], [len(table) for table, _ in windows]
    tables, inside = zip(*windows, strict=True)
    lead = x.ndim - axes
    for i, table in enumerate(tables):  # an axis becomes two: windows, and places in a window
        x = jnp.take(x, table, axis=lead + 2 * i)
    order = [*range(lead), *(lead + 2 * i for i in range(axes))]
    x = x.transpose(*order, *(lead + 2 * i + 1 for i in range(axes)))
    count = math.prod(table.shape[1] for table in tables)
    x = x.reshape(*x.shape[: lead + axes], count)
    known = np.all(np.broadcast_arrays(*_crossed(inside)), 0).reshape(*output_size, count)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    low = -jnp.inf if floating else jnp.iinfo(x.dtype).min
    at = jnp.argmax(jnp.where(known, x, jnp.asarray(low, x.dtype)), axis=-1, keepdims=True)
    # Where all are as low as that, the first one that is in the window.
    real = jnp.take_along_axis(jnp.broadcast_to(known, x.shape), at, -1)
    at = jnp.where(real, at, known.argmax(-1)[..., None])
    flat = np.ravel_multi_index(np.broadcast_arrays(*_crossed(tables)), sizes)
    places = jnp.broadcast_to(flat.reshape(*output_size, count), x.shape)
    chosen = jax.lax.broadcasted_iota(at.dtype, x.shape, x.ndim - 1) == at
    values = jnp.sum(jnp.where(chosen, x, 0), -1, dtype=x.dtype)
    return values, jnp.sum(jnp.where(chosen, places, 0), -1)


def convolution(
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
):  # fmt: skip
    """torchax takes the inputs of a transposed convolution's groups in another order."""
    from torchax.ops.jaten import _aten_convolution

    if transposed and groups > 1:
        inputs, *rest = weight.shape
        by_group = weight.reshape(groups, inputs // groups, *rest)
        weight = jnp.swapaxes(by_group, 0, 1).reshape(weight.shape)
    return _aten_convolution(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )


def _each(given: int | Sequence[int], axes: int) -> Sequence[int]:
    given = [given] if isinstance(given, int) else given
    return [*given] * axes if len(given) == 1 else given


def _starts(size: int, window: int, step: int, pad: int, ceil_mode: bool) -> np.ndarray:
    """Where windows start. With `ceil_mode`, the last one may end beyond the padding."""
    last = size + 2 * pad - window
    start = np.arange(0, last + step if ceil_mode else last + 1, step) - pad
    return start[start < size] if ceil_mode else start


def _adaptive(size: int, windows: int) -> tuple[np.ndarray, np.ndarray]:
    """The places of PyTorch's adaptive windows, which differ in length."""
    i = np.arange(windows)
    start, end = i * size // windows, -(-(i + 1) * size // windows)
    places = start[:, None] + np.arange(np.max(end - start))
    return np.minimum(places, size - 1), places < end[:, None]


def _crossed(tables: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Tables of [windows, places] of each axis, so that they broadcast to all windows, then all
    places."""
    axes = len(tables)

    def shaped(i, table):
        shape = np.ones(2 * axes, int)
        shape[[i, axes + i]] = table.shape
        return table.reshape(shape)

    return [shaped(i, table) for i, table in enumerate(tables)]


OPERATORS: dict[Any, Callable] = {
    aten.avg_pool1d: functools.partial(average_pooling, 1),
    aten.avg_pool2d: functools.partial(average_pooling, 2),
    aten.avg_pool3d: functools.partial(average_pooling, 3),
    aten.adaptive_max_pool2d: adaptive_max_pooling,
    aten.adaptive_max_pool3d: adaptive_max_pooling,
    torch.nn.functional.max_pool2d: functools.partial(max_pooling, 2, return_indices=False),
    aten.max_pool2d_with_indices: functools.partial(max_pooling, 2),
    aten.max_pool3d_with_indices: functools.partial(max_pooling, 3),
    aten.convolution: convolution,
    aten.mT: lambda x: jnp.swapaxes(x, -1, -2),
}
