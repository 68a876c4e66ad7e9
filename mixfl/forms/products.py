"""Losses whose convolutions, poolings and recurrent layers are fast inside a loop.

The loss itself shows its operations: it is traced. Each convolution is replaced by the product in
convolution.py, and the gradients of a recurrent layer's weights by those in recurrence.py. Unlike
the other forms, this one leaves the model as it is. So it serves every algorithm, at clients and at
the server.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from mixfl.forms import recurrence
from mixfl.forms.convolution import convolution, refused
from mixfl.forms.jaxpr import INSIDE, evaluated
from mixfl.forms.pooling import max_pooling
from mixfl.model_state import carries_state
from mixfl.problem import Federated, Problem
from mixfl.randomness import batch_shapes, takes_key
from mixfl.settings import Settings


def _convolution(p, lhs, rhs):
    return None if refused(lhs, rhs, p) else convolution(lhs, rhs, p)


CONVOLUTION, POOLING = "conv_general_dilated", "reduce_window_max"
REPLACE: dict[str, Callable] = {CONVOLUTION: _convolution, POOLING: max_pooling}
KNOWN = (*INSIDE, "jit")  # operations that have others inside, which are replaced too
REPLACE["scan"] = partial(recurrence.collected, replace=REPLACE)


@dataclass(frozen=True)
class InProducts:
    """The same loss, up to rounding."""

    loss: Callable
    layers: int = 0  # of convolutions, if they are in no loop

    @property
    def takes_key(self) -> bool:
        return takes_key(self.loss)

    @property
    def frozen(self):
        return getattr(self.loss, "frozen", None)

    @property
    def carries(self) -> bool:
        return carries_state(self.loss)

    def with_frozen(self, arrays) -> "InProducts":
        return dataclasses.replace(self, loss=self.loss.with_frozen(arrays))  # type: ignore[attr-defined]

    def __call__(self, *args):
        closed, shape = jax.make_jaxpr(self.loss, return_shape=True)(*args)
        results = evaluated(closed, jax.tree.leaves(args), REPLACE)
        return jax.tree.unflatten(jax.tree.structure(shape), results)


class Found(NamedTuple):
    """Numbers of operations in a loss."""

    convolutions: int
    others: int  # poolings and recurrent layers
    loops: int

    @property
    def layers(self) -> int:
        """Of convolutions, if they are in no loop."""
        return 0 if self.loops else self.convolutions


NOTHING = Found(0, 0, 0)


def found_in(loss: Callable, *args: Any) -> Found:
    """`args` may be shapes."""

    def every(jaxpr) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in jaxprs_in_params(eqn.params) if eqn.primitive.name in KNOWN else ():
                yield from every(inner)

    def recurrent(eqn) -> bool:
        return eqn.primitive.name == "scan" and bool(recurrence.uses_in(eqn.params)[1])

    eqns = list(every(jax.make_jaxpr(loss)(*args).jaxpr))
    names = Counter(eqn.primitive.name for eqn in eqns)
    others = names[POOLING] + sum(map(recurrent, eqns))
    return Found(names[CONVOLUTION], others, names["scan"] + names["while"])


def in_products(problem: Problem, x: Any, s: Settings) -> Problem:
    """The problem with the losses that have convolutions replaced. `x` has the model's shapes."""

    def replaced(term):
        found = of(term)
        if not (found.convolutions or found.others):
            return term
        return dataclasses.replace(term, loss=InProducts(term.loss, found.layers))

    def of(term) -> Found:
        if getattr(term, "here", True) is False:
            return NOTHING  # its nodes have the data
        # A client's batch, of which other forms look at the trace too: JAX keeps it for them.
        rows = s.of(term).client_batch if isinstance(term, Federated) else s.client_batch
        batch = [] if term.examples is None else [batch_shapes(term, rows)]
        try:
            return found_in(term.loss, x, *batch)
        except Exception:  # the preflight says what is wrong with the loss
            return NOTHING

    terms = [replaced(term) for term in problem.terms]
    return problem if terms == list(problem.terms) else problem.with_terms(terms)


def products_in(problem: Problem) -> list[str]:
    """The names of the terms whose losses were replaced."""
    return [term.name for term in problem.terms if isinstance(term.loss, InProducts)]


def most_layers(problem: Problem) -> int:
    """The most convolutions of a loss that were replaced."""
    return max(getattr(term.loss, "layers", 0) for term in problem.terms)


def original(loss: Callable) -> Callable:
    return loss.loss if isinstance(loss, InProducts) else loss
