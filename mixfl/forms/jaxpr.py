"""A loss as a list of operations, from which functions can be cut out.

The operations show how the loss uses each parameter. So the user need not mark first layers
(first_layers.py) or tables that are only looked up (lookups.py).
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from mixfl.trees import named_leaves


class Traced:
    """A loss as a list of operations."""

    def __init__(self, loss, x, batch):
        closed = inlined(jax.make_jaxpr(loss)(x, batch))
        self.jaxpr: Jaxpr = closed.jaxpr
        self.consts = closed.consts
        names = list(named_leaves(x))
        self.params = dict(zip(names, self.jaxpr.invars, strict=False))
        self.data = dict(zip(sorted(batch), self.jaxpr.invars[len(names) :], strict=True))

    @functools.cached_property
    def moving(self) -> set:
        """The variables that depend on the parameters."""
        dependent = set(self.params.values())
        for eqn in self.jaxpr.eqns:
            if any(v in dependent for v in variables(eqn.invars)):
                dependent.update(eqn.outvars)
        return dependent

    def users(self, variable) -> list:
        """The operations that use a variable; one that uses it twice is listed twice."""
        return [e for e in self.jaxpr.eqns for v in variables(e.invars) if v is variable]

    def function(self, inputs: Sequence, outputs: Sequence) -> Callable:
        """A function from the variables `inputs` to `outputs`, which must need nothing else."""
        jaxpr = self.jaxpr.replace(
            invars=list(inputs), outvars=list(outputs), eqns=self._needed(inputs, outputs)[0],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )  # fmt: skip
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, self.consts))

    def reads(self, inputs: Sequence, outputs: Sequence) -> set:
        """The variables that computing `outputs` from `inputs` reads."""
        return self._needed(inputs, outputs)[1]

    def _needed(self, inputs, outputs):
        given, needed, eqns = set(inputs), set(variables(outputs)), []
        for eqn in reversed(self.jaxpr.eqns):
            if any(v in needed and v not in given for v in eqn.outvars):
                eqns.append(eqn)
                needed.update(variables(eqn.invars))
        return eqns[::-1], needed


def variables(atoms) -> list:
    return [v for v in atoms if not isinstance(v, Literal)]


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replaces calls of jitted functions by the operations in them."""

    def evaluate(jaxpr, consts, *args):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(v):
            return v.val if isinstance(v, Literal) else values[v]

        for eqn in jaxpr.eqns:
            given = [read(v) for v in eqn.invars]
            if eqn.primitive.name == "jit":
                results = evaluate(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, *given)
            else:
                params = eqn.primitive.get_bind_params(eqn.params)
                results = eqn.primitive.bind(*given, **params)
                results = results if eqn.primitive.multiple_results else [results]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    if not any(eqn.primitive.name == "jit" for eqn in closed.jaxpr.eqns):
        return closed
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, *args))(*shapes)
