"""Centers other than the mean, for cohorts in which some clients may send anything.

A center compares the clients' own parts, so each summand must be held by itself. That rules out
secure sums, and chunks of a cohort. Every client's own part is then replaced by the center, and the
sums are formed as always.

    median        of each coordinate
    trimmed-mean  of each coordinate, without the `trim` largest and smallest
    krum          multi-Krum: the mean of the clients that are nearest to each other, without the
                  share `trim` of them that is farthest

A client without a finite update does not count. A center ignores the weights p_i, because each
client reports its own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms.contract import Sums
from mixfl.algorithms.steps import scale
from mixfl.errors import MixflError
from mixfl.settings import Settings

FARTHEST = float(np.finfo(np.float32).max)  # for squared distances that overflow


def robust_sums(s: Settings, summands: Sums, good) -> Sums:
    """The sums of stacked summands [clients, ...]; `good` [clients] marks those that count."""
    if summands.extra is not None:
        raise MixflError(
            f"aggregation = {s.aggregation} is for changes of the model. This algorithm's clients "
            "send fields of its own too, which it would add up, whoever sent them: use another "
            "algorithm, or aggregation = mean."
        )
    good = good & (summands.steps > 0)

    def own(a):  # p_i u_i is u_i again
        return a / _along(jnp.where(good, summands.weight, 1), a)

    def added(a):
        return jnp.sum(jnp.where(_along(good, a), a, 0), axis=0)

    unweighted = summands.unweighted
    each = jax.tree.map(own, summands.weighted) if unweighted is None else unweighted
    middle = center(s, each, good)
    grads = None if summands.grads is None else center(s, summands.grads, good)
    count = jnp.sum(good)
    return Sums(
        weighted=scale(added(summands.weight), middle),
        weight=added(summands.weight),
        unweighted=None if unweighted is None else scale(count, middle),
        grads=None if grads is None else scale(count, grads),
        steps=added(summands.steps), by_steps=added(summands.by_steps),
        loss=added(summands.loss), clients=added(summands.clients),
    )  # fmt: skip


def center(s: Settings, stacked, good):
    """The center of trees stacked along the first axis; 0 if no client counts."""
    if s.aggregation == "krum":
        chosen = nearest(stacked, good, s.trim)
        mean = lambda a: _mean(a, _along(chosen, a))  # noqa: E731
        return jax.tree.map(mean, stacked)
    cut = 0.5 if s.aggregation == "median" else s.trim
    return jax.tree.map(lambda a: trimmed_mean(a, good, cut), stacked)


def trimmed_mean(a, good, cut):
    """The mean of each coordinate of a [clients, ...] without the share `cut` of the largest and of
    the smallest. One or two values always remain, so 0.5 is the median."""
    count = jnp.sum(good)
    ordered = in_order(jnp.where(_along(good, a), a, jnp.inf))
    drop = jnp.minimum(part_of(cut, count), (count - 1) // 2)
    place = jnp.arange(len(a))
    return _mean(ordered, _along((place >= drop) & (place < count - drop), a))


def in_order(a):
    """Sorted along the first axis. On a CPU, NumPy sorts in a twentieth of XLA's time."""

    def by_numpy(a):
        shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
        return jax.pure_callback(lambda a: np.sort(np.asarray(a), axis=0), shape, a)

    return jax.lax.platform_dependent(a, cpu=by_numpy, default=lambda a: jnp.sort(a, axis=0))


def nearest(stacked, good, trim):
    """Which clients multi-Krum takes, [clients]: of n, all but the f = trim n (rounded up) whose
    n - f - 2 nearest neighbors are farthest away."""
    flat = [
        jnp.where(_along(good, a), a, 0).reshape(len(a), -1).astype(jnp.float32)
        for a in jax.tree.leaves(stacked)
    ]
    gram = sum(a @ a.T for a in flat)
    squares = jnp.diag(gram)
    distance = jnp.maximum(squares[:, None] + squares[None] - 2 * gram, 0)
    distance = jnp.where(jnp.isfinite(distance), distance, FARTHEST)
    both = good[:, None] & good[None] & ~jnp.eye(len(good), dtype=bool)
    ordered = jnp.sort(jnp.where(both, distance, jnp.inf), axis=1)
    count = jnp.sum(good)
    bad = jnp.minimum(part_of(trim, count), count - 1)
    neighbors = jnp.clip(count - bad - 2, 1, None)
    near = jnp.arange(len(good))[None] < neighbors
    score = jnp.sum(jnp.where(near & jnp.isfinite(ordered), ordered, 0), axis=1)
    # However far away it is, a client that counts comes before one that does not.
    score = jnp.where(good, jnp.minimum(score, FARTHEST), jnp.inf)
    rank = jnp.argsort(jnp.argsort(score))
    return good & (rank < count - bad)


def part_of(share, count):
    """This share of the clients, rounded up: a fifth of four is one."""
    return jnp.ceil(share * count - 1e-4)


def _mean(a, counts):
    total = jnp.sum(jnp.where(counts, a, 0), axis=0)
    return (total / jnp.maximum(jnp.sum(counts, axis=0), 1)).astype(a.dtype)


def _along(flags, a):
    """Flags [clients], to be used with a [clients, ...]."""
    return flags.reshape(-1, *[1] * (a.ndim - 1))
