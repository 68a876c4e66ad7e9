"""The model before the first round, from the seed.

`problem.init`, called as it is, compiles each of its operations by itself: dozens of programs,
seconds for a model of many layers. Here it is one program. Barriers between the operations keep XLA
from merging them, which would change last bits; and nothing is gained from optimizing what runs
once.
"""

from collections.abc import Callable
from typing import Any

import jax

from mixfl.engine.captured import captured
from mixfl.forms.jaxpr import ClosedJaxpr, evaluated, inner_names
from mixfl.problem import Params, Problem
from mixfl.trees import tree_bytes

FEW = 8  # operations, below which one program is no gain
LARGE_CONSTANTS = 1 << 20  # bytes; of models that are read or copied, not drawn
SUMS = ("reduce", "dot", "conv_", "cum")  # whose order depends on the program around them
UNOPTIMIZED = {"xla_backend_optimization_level": 1}


def first_model(problem: Problem, seed: int) -> Params:
    """What `problem.init` returns for the seed's key."""
    key = jax.random.key(seed)
    if isinstance(key, jax.core.Tracer):  # only the shapes are asked for
        return problem.init(key)
    known = _known(problem)
    if "program" not in known:
        known["program"] = _program(problem.init, lambda: _traced(problem))
    return known["program"](key)


def first_shapes(problem: Problem) -> Params:
    """The shapes of what `problem.init` returns, or its error."""
    return _traced(problem)[1]


def _known(problem: Problem) -> dict[str, Any]:
    """What is known of `problem.init`, as long as the values that it uses are the same."""
    by_values, values = problem.kept.setdefault("init", {}), captured(problem.init)
    if values not in by_values:
        by_values.clear()
        by_values[values] = {}
    return by_values[values]


def _traced(problem: Problem) -> tuple[ClosedJaxpr, Any]:
    """The operations of `problem.init`, and the shapes of its result."""
    known = _known(problem)
    if "traced" not in known:
        # A new function each time: JAX remembers what it traced, whatever has changed around it.
        traced = jax.make_jaxpr(lambda key: problem.init(key), return_shape=True)
        known["traced"] = traced(jax.eval_shape(lambda: jax.random.key(0)))
    return known["traced"]


def _program(init: Callable, trace: Callable) -> Callable:
    try:
        closed, shapes = trace()
    except Exception:  # an init that can't be traced; or is wrong, and will say so
        return init
    large = tree_bytes(closed.consts) > LARGE_CONSTANTS
    if large or len(closed.jaxpr.eqns) < FEW or _sums(closed):
        return init
    options = UNOPTIMIZED if jax.default_backend() == "cpu" else {}
    program = jax.jit(lambda key: _apart(closed, key), compiler_options=options)
    return lambda key: jax.tree.unflatten(jax.tree.structure(shapes), program(key))


def _sums(closed: ClosedJaxpr) -> bool:
    names = {eqn.primitive.name for eqn in closed.jaxpr.eqns}
    names.update(name for eqn in closed.jaxpr.eqns for name in inner_names(eqn))
    return any(name.startswith(SUMS) for name in names)


def _apart(closed: ClosedJaxpr, key) -> list:
    """The operations, with a barrier after each."""

    def apart(eqn, given):
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*given, **params)
        many = eqn.primitive.multiple_results
        results = [_barrier(a) for a in (results if many else [results])]
        return results if many else results[0]

    return evaluated(closed, [key], {}, apart)


def _barrier(a):
    key = jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
    return a if key else jax.lax.optimization_barrier(a)
