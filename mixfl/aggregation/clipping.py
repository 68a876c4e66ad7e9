"""Clipping: no client moves the model much further per step than clients usually do.

What is clipped is the client's own part of its change, u_i (see steps.own_part):

    norm = ||u_i|| / K_i                  per local step, as clients take unequal numbers
    u_i' = u_i min(1, limit / norm)

With `clip = quantile`, the limit is MARGIN times a running quantile: the median, over the last
WINDOW rounds, of each round's quantile SHARE of its clients' norms. Up to a quarter of the clients
may send anything in every round without moving it far. If the norms of most clients rise together,
the median of the round's own norms counts instead, if it is larger. The first round has only its
own quantile. If a client also sends the sum of its gradients, that has its own limit.
"""

import jax
import jax.numpy as jnp

from mixfl.aggregation.base import Step
from mixfl.algorithms.contract import Sums
from mixfl.forms.base import leaves_and_parts, map_parts, scaled, squares
from mixfl.settings import Settings

MARGIN = 3.0
SHARE = 0.75
WINDOW = 32  # rounds
KINDS = 2  # of norms: the own part's, and that of the sum of gradients


def choose(s: Settings) -> Step | None:
    return None if s.clip == "off" else Clipping(s)


class Clipping(Step):
    """Its state is the history of norms, [kinds, rounds], with 0 for rounds that never happened. It
    tells clients the limits, [kinds]. A client reports its norms, [kinds]."""

    at_client = False  # a bad client would not clip
    squares = both = True

    def __init__(self, s: Settings):
        self.clip = s.clip

    def init(self, x=None, population=0):
        return jnp.zeros((KINDS, WINDOW), jnp.float32)

    def told(self, state) -> jax.Array:
        """The largest norm of each kind; infinite while nothing is known."""
        usual = MARGIN * jnp.nanmedian(jnp.where(state > 0, state, jnp.nan), axis=1)
        return self._fixed(jnp.where(jnp.isnan(usual), jnp.inf, usual))

    def encode(self, told, summand: Sums, key):
        norms = own_norms(summand)
        factor = jnp.where(norms > told, told / jnp.where(norms > 0, norms, 1), 1.0)

        def shortened(tree, factor):
            return None if tree is None else map_parts(lambda a: scaled(factor, a), tree)

        code = summand._replace(
            weighted=shortened(summand.weighted, factor[0]),
            unweighted=shortened(summand.unweighted, factor[0]),
            grads=shortened(summand.grads, factor[1]),
        )
        return code, norms

    def bad(self, report):
        """Is the norm so large that its square overflows float32?"""
        return jnp.any(jnp.isinf(report))

    def finite(self, report):
        return jnp.all(jnp.isfinite(report))

    def settled(self, state, told, reports):
        first = self.told(self.next(state, reports))
        together = MARGIN * _ranked(reports, lambda n: (n - 1) / 2)  # of two clients, the smaller
        return self._fixed(jnp.where(jnp.isinf(told), first, jnp.maximum(told, together)))

    def changed(self, told, settled, reports):
        other = (reports > jnp.minimum(told, settled)) & (told != settled)
        return jnp.any(other) | jnp.any(jnp.isinf(reports))

    def counted(self, settled, reports):
        over = (reports > settled) & jnp.isfinite(reports)
        return {"clients/clipped": jnp.sum(jnp.any(over, axis=1), dtype=jnp.int32)}

    def next(self, state, reports):
        value = _ranked(reports, lambda n: SHARE * n - 0.5)[:, None]  # of two clients, the larger
        moved = jnp.concatenate([state[:, 1:], value], axis=1)
        return jnp.where(value > 0, moved, state)

    def _fixed(self, limits):
        return limits if self.clip == "quantile" else limits.at[0].set(self.clip)


def own_norms(summand: Sums) -> jax.Array:
    """The norms of a client's own part and of its sum of gradients, per step: [kinds]. 0 if the
    client took no step."""
    trees = (summand.weighted, summand.grads)
    both = [sum(map(squares, leaves_and_parts(tree)), jnp.float32(0)) for tree in trees]
    norms = jnp.sqrt(jnp.stack(both)) / jnp.stack([summand.weight, jnp.float32(1.0)])
    return jnp.where(summand.steps > 0, norms / jnp.maximum(summand.steps, 1), 0)


def _ranked(norms, rank):
    """For norms [clients, kinds], the one at the given rank of each kind: [kinds]. Only finite
    norms above 0 count. The result is 0 if there are none."""
    counts = jnp.isfinite(norms) & (norms > 0)
    ordered = jnp.sort(jnp.where(counts, norms, jnp.inf), axis=0)
    number = jnp.sum(counts, axis=0)
    place = jnp.maximum(jnp.floor(rank(number)), 0).astype(jnp.int32)
    values = jnp.take_along_axis(ordered, place[None], axis=0)[0]
    return jnp.where(number > 0, values, 0.0)
