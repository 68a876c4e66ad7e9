"""Products that sum over rows: gradients of weights.

The gradient of a dense layer's weights is the product of its inputs [rows, K] and the gradients at
its outputs [rows, N]. JAX writes it as [N, K] and transposes it. If the rows have several axes
(texts and their characters), XLA then transposes all of the gradients first, and computes them
again to do so: in a deep network with residuals, from those of all later layers. A product with the
larger side first takes twice as long, too. Here the rows have one axis, and if they are many, the
smaller side comes first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal

ROWS = 256  # with so many, the product takes longer than transposing its result
OVER_ROWS = (((0,), (0,)), ((), ()))


def replacement(eqn: Any) -> Jaxpr | None:
    """The operations in place of such a product; None: it stays."""
    if not sums_rows(eqn):
        return None
    p = eqn.params
    axes = len(p["dimension_numbers"][0][0])

    def product(a, b):
        rows = math.prod(a.shape[:axes])
        shape = (*a.shape[axes:], *b.shape[axes:])
        a, b = a.reshape(rows, -1), b.reshape(rows, -1)
        swapped = rows >= ROWS and a.shape[1] > b.shape[1]
        sides, precision = (a, b), p["precision"]
        if swapped:
            sides = (b, a)
            precision = precision[::-1] if isinstance(precision, tuple) else precision
        z = lax.dot_general(*sides, OVER_ROWS, precision, p["preferred_element_type"])
        if rows >= ROWS:
            z = lax.optimization_barrier(z)  # XLA would turn it round again
        return (z.T if swapped else z).reshape(shape)

    with eqn.ctx.manager:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        return jax.make_jaxpr(product)(*shapes).jaxpr


def sums_rows(eqn: Any) -> bool:
    """Is it a product over the first axes of both sides that can be arranged better?"""
    if eqn.primitive.name != "dot_general" or any(isinstance(v, Literal) for v in eqn.invars):
        return False
    p, (a, b) = eqn.params, (v.aval for v in eqn.invars)
    contracted, batched = p["dimension_numbers"]
    axes = len(contracted[0])
    first = tuple(range(axes))
    if not axes or any(map(len, batched)) or tuple(map(tuple, contracted)) != (first, first):
        return False
    split = p["out_sharding"] is not None and any(p["out_sharding"].spec)
    if split or a.dtype != b.dtype or not jnp.issubdtype(a.dtype, jnp.floating):
        return False
    if axes in (a.ndim, b.ndim) or 0 in (*a.shape, *b.shape):
        return False  # not a product of two matrices
    rows = math.prod(a.shape[:axes])
    return axes > 1 or rows >= ROWS
