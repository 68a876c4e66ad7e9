"""Sums over outer and inner axes, with an axis between them that stays.

GroupNorm with the channels last has such sums: over the places of an image, and over the few
channels of a group. XLA adds the numbers of a short inner axis one by one, which takes some ten to
thirty times as long as adding rows. Here the outer axes are summed first, in rows, and then the
inner ones.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, Literal

INNER = 64  # numbers that are next to each other; with more, XLA is fast as it is


def replacement(eqn: Any) -> Jaxpr | None:
    """The operations in place of such a sum; None: it stays."""
    if eqn.primitive.name != "reduce_sum" or isinstance(eqn.invars[0], Literal):
        return None
    x, axes = eqn.invars[0].aval, eqn.params["axes"]
    kept = [d for d in range(x.ndim) if d not in axes]
    if not kept or 0 in x.shape:
        return None
    outer = tuple(d for d in axes if d < kept[-1])
    inner = tuple(d for d in axes if d > kept[-1])
    short = 1 < math.prod(x.shape[d] for d in inner) <= INNER
    if not short or math.prod(x.shape[d] for d in outer) == 1:
        return None

    def total(x):
        rows = lax.optimization_barrier(lax.reduce_sum(x, outer))  # XLA would make one sum of both
        return lax.reduce_sum(rows, tuple(d - len(outer) for d in inner))

    with eqn.ctx.manager:
        return jax.make_jaxpr(total)(jax.ShapeDtypeStruct(x.shape, x.dtype)).jaxpr
