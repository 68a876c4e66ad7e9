"""Differential privacy of a client's whole contribution (docs/privacy.md).

    u_i' = u_i min(1, C / ||u_i||)                  each client's own part, whatever it has seen
    U    = sum u_i' + z C N(0, 1)                   once a round, on every row of every table

What the server divides by (S clients, K steps each) are constants of the configuration: the sums
that an algorithm gets have nothing else from the clients in them. A client whose change is not
finite adds nothing. With an optimizer whose changes don't determine the gradients, 2-way also gets
their sum. Both are clipped as one vector, (u_i, scale x gradients).

With `dp_clip = adaptive`, C follows a quantile of the norms (Andrew et al., 2021): each client adds
+-1/2 for "my norm is at most C", and that sum gets noise too. Its part of the privacy is paid with
somewhat more noise on U: 1/z^2 = 1/z_u^2 + 1/z_bits^2.

The noise comes from a secret key, which only the run's state has. jax-privacy draws it.
"""

import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.aggregation.base import Step
from mixfl.algorithms.contract import Sums
from mixfl.errors import MixflError
from mixfl.forms.base import leaves_and_parts, map_parts, scaled, squares
from mixfl.privacy.banded import bands, coefficients
from mixfl.settings import Settings

CLIP_RATE = 0.2  # how fast an adaptive C moves
BITS = 1 / 20  # noise of the bits' sum, as a part of the cohort


def choose(s: Settings) -> Step | None:
    return Private(s) if s.private else None


class State(NamedTuple):
    clip: Any  # C
    noise: Any  # of the sum, in clip norms: z_u
    bits: Any  # of the sum of bits
    quantile: Any
    scale: Any  # of gradients beside a change
    cohorts: Any  # the secret that cohorts are drawn from
    key: Any  # of the bits' noise
    stream: Any  # jax-privacy's: the key of the next round's noise, and correlated noise so far


class Private(Step):
    at_client = False  # the server is trusted with single changes, and clients need not be
    squares = both = private = True

    def __init__(self, s: Settings):
        self.clients, self.steps = s.cohort_size, s.local_steps
        self.adaptive = s.dp_clip == "adaptive"
        self.bands = bands(s.dp_min_sep) if s.dp_mechanism == "banded" else 1
        self._settings = Hidden(s)

    def init(self, x, population):
        s = self._settings.value
        cohorts, first, second = secret_keys(s.dp_seed, population)
        clip = s.dp_clip_start if self.adaptive else s.dp_clip
        numbers = (clip, *deviations(s), s.dp_clip_quantile, _scale(s))
        stream = (first, self._matrix().init_multiply(self._like(x)))
        return State(*(jnp.float32(n) for n in numbers), cohorts, second, stream)

    def told(self, state):
        return state.clip, state.scale

    def bound(self, told):
        return told

    def encode(self, told, summand: Sums, key):
        clip, scale = told
        own, more = (_squared(tree) for tree in (summand.weighted, summand.grads))
        norm = jnp.sqrt(own + jnp.square(scale) * more)
        factor = jnp.where(norm > clip, clip / jnp.where(norm > 0, norm, 1), 1.0)

        def shortened(tree):
            return None if tree is None else map_parts(lambda a: scaled(factor, a), tree)

        code = summand._replace(
            weighted=shortened(summand.weighted), grads=shortened(summand.grads)
        )
        return code, jnp.stack([norm, jnp.minimum(summand.steps, 1.0)])

    def finite(self, report):
        return jnp.isfinite(report[0])

    def changed(self, told, settled, reports):
        return jnp.any(~jnp.isfinite(reports))

    def release(self, state: State, sums: Sums):
        if sums.unweighted is not None or sums.extra is not None:
            raise MixflError(
                "this algorithm's clients send more than their change, and there is no rule for "
                "the privacy of that: use fedavg, pt, 1wgt, 2wgt, pretrain or baseline."
            )
        trees = (sums.weighted, sums.grads) if self.bands == 1 else sums.weighted
        unit, stream = self._drawn(trees, state.stream)
        weighted, grads = unit if self.bands == 1 else (unit, None)
        size = state.noise * state.clip

        def noised(tree, noise, size):
            add = lambda a, n: (a + size * n).astype(a.dtype)  # noqa: E731
            return None if tree is None else jax.tree.map(add, tree, noise)

        clients = jnp.float32(self.clients)
        steps = jnp.zeros_like(sums.by_steps).at[-1].set(clients)
        released = Sums(
            weighted=noised(sums.weighted, weighted, size), weight=clients, unweighted=None,
            grads=noised(sums.grads, grads, size / state.scale), steps=clients * self.steps,
            by_steps=steps, loss=jnp.float32(0), clients=clients,
        )  # fmt: skip
        return released, state._replace(stream=stream)

    def next(self, state: State, reports):
        if not self.adaptive:
            return state
        key, now = jax.random.split(state.key)
        norms, there = reports[:, 0], reports[:, 1] > 0
        below = jnp.sum(jnp.where(there, (norms <= state.clip) - 0.5, 0.0))
        share = (below + state.bits * jax.random.normal(now)) / self.clients + 0.5
        moved = state.clip * jnp.exp(-CLIP_RATE * (jnp.clip(share, 0, 1) - state.quantile))
        return state._replace(clip=moved, key=key)

    def renewed(self, state: State, population):
        if self._settings.value.dp_seed is not None:
            return state
        _, first, second = secret_keys(None, population)
        return state._replace(key=second, stream=(first, state.stream[1]))

    def cohort_seed(self, state: State) -> int:
        """Cohorts are drawn in secret too: whoever knows who took part gets more out of a round."""
        return int.from_bytes(np.asarray(state.cohorts).tobytes(), "little")

    def _matrix(self):
        from jax_privacy.matrix_factorization import streaming_matrix, toeplitz

        if self.bands == 1:
            return streaming_matrix.identity()
        return toeplitz.inverse_as_streaming_matrix(jnp.float32(coefficients(self.bands)))

    def _like(self, tree):
        return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)

    def _drawn(self, trees, stream):
        """A round's noise of standard deviation 1 (before it is correlated), for every number."""
        from jax_privacy.noise_addition import matrix_factorization_privatizer

        privatizer = matrix_factorization_privatizer(
            self._matrix(), stddev=1.0, prng_key=stream[0], dtype=jnp.float32
        )
        return privatizer.update(self._like(trees), stream)


class Hidden:
    """Settings of which a compiled round needs nothing: what it needs is in the state. So runs that
    differ in them share programs."""

    def __init__(self, value: Settings):
        self.value = value

    def __repr__(self) -> str:
        return "Hidden"


def deviations(s: Settings) -> tuple[float, float]:
    """Of the noise of the sum, in clip norms, and of the noise of the bits. With dp_scale, of the
    noise that the mean of the larger cohort would have."""
    z = s.dp_noise_multiplier or 0.0
    if z == 0:
        return 0.0, 0.0
    bits = max(BITS * s.cohort_size * s.dp_scale, z)
    noise = (z**-2 - (2 * bits) ** -2) ** -0.5 if s.dp_clip == "adaptive" else z
    return noise / s.dp_scale, bits / s.dp_scale


def secret_keys(seed: int | None, population: int) -> list[jax.Array]:
    """Three keys of two words. Without a seed, nobody can know them."""
    if seed is None:
        words: np.ndarray = np.frombuffer(os.urandom(24), np.uint32)
    else:
        words = np.random.SeedSequence([seed, population]).generate_state(6)
    return [jnp.asarray(key) for key in words.reshape(3, 2)]


def _scale(s: Settings) -> float:
    """Any constant keeps the promise. With the rate, both parts are of about the same length."""
    rate: Any = s.client_lr
    return float(rate) if isinstance(rate, int | float) and math.isfinite(rate) else 1.0


def _squared(tree) -> Any:
    return sum(map(squares, leaves_and_parts(tree)), jnp.float32(0))
