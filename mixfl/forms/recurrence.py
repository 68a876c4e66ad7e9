"""Loops in a loss whose weights' gradients are one product each, after the loop.

The derivative of a recurrent layer adds up the gradients of its weights step by step: a small
product and a pass over the whole matrix for each step of the sequence. Here the way back only
collects the gradients at the outputs of the products. The gradient of a weight is then one product
over all steps. Like convolution.py, this replaces operations in a loss. It is exact up to the order
of sums.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from mixfl.forms.jaxpr import evaluated, inlined, variables

ROWS = 64  # of a step's product; with more, its gradient is fast as it is
STEPS = 4  # of a loop; for fewer it makes no difference


class Use(NamedTuple):
    """A product of a constant weight in a loop's body."""

    eqn: Any
    weight: int  # place among the constants
    side: int  # of the product


def uses_in(p: dict[str, Any]) -> tuple[ClosedJaxpr, list[Use]]:
    """A loop's body, and the products whose weights' gradients can be computed after the loop."""
    body = inlined(p["jaxpr"])
    found: list[Use] = []
    if p["length"] < STEPS:
        return body, found
    weights = body.jaxpr.invars[: p["num_consts"]]
    fixed = {*weights, *body.jaxpr.constvars}
    for place, w in enumerate(weights):
        users = [e for e in body.jaxpr.eqns if w in variables(e.invars)]
        plain = all(_is_product(e, w, fixed) for e in users)
        if users and plain and w not in variables(body.jaxpr.outvars):
            found += [Use(e, place, int(e.invars[1] is w)) for e in users]
    return body, found


def _is_product(eqn, w, fixed: set) -> bool:
    """Of the weight and a few rows that change from step to step."""
    if eqn.primitive.name != "dot_general" or eqn.invars[0] is eqn.invars[1]:
        return False
    (contracted, batched), side = eqn.params["dimension_numbers"], int(eqn.invars[1] is w)
    x = eqn.invars[1 - side]
    if isinstance(x, Literal) or x in fixed or any(map(len, batched)):
        return False
    floats = {w.aval.dtype, x.aval.dtype, eqn.outvars[0].aval.dtype}
    rows = x.aval.size // math.prod(x.aval.shape[d] for d in contracted[1 - side])
    return len(floats) == 1 and jnp.issubdtype(w.aval.dtype, jnp.floating) and rows <= ROWS


def collected(p: dict[str, Any], *given, replace):
    """A `scan` with parameters p, or None: left as it is."""
    body, uses = uses_in(p)
    if not uses:
        return None
    consts, carried = p["num_consts"], p["num_consts"] + p["num_carry"]
    options = {"length": p["length"], "reverse": p["reverse"], "unroll": p["unroll"]}
    place = {id(use.eqn): i for i, use in enumerate(uses)}

    def loop(given, probes):
        """The loop's results, and the rows of each product. A probe is added to a product: its
        gradient is that at the product's output."""

        def step(carry, xs_probes):
            xs, probes = xs_probes
            rows: list[Any] = [None] * len(uses)

            def product(eqn, operands):
                i = place.get(id(eqn))
                if i is None:
                    return None
                side = uses[i].side
                rows[i] = operands[1 - side]
                operands[side] = lax.stop_gradient(operands[side])
                return eqn.primitive.bind(*operands, **eqn.params) + probes[i]

            results = evaluated(body, [*given[:consts], *carry, *xs], replace, product)
            return results[: p["num_carry"]], (results[p["num_carry"] :], rows)

        last, (stacked, rows) = lax.scan(
            step, list(given[consts:carried]), (list(given[carried:]), probes), **options
        )
        return [*last, *stacked], rows

    def zeros():
        outputs = [u.eqn.outvars[0].aval for u in uses]
        return [jnp.zeros((p["length"], *z.shape), z.dtype) for z in outputs]

    @jax.custom_vjp
    def run(*given):
        return loop(given, zeros())[0]

    def forward(*given):
        results, back, rows = jax.vjp(loop, given, zeros(), has_aux=True)
        return results, (back, rows, given[:consts])

    def backward(kept, d_results):
        back, rows, weights = kept
        d_given, d_probes = back(d_results)
        d_given = list(d_given)
        for use, x, dz in zip(uses, rows, d_probes, strict=True):
            d_given[use.weight] += _gradient(use, x, weights[use.weight], dz)
        return tuple(d_given)

    run.defvjp(forward, backward)
    return run(*given)


def _gradient(use: Use, x, w, dz):
    """Of the weight, from the rows x and the gradients dz at the products of all steps."""
    contracted, _ = use.eqn.params["dimension_numbers"]
    dims = [tuple(contracted[0]), tuple(contracted[1])]
    dims[1 - use.side] = tuple(d + 1 for d in dims[1 - use.side])  # behind the steps
    more = {**use.eqn.params, "dimension_numbers": (tuple(dims), ((), ()))}

    def all_steps(w):
        operands = (x, w) if use.side else (w, x)
        z = use.eqn.primitive.bind(*operands, **more)
        return z if use.side else jnp.moveaxis(z, w.ndim - len(dims[0]), 0)

    return jax.vjp(all_steps, w)[1](dz)[0]
