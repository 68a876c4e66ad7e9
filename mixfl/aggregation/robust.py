"""Other centers than the mean, for cohorts in which some clients send what they like.

Each compares the clients' own parts (see clipping.py), one by one, so that the uploads must be
held singly: not with secure sums, and not in chunks of a cohort. Every client's own part is then
replaced by the center, and the sums are formed as always.

    median        of each coordinate
    trimmed-mean  of each coordinate, without the `trim` largest and smallest
    krum          multi-Krum: the mean of the clients that are nearest to each other, `trim` of
                  them left out

A client without a finite update does not count. Weights p_i do not count in a center: they are
what a client says of itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.aggregation.clipping import carried_by
from mixfl.algorithms.contract import Message, Upload
from mixfl.algorithms.steps import add
from mixfl.forms.rows import zeros_for
from mixfl.settings import Settings
from mixfl.trees import name

FARTHEST = float(np.finfo(np.float32).max)  # squared distance of changes that overflow it


def robust_sums(s: Settings, summand, uploads: Upload, message: Message, good):
    """Of stacked uploads [clients, ...], where `good` [clients] says which count."""
    good = good & (uploads.steps > 0)
    own = center(s, jax.vmap(lambda u: own_part(s, u, message))(uploads), good)
    grads = None if uploads.grads is None else center(s, uploads.grads, good)

    def one(sums, client):
        (weight, steps, loss), counts = client
        upload = with_own_part(s, Upload(own, weight, steps, grads, loss), message)
        found = summand(upload)
        return add(sums, jax.tree.map(lambda a: jnp.where(counts, a, 0), found)), None

    told = (uploads.weight, uploads.steps, uploads.loss)
    first = jax.tree.map(lambda a: a[0], uploads)
    zero = zeros_for(jax.eval_shape(summand, first))
    return jax.lax.scan(one, zero, (told, good))[0]


def own_part(s: Settings, upload: Upload, message: Message) -> Any:
    """A client's change without what the augmenting gradient did."""
    return _plus(upload.delta, carried_by(s, message, upload.steps), -1)


def with_own_part(s: Settings, upload: Upload, message: Message) -> Upload:
    """The upload whose delta is an own part, made whole."""
    carried = carried_by(s, message, upload.steps)
    return upload._replace(delta=_plus(upload.delta, carried, 1))


def _plus(tree, carried: dict[str, Any], sign: int):
    def plus(path, leaf):
        n = name(path)
        return (leaf + sign * carried[n]).astype(leaf.dtype) if n in carried else leaf

    return jax.tree_util.tree_map_with_path(plus, tree)


def center(s: Settings, stacked, good):
    """Of trees stacked along the first axis; 0 where no client counts."""
    if s.aggregation == "krum":
        chosen = nearest(stacked, good, s.trim)
        mean = lambda a: _mean(a, _along(chosen, a))  # noqa: E731
        return jax.tree.map(mean, stacked)
    cut = 0.5 if s.aggregation == "median" else s.trim
    return jax.tree.map(lambda a: trimmed_mean(a, good, cut), stacked)


def trimmed_mean(a, good, cut):
    """The mean of each coordinate of a [clients, ...] without the share `cut` of the largest and of
    the smallest; one value or two are left in any case, so that 0.5 is the median."""
    count = jnp.sum(good)
    ordered = in_order(jnp.where(_along(good, a), a, jnp.inf))
    drop = jnp.minimum(part_of(cut, count), (count - 1) // 2)
    place = jnp.arange(len(a))
    return _mean(ordered, _along((place >= drop) & (place < count - drop), a))


def in_order(a):
    """Sorted along the first axis. On a CPU by NumPy, which takes a twentieth of XLA's time."""

    def by_numpy(a):
        shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
        return jax.pure_callback(lambda a: np.sort(np.asarray(a), axis=0), shape, a)

    return jax.lax.platform_dependent(a, cpu=by_numpy, default=lambda a: jnp.sort(a, axis=0))


def nearest(stacked, good, trim):
    """Which clients multi-Krum takes, [clients]: of n, all but the f = trim n (rounded up) whose
    n - f - 2 nearest neighbours are farthest away."""
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
    neighbours = jnp.clip(count - bad - 2, 1, None)
    near = jnp.arange(len(good))[None] < neighbours
    score = jnp.sum(jnp.where(near & jnp.isfinite(ordered), ordered, 0), axis=1)
    # A client that counts comes before one that does not, however far away it is.
    score = jnp.where(good, jnp.minimum(score, FARTHEST), jnp.inf)
    rank = jnp.argsort(jnp.argsort(score))
    return good & (rank < count - bad)


def part_of(share, count):
    """So many of the clients, rounded up: of four, a fifth is one."""
    return jnp.ceil(share * count - 1e-4)


def _mean(a, counts):
    total = jnp.sum(jnp.where(counts, a, 0), axis=0)
    return (total / jnp.maximum(jnp.sum(counts, axis=0), 1)).astype(a.dtype)


def _along(flags, a):
    """Flags [clients], to be used with a [clients, ...]."""
    return flags.reshape(-1, *[1] * (a.ndim - 1))
