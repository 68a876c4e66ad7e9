"""A loss as a list of operations, from which functions can be cut out.

The operations show how the loss uses each parameter. So the user need not mark first layers
(first_layers.py) or tables that are only looked up (lookups.py).
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params

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
    if not any(eqn.primitive.name == "jit" for eqn in closed.jaxpr.eqns):
        return closed
    return retraced(closed, {})


def retraced(closed: ClosedJaxpr, replace: Mapping[str, Callable]) -> ClosedJaxpr:
    """The same operations, with calls of jitted functions inlined and some operations replaced:
    see `evaluated`."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]

    def function(*args):
        return evaluated(closed, args, replace)

    return jax.make_jaxpr(function)(*shapes)


def evaluated(
    closed: ClosedJaxpr, args: Sequence, replace: Mapping[str, Callable],
    own: Callable[[Any, list], Any] = lambda eqn, given: None,
) -> list:  # fmt: skip
    """The results of a list of operations. `replace` has, by the name of an operation, a function
    that takes its parameters and its arguments. It may return None, and leaves the operation as it
    is. Operations in loops, branches and checkpoints are replaced too. `own` is asked first, with
    an operation of this list and its arguments."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def read(v):
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        given, name = [read(v) for v in eqn.invars], eqn.primitive.name
        results = own(eqn, given)
        if results is None and name == "jit":
            results = evaluated(eqn.params["jaxpr"], given, replace)
        elif results is None and name in replace:
            results = replace[name](eqn.params, *given)
        if results is None and name in INSIDE and uses(eqn, replace):
            results = INSIDE[name](eqn.params, given, replace)
        if results is None:
            params = eqn.primitive.get_bind_params(eqn.params)
            results = eqn.primitive.bind(*given, **params)
        results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def uses(eqn: Any, names: Collection[str]) -> bool:
    """Is one of these operations inside of an operation that has operations of its own?"""
    return any(name in names for name in inner_names(eqn))


def inner_names(eqn: Any) -> Iterator[str]:
    """The names of all operations inside of an operation."""
    for jaxpr in jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield inner.primitive.name
            yield from inner_names(inner)


def _scan(p, given, replace):
    consts, carried = p["num_consts"], p["num_consts"] + p["num_carry"]

    def body(carry, xs):
        results = evaluated(p["jaxpr"], [*given[:consts], *carry, *xs], replace)
        return results[: p["num_carry"]], results[p["num_carry"] :]

    last, stacked = jax.lax.scan(
        body, given[consts:carried], given[carried:],
        length=p["length"], reverse=p["reverse"], unroll=p["unroll"],
    )  # fmt: skip
    return [*last, *stacked]


def _cond(p, given, replace):
    branches = [
        lambda *args, branch=branch: evaluated(branch, args, replace) for branch in p["branches"]
    ]
    return jax.lax.switch(given[0], branches, *given[1:])


def _checkpoint(p, given, replace):
    def function(*args):
        return evaluated(ClosedJaxpr(p["jaxpr"], ()), args, replace)

    return jax.checkpoint(function, prevent_cse=p["prevent_cse"], policy=p["policy"])(*given)


INSIDE = {"scan": _scan, "cond": _cond, "checkpoint": _checkpoint, "remat2": _checkpoint}
