"""Baseline: FedAvg in which every client step also computes the central loss.

For central losses that need no central data: the expensive way that mixed FL replaces.
"""

from mixfl.algorithms.contract import CLIENT_KEYS, Algorithm, Batches, algorithm
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.steps import add, central_shares, client_update, gradient, scale
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.settings import Settings


@algorithm("baseline", CLIENT_KEYS, frozenset({"w_c"}))
def baseline(problem: Problem, s: Settings) -> Algorithm:
    """FedAvg, with central losses that need no data computed at every client.

    >>> mixfl.baseline(client_lr=0.2).settings
    {'client_lr': 0.2}
    """
    if not problem.central or any(term.examples is not None for term in problem.central):
        raise MixflError(
            "baseline needs central terms without data (regularizers), which clients can compute "
            "too; where the central term has data, example-transfer sends it to them."
        )
    shares = central_shares(problem)

    def client(term, broadcast, feed):
        def grad(x, step):
            loss, g = gradient(term, x, step.batches)
            for central_term in problem.central:
                _, g_c = gradient(central_term, x, Batches(None, step.batches.mask))
                g = add(g, scale(shares[term.name], g_c))
            return loss, g

        return client_update(term, s, broadcast, feed, grad)

    return fed_avg.build(problem, s)._replace(client=client)
