"""Turns a Flower run configuration into checked settings, the same at the server and at nodes.

The keys are those of every run (mixfl/settings.py), and a few for deployments. A key with a dot
belongs to a section of the user's project and is ignored.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from mixfl.algorithms import recipe
from mixfl.algorithms.contract import Algorithm, Recipe
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.runs.keys import settings_of
from mixfl.settings import KEYS, Settings, check_keys
from mixfl.validation import LARGEST_FLOAT, Index, Positive, check_fields, key

NOT_DEPLOYABLE = {  # and why
    "oracle": "it trains on the clients' data in one place, which a deployment does not have",
    "example-transfer": "it would send the server's examples to the clients; 1wgt and 2wgt send "
    "gradients instead",
}
SIMULATED = {  # and why not here
    "sampling": "cohorts are drawn from the nodes that are connected, with equal chances",
    "drop_rate": "it simulates clients that drop out; here they do so by themselves",
    "late_rate": "it simulates clients that are late; here round_deadline decides",
    "min_speed": "it simulates slow clients; here clients have their own speed",
}
# Keys that have no effect in a deployment.
UNUSED = frozenset({"cohort_chunk", "devices", "first_layer", "measure", "cohort_cap"})


@dataclass(frozen=True)
class Deployment:
    """The keys that only a deployment has."""

    algorithm: str = key("2wgt", "the algorithm's id, or path.py:name with a file of the app")
    out: str = key("", "run folder at the server; runs/<problem>-<algorithm>")
    track: str = key("", "a tracker beside the run folder: mlflow")
    round_deadline: Positive = key(
        600.0, "seconds after which a round goes on without the clients that have not replied"
    )
    min_replies: Annotated[float, Meta(gt=0, le=1)] = key(
        0.5, "share of a cohort that must reply, or the round is skipped"
    )
    min_clients: Index = key(0, "clients to wait for at the start, if more than cohort_size")
    over_select: Annotated[float, Meta(ge=1, le=LARGEST_FLOAT)] = key(
        1.0, "times cohort_size clients are asked; the first cohort_size replies count"
    )
    max_update_norm: Positive = key(1e6, "norm of a client's change above which it is left out")
    cohorts: Literal["secret", "seed"] = key(
        "secret", "drawn from the server's secret, or from seed as in the simulator"
    )
    populations: str = key("", "file at the server with each node's population, by its key")
    linger: Index = key(
        0, "empty messages after each task, which keep a node from sleeping until the next one"
    )
    secure: bool = key(False, "the server gets sums of masked changes, and no single one")

    def __post_init__(self):
        check_fields(self)


DEPLOYMENT_KEYS = {f.name: f for f in dataclasses.fields(Deployment)}


def chosen(
    problem: Problem, run_config: Mapping[str, Any]
) -> tuple[Problem, Recipe, Settings, Deployment]:
    """The problem with its configured weights, the algorithm, and both kinds of settings."""
    names = {term.name for term in problem.populations}
    given = {k: v for k, v in run_config.items() if "." not in k or k.rpartition(".")[0] in names}
    deployment = Deployment(**{k: given.pop(k) for k in DEPLOYMENT_KEYS if k in given})
    algorithm = recipe(deployment.algorithm)
    if algorithm.id in NOT_DEPLOYABLE:
        raise MixflError(f"{algorithm.id} can't be deployed: {NOT_DEPLOYABLE[algorithm.id]}.")
    algorithm = dataclasses.replace(algorithm, uses=algorithm.uses - UNUSED)
    valid = {**algorithm.valid, **DEPLOYMENT_KEYS}
    check_keys(
        [k for k in given if "." not in k],
        valid=valid,
        used=algorithm.uses,
        by=f"'{algorithm.id}' here",
    )
    weighted, s = settings_of(problem, algorithm, given, defaults={"checkpoint_every": 1})
    for name, why in SIMULATED.items():
        if getattr(s, name) != KEYS[name].default:
            raise MixflError(f"{name} = {getattr(s, name)} can't be deployed: {why}.")
    if deployment.secure:
        s = secured(algorithm.id, s, given, deployment.over_select)
    if s.private or deployment.secure:  # the rows that a client asks for would tell what it has
        s = dataclasses.replace(s, tables="dense")
    return weighted, algorithm, s, deployment


SECURE = ("fedavg", "pt", "1wgt", "2wgt", "pretrain", "baseline", "central")
UPLOADS = {"float32": 32, "int16": 16, "int8": 8, "int4": 4}  # bits


def secured(
    algorithm: str, s: Settings, given: Mapping[str, Any], over_select: float = 1.0
) -> Settings:
    """The settings of a run with secure aggregation, or why there can't be one."""
    if algorithm not in SECURE:
        raise MixflError(
            f"secure = true with '{algorithm}': its clients send more than their change, and "
            f"there is no rule for that. Use one of {', '.join(SECURE)}."
        )
    if s.aggregation != "mean":
        raise MixflError(
            f"secure = true with aggregation = {s.aggregation}: it compares the clients' changes, "
            "and the server sees only their sum. Use aggregation = mean, or secure = false."
        )
    if s.clip == "quantile" and "clip" in given:
        raise MixflError(
            "secure = true with clip = quantile: the limit follows the norms of single clients, "
            "which the server does not see. Give clip = off, or a number: clients clip themselves."
        )
    if s.cohort_size < 3:
        raise MixflError(f"secure = true with cohort_size = {s.cohort_size}: at least 3 clients.")
    bits = UPLOADS.get(s.upload, 0)
    if s.private and s.upload != "float32":
        raise MixflError(
            f"secure = true with upload = {s.upload} and differential privacy: the noise needs 32 "
            "bits. Use upload = float32."
        )
    if 2 ** max(bits - 1, 0) - 1 < math.ceil(over_select * s.cohort_size):
        raise MixflError(
            f"secure = true with upload = {s.upload}: a sum of {s.cohort_size} clients' codes, and "
            f"over_select = {over_select:g} times as many, has no room in it. Use int16 or float32."
        )
    if s.private:
        if s.dp_clip == "adaptive" or s.dp_mechanism == "banded":
            raise MixflError(
                "secure = true with differential privacy: clients add the noise, which needs a "
                f"fixed clip norm and dp_mechanism = distributed; got dp_clip = {s.dp_clip}, "
                f"dp_mechanism = {s.dp_mechanism}. Give a number as dp_clip, "
                "and leave out dp_mechanism."
            )
        if over_select > 1.5:
            raise MixflError(
                f"secure = true with differential privacy and over_select = {over_select:g}: two "
                "thirds of those that are asked must be added up, which would be more than "
                "cohort_size, by which the mean divides. Use 1.5 or less."
            )
        s = dataclasses.replace(s, dp_mechanism="distributed")
    return dataclasses.replace(s, clip="off") if s.clip == "quantile" else s


def check_deployable(recipe: Recipe, algorithm: Algorithm) -> None:
    if algorithm.client_state is not None:
        raise MixflError(
            f"{recipe.id} can't be deployed: its clients keep a state between rounds, and nodes "
            "keep nothing. Use it in the simulator; mimelite and fedclg need no such state."
        )
