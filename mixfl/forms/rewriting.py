"""A traced function with some of its operations replaced, as fast libraries like them.

Unlike the forms of a loss (products.py), this goes through the operations of a whole round, with
the gradients in it. So it serves every algorithm and loss. What it replaces keeps shapes and
results, up to the order of sums.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from mixfl.forms import loop_weights, over_rows, two_sums

RULES = (over_rows.replacement, loop_weights.replacement, two_sums.replacement)


def with_fast_products(function: Callable) -> Callable:
    """The same function of pytrees of arrays."""

    @functools.wraps(function)
    def replaced(*args):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        run = jaxpr_as_fun(ClosedJaxpr(rewritten(closed.jaxpr), closed.consts))
        return jax.tree.unflatten(jax.tree.structure(shape), run(*jax.tree.leaves(args)))

    return replaced


def rewritten(jaxpr: Jaxpr) -> Jaxpr:
    return _Rewriting(RULES).jaxpr(jaxpr)


def rewritten_inside(eqn: Any, rules: Sequence[Callable]) -> Any:
    """An operation with operations in it replaced. A rule returns what takes an operation's place,
    or None."""
    return _Rewriting(rules).inside(eqn)


class _Rewriting:
    def __init__(self, rules: Sequence[Callable]) -> None:
        self.rules = rules
        self.done: dict[int, tuple[Jaxpr, Jaxpr]] = {}  # by id; what is used twice stays one

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in self.done:
            eqns = [e for eqn in jaxpr.eqns for e in self.eqn(eqn)]
            new = jaxpr if _same(eqns, jaxpr.eqns) else jaxpr.replace(eqns=eqns)
            self.done[id(jaxpr)] = jaxpr, new
        return self.done[id(jaxpr)][1]

    def eqn(self, eqn: Any) -> list[Any]:
        for rule in self.rules:
            if (made := rule(eqn)) is not None:
                eqns = renamed(made, eqn)
                return [e if e.primitive is not eqn.primitive else self.inside(e) for e in eqns]
        return [self.inside(eqn)]

    def inside(self, eqn: Any) -> Any:
        params = {name: self.parameter(value) for name, value in eqn.params.items()}
        changed = any(params[name] is not value for name, value in eqn.params.items())
        return eqn.replace(params=params) if changed else eqn

    def parameter(self, value: Any) -> Any:
        if isinstance(value, Jaxpr):
            return self.jaxpr(value)
        if isinstance(value, ClosedJaxpr):
            new = self.jaxpr(value.jaxpr)
            return value if new is value.jaxpr else ClosedJaxpr(new, value.consts)
        if isinstance(value, tuple) and any(isinstance(v, Jaxpr | ClosedJaxpr) for v in value):
            parts = tuple(map(self.parameter, value))
            return value if _same(parts, value) else parts
        return value


def _same(new: Sequence, old: Sequence) -> bool:
    return len(new) == len(old) and all(map(lambda a, b: a is b, new, old))


def renamed(made: Jaxpr, eqn: Any) -> list[Any]:
    """The operations of `made`, in place of an operation with the same inputs and outputs."""
    names: dict[Any, Any] = dict(zip(made.invars, eqn.invars, strict=True))
    names |= dict(zip(made.outvars, eqn.outvars, strict=True))

    def named(variables):
        return [v if isinstance(v, Literal) else names.get(v, v) for v in variables]

    return [
        e.replace(
            invars=named(e.invars), outvars=named(e.outvars),
            source_info=eqn.source_info, ctx=eqn.ctx,
        )
        for e in made.eqns
    ]  # fmt: skip
