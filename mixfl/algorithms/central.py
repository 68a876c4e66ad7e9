"""Central: the central terms alone, J steps a round at the server. No client takes part."""

from collections.abc import Callable
from typing import Any, NamedTuple

from mixfl.algorithms.contract import (
    AUTO_KEYS,
    CENTRAL_KEYS,
    Algorithm,
    Feed,
    algorithm,
    usual_central_batch,
)
from mixfl.algorithms.steps import (
    central_batches,
    chunked_gradient,
    descend,
    draw_central,
    joined,
)
from mixfl.errors import MixflError
from mixfl.optimizers import make
from mixfl.problem import Params, Problem
from mixfl.settings import Settings


class State(NamedTuple):
    x: Params
    central: Any  # CentralOpt's state


class Trained(NamedTuple):
    """The result of a round's central steps."""

    state: State
    loss: Any  # mean over the steps


@algorithm("central", CENTRAL_KEYS, AUTO_KEYS)
def central(problem: Problem, s: Settings) -> Algorithm:
    """The central terms alone, at the server.

    >>> mixfl.central(central_lr=0.2).settings
    {'central_lr': 0.2}
    """
    if not problem.central:
        raise MixflError("this algorithm needs a central term, and the problem has none.")
    draw = draw_central(problem, s, s.J, auto=usual_central_batch(problem, s))
    select = lambda drawn: central_batches(problem, drawn)  # noqa: E731
    return server_training(problem.central, s, Feed(clients=False, draw=draw), select)


def server_training(terms, s: Settings, feed: Feed, select: Callable) -> Algorithm:
    """Steps of CentralOpt on the sum of `terms`; `select(drawn)` returns their batches."""
    opt = make(s.central_opt, s.eta_c)

    def grad(x, batches):
        parts = [
            chunked_gradient(term, x, batch) for term, batch in zip(terms, batches, strict=True)
        ]
        losses, gradients = zip(*parts, strict=True)
        return sum(losses), joined(terms, gradients)

    def init(x):
        return State(x, opt.init(x))

    def central(state, drawn):
        batches = select(drawn)
        x, opt_state, _, loss = descend(grad, opt, state.x, batches, state.central)
        return Trained(State(x, opt_state), loss / batches[0].mask.shape[0])

    def update(state, broadcasts, sums, central):
        return central.state, {"train/loss": central.loss}

    nobody: Any = lambda *_: None  # noqa: E731 (no client takes part)
    return Algorithm(init, lambda *_: [], nobody, nobody, central, update, feed)
