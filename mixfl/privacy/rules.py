"""What a private run may not do, and what it does in its place."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mixfl.errors import MixflError
from mixfl.settings import Settings

ALGORITHMS = ("fedavg", "pt", "1wgt", "2wgt", "pretrain", "baseline", "example-transfer")
# What would be told about clients, and is not in the budget.
REFUSED = {
    "measure": ("none", "it measures the clients' gradients without noise"),
    "aggregation": ("mean", "it compares the clients' changes, and no bound is known for one of "
                            "them: clipping bounds what a client can do"),
    "drop_rate": (0.0, "who drops out would have to be drawn before the cohort"),
    "late_rate": (0.0, "who is late would have to be drawn before the cohort"),
}  # fmt: skip


def applied(algorithm: str, s: Settings) -> Settings:
    """The settings of a private run, or why there can't be one. Others stay as they are."""
    if not s.private:
        if s.dp_delta is not None or s.dp_seed is not None:
            raise MixflError("dp: give epsilon or noise_multiplier, as in --dp epsilon=4.")
        return s
    if algorithm not in ALGORITHMS:
        raise MixflError(
            f"'{algorithm}' has no differential privacy: what its clients send or keep, beside "
            f"their change of the model, has no bound. Use one of {', '.join(ALGORITHMS)}."
        )
    for name, (value, why) in REFUSED.items():
        if getattr(s, name) != value:
            raise MixflError(f"{name} = {getattr(s, name)} with differential privacy: {why}.")
    if s.clip not in ("quantile", "off"):
        raise MixflError(f"clip = {s.clip:g} with differential privacy: give --dp clip={s.clip:g}.")
    if s.dp_delta is None:
        raise MixflError("dp: delta is missing. Well below 1/clients, as in --dp delta=1e-6.")
    sampling, drawn = s.dp_sampling, s.sampling
    if (sampling == "poisson") != (drawn == "poisson") or drawn == "examples":
        raise MixflError(
            f"dp_sampling = {sampling} with sampling = {drawn}: the accountant must know how "
            "cohorts are drawn. Give --dp sampling=poisson, fixed or none, and nothing else."
        )
    if sampling != "none" and (s.dp_min_sep > 1 or s.dp_mechanism != "gaussian"):
        raise MixflError(
            f"dp: mechanism = {s.dp_mechanism} and min_sep = {s.dp_min_sep} get no credit for "
            "sampling: give --dp sampling=none."
        )
    if s.dp_mechanism == "banded" and s.dp_clip == "adaptive":
        raise MixflError("dp: mechanism = banded needs a clip norm, as in --dp clip=0.5.")
    return dataclasses.replace(s, weighting="uniform", clip="off")


def check_epochs(keys: Mapping[str, Any]) -> None:
    """Before local_steps is counted from the data."""
    if keys.get("dp_epsilon") is not None or keys.get("dp_noise_multiplier") is not None:
        raise MixflError(
            "local_epochs with differential privacy: give local_steps too. Otherwise the largest "
            "client would decide it, and the server's constants would tell."
        )


def check_optimizer(algorithm: str, s: Settings, plain: bool) -> None:
    if s.private and algorithm == "2wgt" and s.dp_mechanism == "banded" and not plain:
        raise MixflError(
            "dp: 2wgt with mechanism = banded needs client_opt = sgd: otherwise clients send two "
            "arrays."
        )


def notes(s: Settings) -> Iterator[str]:
    if not s.private:
        return
    if s.dp_seed is not None:
        yield "NOT PRIVATE: the noise comes from dp_seed, which is for tests only"
    if s.dp_scale > 1:
        yield (
            f"NOT PRIVATE: simulates {s.dp_scale} times the clients and the cohort (dp_scale), "
            "with the noise that the mean of such a cohort would have"
        )
    if s.dp_noise_multiplier == 0:
        yield "NOT PRIVATE: the noise multiplier is 0"
    yield (
        "differential privacy: uniform weights, S and K as constants; training losses, counts of "
        "clients and rejected clients are not told"
    )


def private_options(
    options: Mapping[str, Any], keys: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """A task's own keys. What they would compute from the clients' data is not in the budget."""
    private = any(keys.get(k) is not None for k in ("dp_epsilon", "dp_noise_multiplier"))
    if not private or options.get("inputs") != "standardized":
        return dict(options)
    if "inputs" in given:
        raise MixflError(
            "inputs = standardized with differential privacy: it needs the clients' sums without "
            "noise. Give inputs = central."
        )
    return {**options, "inputs": "central"}
