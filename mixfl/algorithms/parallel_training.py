"""Parallel Training: a round of FedAvg alongside central steps, then a merge.

x_f = ServerOpt(x, -Delta),  Delta_f = x_f - x      for each population
x_c = J steps of CentralOpt, Delta_c = x_c - x      for each central term
x   = MergeOpt(x, -(sum of all Delta))
"""

from typing import Any, NamedTuple

from mixfl.algorithms.contract import (
    AUTO_KEYS,
    CENTRAL_KEYS,
    CLIENT_KEYS,
    MERGE_KEYS,
    Algorithm,
    algorithm,
    usual_central_batch,
)
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.steps import (
    central_batches,
    central_update,
    difference,
    draw_central,
    joined,
    mean_delta,
    report,
    scale,
)  # fmt: skip
from mixfl.optimizers import make
from mixfl.problem import Params, Problem
from mixfl.settings import Settings


class State(NamedTuple):
    x: Params
    server: tuple  # per population, ServerOpt's state
    central: tuple  # per central term, CentralOpt's state
    merge: Any


@algorithm("pt", CLIENT_KEYS, CENTRAL_KEYS, AUTO_KEYS, MERGE_KEYS)
def parallel_training(problem: Problem, s: Settings) -> Algorithm:
    """Parallel Training: clients and server train beside each other, and their changes are added.

    >>> mixfl.parallel_training(client_lr=0.2, central_steps=5).settings
    {'client_lr': 0.2, 'central_steps': 5}
    """
    server_opt = make(s.server_opt, s.server_lr)
    central_opt = make(s.central_opt, s.eta_c)
    merge_opt = make(s.merge_opt, s.merge_lr)

    def init(x):
        server = tuple(server_opt.init(x) for _ in problem.populations)
        central = tuple(central_opt.init(x) for _ in problem.central)
        return State(x, server, central, merge_opt.init(x))

    def central(state, drawn):
        batches = central_batches(problem, drawn)
        return [
            central_update(term, s, state.x, b, opt_state)
            for term, b, opt_state in zip(problem.central, batches, state.central, strict=True)
        ]

    def update(state, broadcasts, sums, central):
        deltas, server = [], []
        populations = zip(problem.populations, broadcasts, sums, state.server, strict=True)
        for term, sent, sums_j, opt_state in populations:
            delta = mean_delta(s.of(term), sent, sums_j)
            x_f, opt_state = server_opt.step(state.x, scale(-1, delta), opt_state)
            deltas.append(difference(x_f, state.x))
            server.append(opt_state)
        deltas += [c.delta for c in central]
        total = joined([*problem.populations, *problem.central], deltas)
        x, merge = merge_opt.step(state.x, scale(-1, total), state.merge)
        state = State(x, tuple(server), tuple(c.opt_state for c in central), merge)
        return state, report(problem, sums, central)

    algorithm = fed_avg.build(problem, s)
    draw = draw_central(problem, s, s.J, auto=usual_central_batch(problem, s))
    feed = algorithm.feed._replace(draw=draw)
    return algorithm._replace(init=init, central=central, update=update, feed=feed)
