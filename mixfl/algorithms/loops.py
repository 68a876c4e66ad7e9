"""The loops of a round, over clients, steps and chunks, and functions that are traced once.

The loops have a name, by which an engine finds them in a traced round, among the loops of users'
losses.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxpr_as_fun, jaxprs_in_params

LOOP = "mixfl_loop"


class Once(NamedTuple):
    call: Callable  # the function, traced once however often it is called
    shapes: Any  # of its result
    operations: int  # with those in its own loops and calls


def once_traced(function, *arguments) -> Once:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat, tree = jaxpr_as_fun(closed), jax.tree.structure(shapes)

    def call(*arguments):
        return tree.unflatten(flat(*jax.tree.leaves(arguments)))

    return Once(call, shapes, operations(closed.jaxpr))


def operations(jaxpr: Jaxpr) -> int:
    """With those in loops, branches and calls, each once."""
    inner = (j for eqn in jaxpr.eqns for j in jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(map(operations, inner))


def scan(step, carry, xs):
    """jax.lax.scan"""
    with jax.named_scope(LOOP):
        return jax.lax.scan(step, carry, xs)


def scan_first(n, step, carry, xs, idle=None):
    """`scan` over only the first n of xs, at the cost of n: it ends where padding begins. The
    outputs of the others are `idle`. (n may be traced, so reverse-mode differentiation can't go
    through this loop.)"""
    count = len(jax.tree.leaves(xs)[0])
    outputs = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), idle)

    def one(i, carried):
        carry, outputs = carried
        x = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), xs)
        carry, output = step(carry, x)
        put = lambda all, a: jax.lax.dynamic_update_index_in_dim(all, a, i, 0)  # noqa: E731
        return carry, jax.tree.map(put, outputs, output)

    with jax.named_scope(LOOP):
        return jax.lax.fori_loop(0, n, one, (carry, outputs))
