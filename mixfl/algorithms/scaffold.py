"""SCAFFOLD: FedAvg whose clients correct their drift with control variates.

x_k  = ClientOpt(x_k, g_i(x_k) - c_i + c)            c: the server's, c_i: the client's own
c_i' = c_i - c + (x - x_K) / (K_i eta)               option II: the mean of g_i over its steps
c'   = c + sum (c_i' - c_i) / N                      N: clients of the population

Karimireddy et al. (arXiv 1910.06378). A client keeps c_i between rounds, 0 at first. With another
ClientOpt than plain SGD, the mean of g_i is added up during the steps. The paper's mean of the
changes is `weighting = uniform`. Central terms are left out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mixfl.algorithms.client_opt import plain_steps
from mixfl.algorithms.contract import CLIENT_KEYS, Algorithm, Broadcast, algorithm
from mixfl.algorithms.fed_avg import State as FedAvgState
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.steps import client_update, difference, scale, zeros
from mixfl.problem import Params, Problem
from mixfl.settings import Settings


class State(NamedTuple):
    fedavg: FedAvgState
    c: tuple  # per population

    @property
    def x(self) -> Params:
        return self.fedavg.x


@algorithm("scaffold", CLIENT_KEYS)
def scaffold(problem: Problem, s: Settings) -> Algorithm:
    """FedAvg with control variates, which each client keeps.

    >>> mixfl.scaffold(client_lr=0.2).settings
    {'client_lr': 0.2}
    """
    fedavg = fed_avg.build(problem, s)
    plain = plain_steps(s)

    def init(x):
        return State(fedavg.init(x), tuple(zeros(x) for _ in problem.populations))

    def broadcast(state, drawn):
        return [Broadcast(state.x, c) for c in state.c]

    def client(term, broadcast, feed):
        c_i = feed.state
        corrected = lambda g: difference(g, c_i)  # noqa: E731
        upload = client_update(term, s, broadcast, feed, collect=not plain, after=corrected)
        steps = jnp.maximum(upload.steps, 1)
        # Both are the mean of g_i - c_i: u_i is Delta_i without what c alone would have changed.
        change = (
            scale(-1 / (s.client_lr * steps), upload.own)
            if plain
            else scale(1 / steps, upload.grads)
        )
        return upload._replace(grads=None, extra=change, state=moved(c_i, change))

    def update(state, broadcasts, sums, central):
        after, info = fedavg.update(state.fedavg, broadcasts, sums, central)
        c = [
            moved(c_j, scale(1 / len(term.clients), sums_j.extra))
            for term, c_j, sums_j in zip(problem.populations, state.c, sums, strict=True)
        ]
        return State(after, tuple(c)), info

    def moved(c, change):
        return jax.tree.map(lambda a, b: (a + b).astype(a.dtype), c, change)

    return fedavg._replace(
        init=init, broadcast=broadcast, client=client, update=update, client_state=zeros
    )
