"""Loops over the blocks of a batch: what a block needs stays in the cache.

A batch at the server is split over devices. There, each device goes through the blocks of its own
part. (XLA would not find that out: a loop over the batch looks like one over all devices.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

BLOCK = 2**19  # numbers in a block


def block_of(examples: int, each: int) -> int:
    """The most examples, of so many numbers each, that a block holds. It divides their number."""
    return max(
        n for n in range(1, examples + 1) if examples % n == 0 and n * each <= max(BLOCK, each)
    )


def mapped(function: Callable, each: int, batch: Sequence, *fixed: Any):
    """function(block of the batch, *fixed), for all examples."""

    def own(batch, fixed):
        n = block_of(len(batch[0]), each)
        if n == len(batch[0]):
            return function(batch, *fixed)
        results = lax.map(lambda block: function(block, *fixed), _blocks(batch, n))
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)

    axis = _axis(batch)
    if axis is None:
        return own(batch, fixed)
    return jax.shard_map(own, in_specs=(P(axis), P()), out_specs=P(axis), check_vma=False)(
        batch, fixed
    )


def summed(function: Callable, each: int, batch: Sequence, *fixed: Any):
    """function(block of the batch, *fixed) has two results: the first is summed over the blocks,
    the second is there for all examples (or None)."""

    def own(batch, fixed):
        n = block_of(len(batch[0]), each)
        if n == len(batch[0]):
            return function(batch, *fixed)
        blocks = _blocks(batch, n)
        shape = jax.eval_shape(lambda b: function(b, *fixed)[0], [b[0] for b in blocks])

        def add(total, block):
            more, result = function(block, *fixed)
            return total + more, result

        total, results = lax.scan(add, jnp.zeros(shape.shape, shape.dtype), blocks)
        return total, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), results)

    axis = _axis(batch)
    if axis is None:
        return own(batch, fixed)

    def part(batch, fixed):
        total, results = own(batch, fixed)
        return lax.psum(total, axis), results

    return jax.shard_map(part, in_specs=(P(axis), P()), out_specs=(P(), P(axis)), check_vma=False)(
        batch, fixed
    )


def _blocks(batch: Sequence, n: int) -> list:
    return [a.reshape(-1, n, *a.shape[1:]) for a in batch]


def _axis(batch: Sequence) -> str | None:
    """The axis of the devices that share the batch; None where each has its own batch."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    shared = [
        (name, size)
        for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
        if kind == AxisType.Auto and size > 1
    ]
    if len(shared) != 1 or len(batch[0]) % shared[0][1]:
        return None
    return shared[0][0]
