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

from mixfl.aggregation.clipping import carried_by
from mixfl.algorithm import Message, Upload
from mixfl.settings import Settings
from mixfl.sparse import zeros_for
from mixfl.steps import add
from mixfl.trees import name


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
    drop = jnp.minimum(part_of(cut, count), (count - 1) // 2).astype(jnp.int32)
    last = count - 1 - drop
    values = jnp.where(_along(good, a), a, jnp.inf).astype(jnp.float32)
    keys = _ordered(values)
    low, high = kth(keys, drop), kth(keys, last)
    between = jnp.sum(jnp.where((keys > low) & (keys < high), values, 0), axis=0)
    # Of values that are equal to the ends, as many as are not dropped.
    lows = jnp.sum(keys <= low, axis=0) - drop
    highs = last + 1 - jnp.sum(keys < high, axis=0)
    total = between + lows * _value(low) + highs * _value(high)
    mean = jnp.where(low == high, _value(low), total / jnp.maximum(last + 1 - drop, 1))
    return jnp.where(count > 0, mean, 0).astype(a.dtype)


def kth(keys, k):
    """The k-th smallest of each coordinate of keys [clients, ...], from 0. By bisection: sorting
    so many short columns takes XLA a hundred times as long on a CPU."""

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without an overflow
        below = jnp.sum(keys <= middle, axis=0) > k
        return jnp.where(below, low, middle + 1), jnp.where(below, middle, high)

    ends = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    whole = tuple(jnp.full(keys.shape[1:], end, jnp.int32) for end in ends)
    return jax.lax.fori_loop(0, 32, halve, whole)[1]


def _ordered(values):
    """Whole numbers in the order of the values."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _value(key):
    """The value of a whole number of `_ordered`."""
    bits = jnp.where(key < 0, key ^ jnp.iinfo(jnp.int32).max, key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


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
    both = good[:, None] & good[None] & ~jnp.eye(len(good), dtype=bool)
    ordered = jnp.sort(jnp.where(both, distance, jnp.inf), axis=1)
    count = jnp.sum(good)
    bad = part_of(trim, count)
    neighbours = jnp.clip(count - bad - 2, 1, None)
    near = jnp.arange(len(good))[None] < neighbours
    score = jnp.where(
        good, jnp.sum(jnp.where(near & jnp.isfinite(ordered), ordered, 0), 1), jnp.inf
    )
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
