"""1-way Gradient Transfer: FedAvg in which every client step adds the central gradient g_c."""

import jax

from mixfl.algorithms.contract import (
    AUTO_KEYS,
    BATCH_KEYS,
    CLIENT_KEYS,
    Algorithm,
    Broadcast,
    algorithm,
)
from mixfl.algorithms.epochs import mean_steps
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.steps import (
    add,
    central_batches,
    central_shares,
    chunked_gradient,
    draw_central,
    scale,
)  # fmt: skip
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.settings import Settings
from mixfl.trees import without_state


def rubric(problem: Problem, s: Settings) -> int:
    """The central batch: one gradient stands in for all steps of all clients."""
    each = [s.of(term) for term in problem.populations] or [s]
    return max(mean_steps(problem, own) * own.cohort_size * own.client_batch for own in each)


@algorithm("1wgt", CLIENT_KEYS, BATCH_KEYS, AUTO_KEYS, central_batch=rubric)
def one_way_gt(problem: Problem, s: Settings) -> Algorithm:
    """1-way Gradient Transfer: clients add the central gradient to each of their steps.

    >>> mixfl.one_way_gt(client_lr=0.2, central_batch=100).settings
    {'client_lr': 0.2, 'central_batch': 100}
    """
    if not problem.central:
        raise MixflError("1wgt needs a central term, and the problem has none: use 2wgt or pt.")
    shares = central_shares(problem)

    def broadcast(state, drawn):
        batches = jax.tree.map(lambda a: a[0], central_batches(problem, drawn))  # one each
        gradients = [
            chunked_gradient(term, state.x, batch)[1]
            for term, batch in zip(problem.central, batches, strict=True)
        ]
        g_c = without_state(add(*gradients))
        return [Broadcast(state.x, scale(share, g_c)) for share in shares.values()]

    algorithm = fed_avg.build(problem, s)
    draw = draw_central(problem, s, 1, auto=rubric(problem, s))
    feed = algorithm.feed._replace(draw=draw)
    return algorithm._replace(broadcast=broadcast, feed=feed)
