"""Runs a traced function with its own loops on the host: what is between them is compiled.

A few operators are much slower inside a compiled loop than outside of one. For them, a round's
loops over clients and steps (algorithms/loops.py) are better run by Python, which starts one
compiled piece after the other. The pieces have the same operations, so the results are the same up
to rounding. Loops inside a user's loss stay compiled. Calls of other libraries (host_calls.py) run
between the pieces.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, jaxprs_in_params

from mixfl.algorithms.loops import LOOP
from mixfl.engine import host_calls
from mixfl.forms.jaxpr import inner_names, variables

QUICK = {  # to compile, but slow to run
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_experimental_ynn_fusion_type": "",  # a library's plans, made in the first run
}
LITTLE = 2**20  # numbers that a piece computes, which take no time
PRODUCTS = {"dot_general", "conv_general_dilated", "scan", "while"}


class Dispatched:
    """A function of pytrees of arrays. It is traced once for each set of shapes."""

    def __init__(self, function: Callable):
        self.function = function
        self.plans: dict[Any, tuple[Pieces, Any]] = {}

    def __call__(self, *args):
        leaves, structure = jax.tree.flatten(args)
        leaves = [jnp.asarray(a) for a in leaves]
        key = structure, tuple((a.shape, a.dtype) for a in leaves)
        if key not in self.plans:
            closed, shapes = jax.make_jaxpr(self.function, return_shape=True)(*args)
            self.plans[key] = Pieces(closed), jax.tree.structure(shapes)
        pieces, result = self.plans[key]
        return jax.tree.unflatten(result, pieces(leaves))


class Pieces:
    """A list of operations as compiled pieces, loops and branches, in their order."""

    def __init__(self, closed: ClosedJaxpr):
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        groups: list[list] = []
        for eqn in self.jaxpr.eqns:
            if has_loop(eqn) or not groups or has_loop(groups[-1][-1]):
                groups.append([])
            groups[-1].append(eqn)
        self.pieces: list[tuple[list, list, Callable]] = []
        needed = set(variables(self.jaxpr.outvars))
        for eqns in reversed(groups):
            # In order, so that the same program is found in the cache on disk.
            read = dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars))
            made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
            inputs, outputs = [v for v in read if v not in made], [v for v in made if v in needed]
            self.pieces.insert(0, self._piece(eqns, inputs, outputs))
            needed.update(read)

    def _piece(self, eqns: list, inputs: list, outputs: list) -> tuple[list, list, Callable]:
        """The variables it reads, those that it makes, and a function from the one to the other."""
        eqn = eqns[0]
        if not has_loop(eqn):
            jaxpr = self.jaxpr.replace(
                constvars=[], invars=inputs, outvars=outputs, eqns=eqns,
                debug_info=self.jaxpr.debug_info.with_unknown_names(),
            )  # fmt: skip
            options = QUICK if little(eqns) and jax.default_backend() == "cpu" else None
            compiled = jax.jit(jaxpr_as_fun(ClosedJaxpr(jaxpr, ())), compiler_options=options)
            return inputs, outputs, compiled
        run = KINDS[eqn.primitive.name](eqn)

        def with_literals(*args):
            values = dict(zip(inputs, args, strict=True))
            given = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            made = dict(zip(eqn.outvars, run(given), strict=True))
            return [made[v] for v in outputs]

        return inputs, outputs, with_literals

    def __call__(self, args: Sequence) -> list:
        inputs = [*self.jaxpr.constvars, *self.jaxpr.invars]
        values = dict(zip(inputs, [*self.consts, *args], strict=True))
        last = {v: i for i, (inputs, _, _) in enumerate(self.pieces) for v in inputs}
        kept = set(variables(self.jaxpr.outvars))
        for i, (inputs, outputs, run) in enumerate(self.pieces):
            results = run(*(values[v] for v in inputs))
            for v in inputs:
                if last[v] == i and v not in kept:
                    del values[v]  # so that its memory can be used again
            values.update(zip(outputs, results, strict=True))
        return [v.val if isinstance(v, Literal) else values[v] for v in self.jaxpr.outvars]


def _scan(eqn) -> Callable[[Sequence], list]:
    p = eqn.params
    consts, carried = p["num_consts"], p["num_consts"] + p["num_carry"]
    body, length, count = p["jaxpr"], p["length"], p["num_carry"]

    def step(i, *given):
        xs = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in given[carried:]]
        return jaxpr_as_fun(body)(*given[:carried], *xs)

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    pieces = Pieces(jax.make_jaxpr(step)(jax.ShapeDtypeStruct((), jnp.int32), *shapes))
    stack = jax.jit(lambda rows: [jnp.stack(a) for a in zip(*rows, strict=True)])

    def run(given):
        carry, rows = list(given[consts:carried]), []
        for i in range(length):
            at = length - 1 - i if p["reverse"] else i
            results = pieces([jnp.int32(at), *given[:consts], *carry, *given[carried:]])
            carry = results[:count]
            rows.append(results[count:])
        rows = rows[::-1] if p["reverse"] else rows
        return [*carry, *stack(rows)]

    return run


def _while(eqn) -> Callable[[Sequence], list]:
    p = eqn.params
    test, body = jax.jit(jaxpr_as_fun(p["cond_jaxpr"])), Pieces(p["body_jaxpr"])
    of_test, consts = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

    where = jax.jit(still_active)

    def run(given):
        carry = list(given[consts:])
        while True:
            (active,) = test(*given[:of_test], *carry)
            if not active.any():
                return carry
            new = body([*given[of_test:consts], *carry])
            carry = where(active, new, carry) if active.ndim else new

    return run


def still_active(active, new: Sequence, old: Sequence) -> list:
    """Of several loops at once (vmap), those that have ended stay as they are."""

    def one(new, old):
        return jnp.where(active.reshape(active.shape + (1,) * (new.ndim - active.ndim)), new, old)

    return [one(*pair) for pair in zip(new, old, strict=True)]


def _branches(eqn) -> Callable[[Sequence], list]:
    """A call, or branches of which only the one that is taken is compiled."""
    made: dict[int, Pieces] = {}

    def run(given):
        if eqn.primitive.name == "cond":
            which, given = int(given[0]), given[1:]
            closed = eqn.params["branches"][which]
        else:
            which, closed = 0, eqn.params["jaxpr"]
        if which not in made:
            made[which] = Pieces(closed)
        return made[which](given)

    return run


def _called(eqn) -> Callable[[Sequence], list]:
    return lambda given: host_calls.run(eqn, given)


KINDS = {
    "scan": _scan, "while": _while, "cond": _branches, "jit": _branches, host_calls.NAME: _called,
}  # fmt: skip


def little(eqns: Sequence) -> bool:
    """Do they compute so little that compiling takes longer than running? A model of many small
    arrays has such pieces: its sums, between calls of another library."""
    numbers = sum(math.prod(v.aval.shape) for eqn in eqns for v in eqn.outvars)
    names = {name for eqn in eqns for name in (eqn.primitive.name, *inner_names(eqn))}
    return numbers <= LITTLE and not names & PRODUCTS


def is_loop(eqn) -> bool:
    loops = eqn.primitive.name in ("scan", "while")
    return loops and LOOP in str(eqn.source_info.name_stack)


def has_loop(eqn) -> bool:
    """Is it one of mixfl's own loops, or a call, or does it have one inside?"""
    if is_loop(eqn) or eqn.primitive.name == host_calls.NAME:
        return True
    if eqn.primitive.name not in KINDS:
        return False
    return any(has_loop(e) for jaxpr in jaxprs_in_params(eqn.params) for e in jaxpr.eqns)
