"""Products that sum over rows, arranged as fast matrix libraries like them.

The gradient of a dense layer's weights is such a product: of its inputs [rows, K] and the gradients
at its outputs [rows, N]. JAX writes it as [N, K] and transposes it. If the rows have several axes
(texts and their characters), XLA then transposes all of the gradients first, and computes them
again to do so: for a deep network with residuals, all of its layers. Its product with the larger
side first takes twice as long, too. Here the rows have one axis, and with many rows the smaller
side comes first. It is exact up to the order of sums.

This replaces operations in a traced round, so it serves every algorithm and loss.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

ROWS = 256  # with so many, the product takes longer than transposing its result
CONTRACTED = (((0,), (0,)), ((), ()))


def with_arranged_products(function: Callable) -> Callable:
    """A function of pytrees of arrays, with these products replaced."""

    @functools.wraps(function)
    def replaced(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        run = jaxpr_as_fun(ClosedJaxpr(arranged(closed.jaxpr), closed.consts))
        return jax.tree.unflatten(jax.tree.structure(shape), run(*jax.tree.leaves(args)))

    return replaced


def arranged(jaxpr: Jaxpr) -> Jaxpr:
    """The same operations, with these products replaced."""
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if sums_rows(eqn):
            eqns += _replacement(eqn)
        else:
            params = {name: _inside(value) for name, value in eqn.params.items()}
            changed = any(params[name] is not value for name, value in eqn.params.items())
            eqns.append(eqn.replace(params=params) if changed else eqn)
    same = len(eqns) == len(jaxpr.eqns) and all(map(lambda a, b: a is b, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _inside(value: Any) -> Any:
    """A parameter of an operation; operations in it are replaced too."""
    if isinstance(value, Jaxpr):
        return arranged(value)
    if isinstance(value, ClosedJaxpr):
        jaxpr = arranged(value.jaxpr)
        return value if jaxpr is value.jaxpr else ClosedJaxpr(jaxpr, value.consts)
    if isinstance(value, tuple) and any(isinstance(v, Jaxpr | ClosedJaxpr) for v in value):
        parts = tuple(map(_inside, value))
        return value if all(map(lambda a, b: a is b, parts, value)) else parts
    return value


def sums_rows(eqn: Any) -> bool:
    """Is it a product over the first axes of both sides, and can it be arranged better?"""
    if eqn.primitive.name != "dot_general" or any(isinstance(v, Literal) for v in eqn.invars):
        return False
    p, (a, b) = eqn.params, (v.aval for v in eqn.invars)
    contracted, batched = p["dimension_numbers"]
    axes = len(contracted[0])
    first = tuple(range(axes))
    if any(map(len, batched)) or tuple(map(tuple, contracted)) != (first, first) or not axes:
        return False
    split = p["out_sharding"] is not None and any(p["out_sharding"].spec)
    if split or a.dtype != b.dtype or not jnp.issubdtype(a.dtype, jnp.floating):
        return False
    if axes in (a.ndim, b.ndim):
        return False  # a sum of rows, not a product of two matrices
    return axes > 1 or math.prod(a.shape[:axes]) >= ROWS


def _replacement(eqn: Any) -> list[Any]:
    """The operations in place of a product."""
    p = eqn.params
    axes = len(p["dimension_numbers"][0][0])

    def product(a, b):
        rows = math.prod(a.shape[:axes])
        shape = (*a.shape[axes:], *b.shape[axes:])
        a, b = a.reshape(rows, -1), b.reshape(rows, -1)
        swapped = rows >= ROWS and a.shape[1] > b.shape[1]
        z = lax.dot_general(
            *((b, a) if swapped else (a, b)), CONTRACTED, p["precision"],
            p["preferred_element_type"],
        )  # fmt: skip
        if rows >= ROWS:
            z = lax.optimization_barrier(z)  # XLA would turn it round again
        return (z.T if swapped else z).reshape(shape)

    with eqn.ctx.manager:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        made = jax.make_jaxpr(product)(*shapes).jaxpr
    names = dict(zip(made.invars, eqn.invars, strict=True))
    names |= dict(zip(made.outvars, eqn.outvars, strict=True))

    def named(variables):
        return [v if isinstance(v, Literal) else names.get(v, v) for v in variables]

    return [
        e.replace(
            invars=named(e.invars), outvars=named(e.outvars), source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
        for e in made.eqns
    ]  # fmt: skip
