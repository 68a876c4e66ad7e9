"""Mime-lite: FedAvg whose clients apply the server's momentum in every step.

m   = the server's momentum, the same in all steps of a round
x_k = ClientOpt(x_k, (1 - beta) g_i(x_k) + beta m)         beta is `momentum`
m'  = (1 - beta) sum p_i g_i(x) / sum p_i + beta m         g_i(x): at the server's model

Karimireddy et al., "Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning"
(arXiv 2008.03606), with SGD and momentum as the base algorithm. g_i(x) is the gradient on all
examples that the client processes in the round. Central terms are left out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mixfl.algorithms.contract import CLIENT_KEYS, Algorithm, Broadcast, algorithm
from mixfl.algorithms.fed_avg import State as FedAvgState
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.steps import client_update, gradient_at_x, scale, zeros
from mixfl.problem import Params, Problem
from mixfl.settings import Settings
from mixfl.validation import Share, key

MOMENTUM = key(0.9, "of the server, applied in the clients' steps (beta)", Share)


class State(NamedTuple):
    fedavg: FedAvgState
    m: tuple  # per population

    @property
    def x(self) -> Params:
        return self.fedavg.x


@algorithm("mimelite", CLIENT_KEYS, settings={"momentum": MOMENTUM})
def mime_lite(problem: Problem, s: Settings) -> Algorithm:
    """FedAvg whose clients use the server's momentum.

    >>> mixfl.mime_lite(client_lr=0.2).settings
    {'client_lr': 0.2}
    """
    beta = s.own.momentum
    fedavg = fed_avg.build(problem, s)

    def init(x):
        return State(fedavg.init(x), tuple(zeros(x) for _ in problem.populations))

    def broadcast(state, drawn):
        return [Broadcast(state.x, scale(beta, m)) for m in state.m]

    def client(term, broadcast, feed):
        upload = client_update(term, s, broadcast, feed, after=lambda g: scale(1 - beta, g))
        g_i = gradient_at_x(term, broadcast.x, feed)
        return upload._replace(extra=scale(upload.weight, g_i))

    def update(state, broadcasts, sums, central):
        after, info = fedavg.update(state.fedavg, broadcasts, sums, central)
        return State(after, tuple(map(momentum, state.m, sums))), info

    def momentum(m, sums):
        """It stays as it was if no client took a step."""
        g = scale(1 / jnp.maximum(sums.weight, 1e-30), sums.extra)
        new = jax.tree.map(lambda g, m: ((1 - beta) * g + beta * m).astype(m.dtype), g, m)
        return jax.tree.map(lambda new, m: jnp.where(sums.weight > 0, new, m), new, m)

    return fedavg._replace(init=init, broadcast=broadcast, client=client, update=update)
