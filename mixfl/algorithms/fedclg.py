"""FedCLG: server learning whose clients' drift is corrected by the server's gradient.

For a server whose data is of the clients' distribution (arXiv 2304.05397). With g_s the server's
gradient at x and g_i a client's gradient at x:

correction = client  (FedCLG-C)   every client step uses g_i(x_k) - g_i + g_s
correction = server  (FedCLG-S)   clients take steps of their own; the server then replaces each
                                  Delta_i by Delta_i - eta K_i (g_s - g_i)

Then J central steps, as in server learning. g_s is the mean of the gradients at x on the round's J
central batches; g_i is that on all examples that the client processes in the round. The two are on
one scale: g_s is multiplied by w_f / w_c, as it stands in for a client's loss with its weight.
"""

import inspect
from typing import Literal

import jax
import jax.numpy as jnp

from mixfl.algorithms.contract import (
    AUTO_KEYS,
    CENTRAL_KEYS,
    CLIENT_KEYS,
    Algorithm,
    Broadcast,
    algorithm,
)
from mixfl.algorithms.server_learning import server_learning
from mixfl.algorithms.steps import (
    add,
    central_batches,
    chunked_gradient,
    client_update,
    difference,
    gradient_at_x,
    scale,
)  # fmt: skip
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.settings import Settings
from mixfl.validation import key

CORRECTION = key(
    "client", "of the clients' drift: client (FedCLG-C), server (FedCLG-S)",
    Literal["client", "server"],
)  # fmt: skip


@algorithm("fedclg", CLIENT_KEYS, CENTRAL_KEYS, AUTO_KEYS, settings={"correction": CORRECTION})
def fedclg(problem: Problem, s: Settings) -> Algorithm:
    """Clients' steps corrected by the central gradient, and central steps at the server.

    >>> mixfl.fedclg(client_lr=0.2).settings
    {'client_lr': 0.2}
    """
    base = server_learning.build(problem, s)
    weight = sum(term.weight for term in problem.central)
    if not weight or any(t.examples is None and not takes_batch(t.loss) for t in problem.central):
        raise MixflError(
            "fedclg needs central terms with data and weights above 0: their gradient stands in "
            "for the clients' own. For regularizers use server-learning, 1wgt or 2wgt."
        )

    def server_gradient(x, drawn):
        """g_s, per unit of weight."""
        batches = central_batches(problem, drawn)
        steps = range(len(batches[0].mask))
        each = [
            chunked_gradient(term, x, jax.tree.map(lambda a, k=k: a[k], batch))[1]
            for term, batch in zip(problem.central, batches, strict=True)
            for k in steps
        ]
        return scale(1 / (weight * len(steps)), add(*each))

    # At the client

    def corrected_broadcast(state, drawn):
        g_s = server_gradient(state.x, drawn)
        return [Broadcast(state.x, scale(term.weight, g_s)) for term in problem.populations]

    def corrected_client(term, broadcast, feed):
        g_i = gradient_at_x(term, broadcast.x, feed)
        upload = client_update(term, s, broadcast, feed, after=lambda g: difference(g, g_i))
        if s.grad_clip != "off":
            return upload
        # In one step g_i(x) - g_i is 0. Rounding must not look like a small contribution to `clip`.
        own = jax.tree.map(lambda a: jnp.where(upload.steps > 1, a, 0), upload.own)
        return upload._replace(own=own)

    if s.own.correction == "client":
        return base._replace(broadcast=corrected_broadcast, client=corrected_client)

    # At the server

    def client(term, broadcast, feed):
        upload = client_update(term, s, broadcast, feed)
        g_i = gradient_at_x(term, broadcast.x, feed)
        return upload._replace(extra=scale(upload.weight * upload.steps, g_i))

    def central(state, drawn):
        return server_gradient(state.x, drawn), central_batches(problem, drawn)

    def update(state, broadcasts, sums, central):
        g_s, batches = central
        pairs = zip(problem.populations, sums, strict=True)
        sums = [corrected(term, sums_j, g_s) for term, sums_j in pairs]
        return base.update(state, broadcasts, sums, batches)

    def corrected(term, sums, g_s):
        """With p_i (Delta_i - eta K_i (g_s - g_i)) in place of p_i Delta_i."""
        weighted_steps = jnp.sum(sums.by_steps * jnp.arange(1, len(sums.by_steps) + 1))
        drift = difference(scale(weighted_steps * term.weight, g_s), sums.extra)
        return sums._replace(
            weighted=jax.tree.map(lambda a, b: a - s.client_lr * b, sums.weighted, drift)
        )

    return base._replace(client=client, central=central, update=update)


def takes_batch(loss) -> bool:
    """A loss with data, although the data may be elsewhere: at a node it is."""
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError:
        return False
    return True
