"""Loops that multiply a few rows by a transposed weight in every step.

The way back through a recurrent layer is such a loop. XLA transposes the weight in each of its
steps, which takes as long as the product. Here it is transposed once, before the loop.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

ROWS = 64  # of a step's product; with more, the product takes longer than the transposition
STEPS = 4  # of a loop


def replacement(eqn: Any) -> Jaxpr | None:
    """The operations in place of such a loop; None: it stays."""
    if eqn.primitive.name != "scan" or eqn.params["length"] < STEPS:
        return None
    p = eqn.params
    body, consts = p["jaxpr"].jaxpr, p["num_consts"]
    if body.effects:  # of which some name arguments by their places
        return None
    weights = [i for i, w in enumerate(body.invars[:consts]) if _transposed_uses(body, w)]
    if not weights:
        return None
    inner = with_transposed(body, [body.invars[i] for i in weights], consts)
    params = {
        **p, "jaxpr": ClosedJaxpr(inner, p["jaxpr"].consts), "num_consts": consts + len(weights),
    }  # fmt: skip

    def loop(*given):
        turned = [given[i].T for i in weights]
        return eqn.primitive.bind(*given[:consts], *turned, *given[consts:], **params)

    with eqn.ctx.manager:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        return jax.make_jaxpr(loop)(*shapes).jaxpr


def _transposed_uses(body: Jaxpr, w: Any) -> list[Any]:
    """The products of rows [rows, N] with w [K, N]."""
    return [eqn for eqn in body.eqns if _multiplies_transposed(eqn, w)]


def _multiplies_transposed(eqn: Any, w: Any) -> bool:
    if eqn.primitive.name != "dot_general" or eqn.invars[1] is not w or eqn.invars[0] is w:
        return False
    x = eqn.invars[0].aval
    if w.aval.ndim != 2 or not jnp.issubdtype(w.aval.dtype, jnp.floating):
        return False
    contracted, batched = eqn.params["dimension_numbers"]
    if any(map(len, batched)) or tuple(map(tuple, contracted)) != ((x.ndim - 1,), (1,)):
        return False
    return math.prod(x.shape[:-1]) <= ROWS


def with_transposed(body: Jaxpr, weights: list[Any], at: int) -> Jaxpr:
    """The body of a loop that takes these weights transposed too, as its arguments from `at`."""
    shapes = [jax.ShapeDtypeStruct(w.aval.shape[::-1], w.aval.dtype) for w in weights]
    turned = jax.make_jaxpr(lambda *a: a)(*shapes).jaxpr.invars  # new variables
    eqns = []
    for eqn in body.eqns:
        for w, new in zip(weights, turned, strict=True):
            if _multiplies_transposed(eqn, w):
                (x_dims, _), batched = eqn.params["dimension_numbers"]
                numbers = (x_dims, (0,)), batched
                params = {**eqn.params, "dimension_numbers": numbers}
                eqn = eqn.replace(invars=[eqn.invars[0], new], params=params)
        eqns.append(eqn)
    return body.replace(
        invars=[*body.invars[:at], *turned, *body.invars[at:]], eqns=eqns,
        debug_info=body.debug_info.with_unknown_names(),
    )  # fmt: skip
