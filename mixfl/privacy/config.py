"""What a user says about privacy: `mixfl.DP(...)` and `--dp key=value`, as keys of a run."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mixfl.errors import MixflError, unknown
from mixfl.settings import KEYS


@dataclass(frozen=True)
class DP:
    """Differential privacy of each client, for `mixfl.train(..., dp=mixfl.DP(...))`.

    Give `epsilon`, and the noise follows from it; or `noise_multiplier`; or both, and the run ends
    when epsilon is spent. `docs/privacy.md` explains every field.

    >>> dp = mixfl.DP(noise_multiplier=3.0, delta=1e-3, clip=0.5, sampling="none")
    >>> result = mixfl.train(problem, "fedavg", dp=dp, rounds=2, cohort_size=2, progress=False)
    >>> 0 < result.metrics[-1]["privacy/epsilon"] < 10
    True
    """

    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    clip: float | Literal["adaptive"] = "adaptive"
    clip_start: float | None = None
    clip_quantile: float | None = None
    mechanism: Literal["gaussian", "banded", "distributed"] = "gaussian"
    sampling: Literal["poisson", "fixed", "none"] | None = None
    cap: int | None = None
    min_sep: int | None = None
    clients: int | None = None
    scale: int | None = None  # for studies: this many times the clients and the cohort
    seed: int | None = None  # for tests only: not private

    def keys(self) -> dict[str, Any]:
        """As keys of a run."""
        given = {f"dp_{k}": v for k, v in vars(self).items() if v is not None}
        sampling, cap = given.pop("dp_sampling", None), given.pop("dp_cap", None)
        if sampling is None:
            alone = self.mechanism != "gaussian" or (self.min_sep or 1) > 1
            sampling = "none" if alone else "poisson"
        if cap is not None and sampling != "poisson":
            raise MixflError("dp: cap is for sampling = poisson.")
        drawn = {"poisson": "poisson", "fixed": "uniform", "none": "uniform"}[sampling]
        given |= {"dp_sampling": sampling} | ({"sampling": drawn} if "sampling" in KEYS else {})
        return given | ({"cohort_cap": cap} if cap is not None else {})


FIELDS = [f.name for f in dataclasses.fields(DP)]


def dp_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """`--dp` and `--dp-seed`, as keys of a run."""
    for name in given:
        if name not in FIELDS:
            raise unknown("key for --dp", name, FIELDS)
    if not given:
        return {}
    if given.get("sampling", "poisson") not in ("poisson", "fixed", "none"):
        raise unknown("value of --dp sampling", given["sampling"], ["poisson", "fixed", "none"])
    if "epsilon" not in given and "noise_multiplier" not in given:
        raise MixflError("--dp: give epsilon or noise_multiplier, as in --dp epsilon=4.")
    return DP(**given).keys()
