"""Loops of unknown length with a limit, for trials on numbers that are made up: on these, a loss
that iterates until something converges might never end."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun

from mixfl.engine.dispatch import is_loop, still_active
from mixfl.forms.rewriting import rewritten_inside

MOST = 100  # iterations


def bounded(eqn: Any) -> Any:
    """An operation whose inner loops, other than mixfl's own, have a limit."""
    return rewritten_inside(eqn, (_limited,))


def _limited(eqn: Any) -> Jaxpr | None:
    if eqn.primitive.name != "while" or is_loop(eqn):
        return None
    p = eqn.params
    of_test, consts = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    test, body = jaxpr_as_fun(p["cond_jaxpr"]), jaxpr_as_fun(p["body_jaxpr"])

    def run(*given):
        def active(carry):
            return test(*given[:of_test], *carry)[0]

        def going(counted):
            return (counted[0] < MOST) & jnp.any(active(counted[1]))

        def step(counted):
            i, carry = counted
            return i + 1, still_active(active(carry), body(*given[of_test:consts], *carry), carry)

        return jax.lax.while_loop(going, step, (jnp.int32(0), list(given[consts:])))[1]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(run)(*shapes).jaxpr
