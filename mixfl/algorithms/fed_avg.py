"""FedAvg: clients train on their own loss, the server steps along the mean of their changes.

Central terms are left out. The changes of several populations are added: the loss is a sum.
"""

import functools
from typing import Any, NamedTuple

from mixfl.algorithms.contract import (
    CLIENT_KEYS,
    Algorithm,
    Broadcast,
    Feed,
    algorithm,
)
from mixfl.algorithms.marks import own_loss_only
from mixfl.algorithms.steps import (
    client_update,
    joined,
    mean_delta,
    report,
    scale,
    weighted_summand,
)
from mixfl.errors import MixflError
from mixfl.optimizers import make
from mixfl.problem import Params, Problem
from mixfl.settings import Settings


class State(NamedTuple):
    x: Params
    server: Any  # ServerOpt's state


@algorithm("fedavg", CLIENT_KEYS)
def fed_avg(problem: Problem, s: Settings) -> Algorithm:
    """FedAvg: the federated terms alone.

    >>> mixfl.fed_avg(client_lr=0.2, local_steps=5).settings
    {'client_lr': 0.2, 'local_steps': 5}
    """
    if not problem.populations:
        raise MixflError("this algorithm needs a federated term, and the problem has none.")
    server_opt = make(s.server_opt, s.server_lr)

    def init(x):
        return State(x, server_opt.init(x))

    def broadcast(state, drawn):
        return [Broadcast(state.x) for _ in problem.populations]

    @own_loss_only
    def client(term, broadcast, feed):
        return client_update(term, s, broadcast, feed)

    def central(state, drawn):
        return ()

    def update(state, broadcasts, sums, central):
        deltas = map(mean_delta, map(s.of, problem.populations), broadcasts, sums)
        delta = joined(problem.populations, list(deltas))
        x, server = server_opt.step(state.x, scale(-1, delta), state.server)
        return State(x, server), report(problem, sums)

    feed = Feed(draw=(None,) * len(problem.terms))
    summand = own_loss_only(functools.partial(weighted_summand, s))
    return Algorithm(init, broadcast, client, summand, central, update, feed)
