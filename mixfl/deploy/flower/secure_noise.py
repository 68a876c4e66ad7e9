"""Differential privacy in which the clients add the noise, so that nobody sees a sum without it.

A client shortens its own part to the norm C, rounds it to a grid of whole numbers, and adds
discrete Gaussian noise (Canonne et al., 2020). The sum of T clients' noise has the standard
deviation sigma sqrt(T); it is sized for the fewest clients that a sum may have:

    G       = grid steps in C, many: at least 64 sqrt(d) for d numbers
    D       = G + sqrt(d) / 2             the largest norm after rounding: the sensitivity
    sigma   = z D / sqrt(T)               per client, T = two thirds of the cohort

A sum of discrete Gaussians is not quite one. Its Renyi divergences exceed those of a Gaussian by
terms in exp(-pi^2 sigma^2) (Kairouz et al., 2021, theorem 1): with sigma >= 8, they are below
1e-270, whatever the number of clients. So the accountant is RDP, with noise multiplier z.
"""

import math
import os

import numpy as np

from mixfl.deploy.secure.graph import threshold
from mixfl.errors import MixflError
from mixfl.settings import Settings

LEAST_SIGMA = 8.0
STEPS = 64.0  # of the grid, in C / sqrt(d)
TAILS = 12.0  # standard deviations of noise that a sum has room for


class Grid:
    """Of a round. `numbers`: how many a client sends."""

    def __init__(self, s: Settings, noise: float, numbers: int, clients: int):
        assert isinstance(s.dp_clip, float | int)
        if not noise > 0:
            raise MixflError("secure, with a noise multiplier of 0: leave out dp_* keys.")
        # A round may have more clients than it needs (over_select). Fewer than two thirds of them
        # are never added up.
        self.fewest = threshold(clients)
        root = math.sqrt(numbers)
        self.steps = max(STEPS * root, LEAST_SIGMA * math.sqrt(self.fewest) / noise)
        self.sensitivity = self.steps + root / 2
        self.sigma = noise * self.sensitivity / math.sqrt(self.fewest)
        self.clip = float(s.dp_clip)
        rate = s.client_lr
        known = isinstance(rate, int | float) and math.isfinite(rate)
        self.scale = float(rate) if known else 1.0  # type: ignore[arg-type]
        self.step = self.clip / self.steps
        largest = clients * (self.steps + 1) + TAILS * self.sigma * math.sqrt(clients)
        if largest >= 2**31:
            raise MixflError(
                f"secure with differential privacy: a sum of {clients} clients' {numbers} numbers "
                f"with noise multiplier {noise:g} does not fit 32 bits."
            )

    def coded(self, flat: np.ndarray, changes: int) -> np.ndarray:
        """Whole numbers, of a norm of at most `sensitivity`. The first `changes` are of the model;
        gradients count as `scale` times themselves, as in aggregation/private.py."""
        scaled = flat.copy()
        scaled[changes:] *= self.scale
        with np.errstate(all="ignore"):
            norm = float(np.sqrt(np.sum(np.square(scaled))))
        if not math.isfinite(norm):
            return np.zeros(len(flat), np.int64)
        factor = min(1.0, self.clip / norm) if norm > 0 else 1.0
        return np.rint(scaled * (factor / self.step)).astype(np.int64)

    def decoded(self, numbers: np.ndarray, changes: int) -> np.ndarray:
        found = numbers * self.step
        found[changes:] /= self.scale
        return found


def discrete_gaussian(sigma: float, count: int) -> np.ndarray:
    """Draws from the discrete Gaussian: discrete Laplace numbers, of which some are kept (Canonne
    et al., 2020, algorithm 3). Randomness is the system's; probabilities are of 53 bits."""
    found = np.empty(count, np.int64)
    have, scale = 0, math.floor(sigma) + 1
    while have < count:
        drawn = _discrete_laplace(scale, 2 * (count - have) + 64)
        distance = np.abs(drawn) - sigma**2 / scale
        kept = drawn[_uniform(len(drawn)) < np.exp(-np.square(distance) / (2 * sigma**2))]
        taken = kept[: count - have]
        found[have : have + len(taken)] = taken
        have += len(taken)
    return found


def _discrete_laplace(scale: int, count: int) -> np.ndarray:
    """P(k) ~ exp(-|k| / scale): the difference of two geometric numbers."""
    both = np.floor(np.log(_uniform(2 * count)) * -scale).astype(np.int64)
    return both[:count] - both[count:]


def _uniform(count: int) -> np.ndarray:
    """In (0, 1)."""
    words = np.frombuffer(os.urandom(8 * count), np.uint64)
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
