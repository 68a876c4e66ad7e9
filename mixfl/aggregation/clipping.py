"""Clipping: no client moves the model much further per step than clients usually do.

A client's change contains what the augmenting gradient alone would have done. That part is the
server's. The rest is the client's own part, and only that is clipped:

    own      = Delta_i - carried(K_i)
    norm     = ||own|| / K_i                      per local step, as clients take unequal numbers
    Delta_i' = carried(K_i) + own min(1, limit / norm)

With `clip = quantile`, the limit is MARGIN times a running quantile: the median, over the last
WINDOW rounds, of each round's quantile SHARE of its clients' norms. Up to a quarter of the clients
may send what they like in every round without moving it far. Where the norms of most clients rise
together, the median of the round's own norms counts, if it is larger; the first round has only its
own quantile. A sum of gradients that is sent beside the change has a limit of its own.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.algorithms.contract import Algorithm, Message, Upload
from mixfl.algorithms.steps import descend, zeros
from mixfl.forms.low_rank import is_local
from mixfl.optimizers import make
from mixfl.problem import Problem
from mixfl.settings import Settings
from mixfl.trees import name

MARGIN = 3.0
SHARE = 0.75
WINDOW = 32  # rounds
KINDS = 2  # of norms: of the own part, and of the sum of gradients


def histories(problem: Problem, algorithm: Algorithm, s: Settings) -> tuple:
    """Per population, what is known before the first round: [kinds, rounds], 0 for a round that was
    not. Nothing where clients are not clipped."""
    if s.clip == "off" or not algorithm.feed.clients:
        return ()
    return tuple(jnp.zeros((KINDS, WINDOW), jnp.float32) for _ in problem.populations)


def remember(history, norms):
    """The history with a round's norms [kinds, clients]."""
    value = _ranked(norms, lambda n: SHARE * n - 0.5)[:, None]  # of two clients, the larger
    moved = jnp.concatenate([history[:, 1:], value], axis=1)
    return jnp.where(value > 0, moved, history)


def _ranked(norms, rank):
    """Of norms [kinds, clients], those in the given place of their order: [kinds]. What is not
    above 0, or not finite, does not count; 0 if none does."""
    counts = jnp.isfinite(norms) & (norms > 0)
    ordered = jnp.sort(jnp.where(counts, norms, jnp.inf), axis=1)
    number = jnp.sum(counts, axis=1)
    place = jnp.maximum(jnp.floor(rank(number)), 0).astype(jnp.int32)
    found = jnp.take_along_axis(ordered, place[:, None], axis=1)[:, 0]
    return jnp.where(number > 0, found, 0.0)


class Form(NamedTuple):
    """Where a client's delta is not the plain change of a whole parameter, by its name."""

    rows: Mapping[str, Any] = MappingProxyType({})  # tables: [n], which rows are no padding
    grams: Mapping[str, Any] = MappingProxyType({})  # low-rank: X X', [steps, rows, steps, rows]


class Clipping:
    """`clip` of the settings, for one client's upload."""

    def __init__(self, s: Settings):
        self.s = s

    def limits(self, history) -> jax.Array:
        """The largest norm of each kind, [kinds]; infinite while nothing is known."""
        found = MARGIN * jnp.nanmedian(jnp.where(history > 0, history, jnp.nan), axis=1)
        found = jnp.where(jnp.isnan(found), jnp.inf, found)
        return found if self.s.clip == "quantile" else found.at[0].set(self.s.clip)

    def current(self, history, norms) -> jax.Array:
        """The limits of a round whose clients have the given norms [kinds, clients]."""
        known, first = self.limits(history), self.limits(remember(history, norms))
        together = MARGIN * _ranked(norms, lambda n: (n - 1) / 2)  # of two clients, the smaller
        found = jnp.where(jnp.isinf(known), first, jnp.maximum(known, together))
        return found if self.s.clip == "quantile" else found.at[0].set(self.s.clip)

    def norms(self, upload: Upload, message: Message, form: Form = Form()) -> jax.Array:  # noqa: B008
        """Of its own part and of its sum of gradients, per step: [kinds]; NaN of a client without
        a step."""
        carried = carried_by(self.s, message, upload.steps)
        delta = sum(
            _squares(leaf, n, carried.get(n), form) for n, leaf in _leaves(upload.delta).items()
        )
        grads = sum(_squares(leaf, n, None, Form()) for n, leaf in _leaves(upload.grads).items())
        norms = jnp.sqrt(jnp.stack([jnp.asarray(delta), jnp.asarray(grads, jnp.float32)]))
        return jnp.where(upload.steps > 0, norms / jnp.maximum(upload.steps, 1), jnp.nan)

    def clipped(self, upload: Upload, message: Message, norms, limits, form=Form()) -> Upload:  # noqa: B008
        """The upload with its own part, and its sum of gradients, no longer than the limits."""
        factor = jnp.where(norms > limits, limits / jnp.where(norms > 0, norms, 1), 1.0)
        carried = carried_by(self.s, message, upload.steps)

        def shortened(path, leaf):
            n = name(path)
            if is_local(leaf):
                return dataclasses.replace(leaf, c=factor[0] * leaf.c)
            short = factor[0] * leaf
            if n in carried and n not in form.rows:
                short = short + (1 - factor[0]) * carried[n]
            return short.astype(leaf.dtype)

        delta = jax.tree_util.tree_map_with_path(shortened, upload.delta, is_leaf=is_local)
        grads = jax.tree.map(lambda g: (factor[1] * g).astype(g.dtype), upload.grads)
        return upload._replace(delta=delta, grads=grads)

    def all_clipped(self, uploads: Upload, message: Message, before) -> tuple[Upload, Any, Any]:
        """Stacked uploads [clients, ...] of whole parameters, how many were clipped, and their
        norms [kinds, clients]."""
        norms = jax.vmap(lambda u: self.norms(u, message))(uploads)
        limits = self.current(before, norms.T)
        short = jax.vmap(lambda u, n: self.clipped(u, message, n, limits))(uploads, norms)
        over = jnp.any((norms > limits) & jnp.isfinite(norms), axis=1)
        return short, jnp.sum(over, dtype=jnp.int32), norms.T


def carried_by(s: Settings, message: Message, steps) -> dict[str, Any]:
    """By parameter, what so many client steps on the augmenting gradient alone would change."""
    if message.aug is None:
        return {}
    opt = make(s.client_opt, s.client_lr)
    if opt.plain:
        aug = {n: a for n, a in _leaves(message.aug).items() if not is_local(a)}
        return {n: -s.client_lr * steps * a for n, a in aug.items()}
    count = jnp.arange(s.local_steps)
    nothing = lambda x, _: (jnp.zeros(()), zeros(x))  # noqa: E731
    active = (count < steps).astype(jnp.float32)
    x = descend(nothing, opt, message.x, count, opt.init(message.x), active, message.aug)[0]
    return _leaves(jax.tree.map(lambda new, old: new - old, x, message.x))


def _leaves(tree) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_local)
    return {name(path): leaf for path, leaf in paths}


def _squares(leaf, n: str, carried, form: Form):
    """The sum of squares of a parameter's own part."""
    if is_local(leaf):  # ||X' C||^2 = sum of C' (X X') C
        return jnp.einsum("kbh,kbjc,jch->", leaf.c, form.grams[n], leaf.c)
    own = leaf.astype(jnp.float32)
    if n in form.rows:
        held = form.rows[n].reshape(-1, *[1] * (leaf.ndim - 1))
        own = jnp.where(held, own, 0)  # padding may be NaN
    elif carried is not None:
        own = own - carried
    return jnp.sum(own * own)
