"""(epsilon, delta) of a number of rounds, by dp-accounting.

Each round releases the sum of the clients' clipped contributions with Gaussian noise of standard
deviation z times the clip norm: z is the noise multiplier. How a cohort is chosen decides what that
is worth:

    poisson  each client joins with probability S/N, on its own. At most `cap` stay.
             PLD accountant, with the truncation. Neighbours: one client more or less
    fixed    a random cohort of exactly S. Neighbours: one client replaced, which moves the sum by
             up to 2C. The better one of: RDP of sampling without replacement; no credit for it
    none     no credit for sampling. A client may take part every min_sep rounds. Neighbours: one
             client's contributions set to zero
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mixfl.errors import MixflError
from mixfl.privacy.banded import sensitivity

Sampling = Literal["poisson", "fixed", "none"]
ADJACENCY = {
    "poisson": "one client more or less",
    "fixed": "one client replaced by another",
    "none": "one client's contributions set to zero",
}
ASSUMES = {
    "poisson": "each client joins a round with probability S/N, independently and in secret",
    "fixed": "each cohort is a random set of S of the N clients, drawn in secret",
    "none": "nothing about who takes part, except that a client waits min_sep rounds",
}
MOST_NOISE, LEAST_NOISE = 1e6, 0.1  # no less, although more than the epsilon asks for
# The grid of privacy losses. A coarse one is ten times as fast, and asks for a little more noise.
FINE, COARSE = 1e-4, 1e-3
PRECISION = 1e-3  # of a noise multiplier that is searched for, relative


@dataclass(frozen=True)
class Rounds:
    """What every round does, for one population."""

    clients: int  # N
    cohort: int  # S, on average
    sampling: Sampling = "poisson"
    cap: int | None = None  # most clients in a Poisson cohort
    min_sep: int = 1
    bands: int = 1  # of the noise; 1: independent from round to round
    discrete: bool = False  # the noise is a sum of the clients' discrete Gaussians

    def check(self) -> None:
        if self.cohort > self.clients:
            raise MixflError(f"a cohort of {self.cohort} of {self.clients} clients: lower it.")
        if self.cap is not None and self.cap < self.cohort:
            raise MixflError(
                f"the cohort has {self.cohort} clients on average, more than the cap of {self.cap} "
                "clients: raise the cap to at least the mean and four standard deviations "
                f"({usual_cap(self.clients, self.cohort)})."
            )

    def accountant(self) -> str:
        if self.sampling == "poisson":
            return "PLD, Poisson sampling" + (f", at most {self.cap}" if self.cap else "")
        if self.sampling == "fixed":
            return "RDP, sampling without replacement, or Gaussian without sampling"
        if self.discrete:
            return "RDP, the clients' discrete Gaussian noise, no sampling"
        return "Gaussian, banded matrix" if self.bands > 1 else "Gaussian, no sampling"

    def epsilon(self, noise: float, rounds: int, delta: float) -> float:
        """Of `rounds` rounds with noise multiplier `noise`."""
        if rounds == 0:
            return 0.0
        if noise == 0:
            return math.inf
        if self.sampling == "poisson":
            cap = None if self.cap is None or self.cap >= self.clients else self.cap
            return _poisson(self.clients, self.cohort, cap, noise, rounds, delta)
        if self.sampling == "fixed":
            plain = _gaussian(noise / (2 * math.sqrt(rounds)), delta)
            if self.cohort == self.clients:
                return plain
            return min(plain, _fixed(self.clients, self.cohort, noise / 2, rounds, delta))
        alone = noise / sensitivity(self.bands, self.min_sep, rounds)
        return _rdp(1.0, alone, 1, delta) if self.discrete else _gaussian(alone, delta)

    @functools.lru_cache(64)  # noqa: B019 (it is small; runs of a study share plans)
    def noise_for(self, epsilon: float, rounds: int, delta: float) -> float:
        """The smallest noise multiplier (up to PRECISION) that keeps `rounds` rounds within
        epsilon."""
        if self.sampling != "poisson":
            return _smallest(lambda z: self.epsilon(z, rounds, delta) <= epsilon)
        q = self.cohort / self.clients
        start = _smallest(lambda z: _rdp(q, z, rounds, delta) <= epsilon, precision=0.02)
        # RDP is quick and asks for a little too much. The truncation costs little and takes long.
        whole = Rounds(self.clients, self.cohort)
        z = _smallest(lambda z: whole.epsilon(z, rounds, delta) <= epsilon, start, 1.05)
        while self.cap is not None and self.epsilon(z, rounds, delta) > epsilon:
            z *= 1 + PRECISION
        return z

    def affordable(self, noise: float, epsilon: float, delta: float, most: int) -> int:
        """How many rounds, up to `most`, stay within epsilon."""
        low, high = 0, 1  # from below: epsilons far above the budget take long to compute
        while high <= most and self.epsilon(noise, high, delta) <= epsilon:
            low, high = high, min(2 * high, most) if high < most else most + 1
        while high - low > 1 and low < most:
            middle = (low + high) // 2
            good = self.epsilon(noise, middle, delta) <= epsilon
            low, high = (middle, high) if good else (low, middle)
        return low


def usual_cap(clients: int, cohort: int) -> int:
    """The mean of a Poisson cohort and four standard deviations."""
    q = cohort / clients
    return min(clients, math.ceil(cohort + 4 * math.sqrt(cohort * (1 - q))))


def _smallest(
    good: Callable[[float], bool], start: float = 1.0, factor: float = 2.0,
    precision: float = PRECISION,
) -> float:  # fmt: skip
    """The smallest number for which `good` holds, up to the precision. It holds for larger ones."""
    low = high = start
    while not good(high):
        low, high = high, high * factor
        if high > MOST_NOISE:
            raise MixflError(
                "no noise multiplier below a million is enough for this epsilon: allow more, train "
                "fewer rounds, or have more clients."
            )
    while low == high and high > LEAST_NOISE:
        low = high / factor
        if good(low):
            high = low
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


def _gaussian(noise: float, delta: float) -> float:
    accounting = _accounting()
    return float(accounting.get_epsilon_gaussian(noise, delta))


@functools.lru_cache(1024)
def _poisson(clients, cohort, cap, noise, rounds, delta) -> float:
    one = _one_round(clients, cohort, cap, noise, FINE if rounds > 100 else COARSE)
    return float(one.self_compose(rounds).get_epsilon_for_delta(delta))


@functools.lru_cache(64)
def _one_round(clients: int, cohort: int, cap: int | None, noise: float, grid: float):
    _accounting()
    from dp_accounting.pld import privacy_loss_distribution as pld

    q = cohort / clients
    if cap is None:
        return pld.from_gaussian_mechanism(
            noise, sampling_prob=q, value_discretization_interval=grid
        )
    return pld.from_truncated_subsampled_gaussian_mechanism(clients, q, cap, noise, grid)


def _rdp(q: float, noise: float, rounds: int, delta: float) -> float:
    accounting = _accounting()
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(range(2, 129))
    event = accounting.PoissonSampledDpEvent(q, accounting.GaussianDpEvent(noise))
    accountant.compose(accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(delta))


def _fixed(clients, cohort, noise, rounds, delta) -> float:
    accounting = _accounting()
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    event = accounting.SampledWithoutReplacementDpEvent(
        clients, cohort, accounting.GaussianDpEvent(noise)
    )
    accountant.compose(accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(delta))


def _accounting():
    try:
        import dp_accounting
    except ImportError as error:
        raise MixflError(
            f"differential privacy: {error}. Install it: pip install 'mixfl[dp]'"
        ) from None
    return dp_accounting
