"""Example Transfer: central examples are dealt out to the clients, which train on both.

Every round S K |B_i| central examples are drawn. A client's step uses w_f x mean over its own
batch + w_c x mean over its share of |B_i| central examples.
"""

import jax
import jax.numpy as jnp

from mixfl.algorithms.contract import CLIENT_KEYS, Algorithm, Batches, algorithm
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.steps import add, central_shares, client_update, gradient, scale
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.settings import Settings


@algorithm("example-transfer", CLIENT_KEYS, frozenset({"w_c"}))
def example_transfer(problem: Problem, s: Settings) -> Algorithm:
    """Example Transfer: central examples are sent to the clients, which train on both.

    >>> mixfl.example_transfer(client_lr=0.2).settings
    {'client_lr': 0.2}
    """
    if len(problem.central) != 1 or problem.central[0].examples is None:
        raise MixflError(
            "example-transfer needs one central term with data (examples to deal out); for a "
            "regularizer use baseline, which computes it at the clients."
        )
    (central_term,) = problem.central
    shares = central_shares(problem)

    def client(term, broadcast, feed):
        def grad(x, step):
            loss, g = gradient(term, x, step.batches)
            dealt = jax.tree.leaves(step.share)[0].shape[0]
            share = Batches(step.share, jnp.ones(dealt))
            _, g_share = gradient(central_term, x, share)
            return loss, add(g, scale(shares[term.name], g_share))

        return client_update(term, s, broadcast, feed, grad)

    algorithm = fed_avg.build(problem, s)
    return algorithm._replace(client=client, feed=algorithm.feed._replace(share=True))
