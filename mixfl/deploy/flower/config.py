"""From a run's configuration in Flower to checked settings, the same at the server and at nodes.

The keys are those of every other run (mixfl/settings.py), and a few of a deployment's own. A key
with a dot in it is of a section of the project's own, and is left alone.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mixfl.algorithms import recipe
from mixfl.algorithms.contract import Recipe
from mixfl.errors import MixflError, unknown
from mixfl.problem import Problem
from mixfl.settings import KEYS, Settings, check_keys, checked, key

ELSEWHERE = {  # what can't be done here, and why
    "oracle": "it trains on the clients' data in one place, which a deployment does not have",
    "example-transfer": "it would send the server's examples to the clients; 1wgt and 2wgt send "
    "gradients instead",
}
# What a client node or the server has no choice in.
UNUSED = frozenset({"cohort_chunk", "devices", "first_layer", "measure"})
COHORTS = ("secret", "seed")


@dataclass(frozen=True)
class Deployment:
    """The keys that only a deployment has."""

    algorithm: str = key("2wgt", "the algorithm's id", kind=str)
    out: str = key("", "folder of the run at the server; runs/<problem>-<algorithm>", kind=str)
    track: str = key("", "a tracker beside the folder: mlflow", kind=str)
    round_deadline: float = key(
        600.0, "seconds after which a round goes on without the clients that have not replied",
        kind=float, above=0,
    )  # fmt: skip
    min_replies: float = key(
        0.5, "share of a cohort without whose replies a round is skipped", kind=float, above=0
    )
    min_clients: int = key(
        0, "clients to wait for in the beginning, if more than cohort_size", kind=int, least=0
    )
    over_select: float = key(
        1.0, "times cohort_size clients are asked, the first cohort_size count", kind=float, least=1
    )
    max_update_norm: float = key(
        1e6, "norm of a client's change above which it is left out", kind=float, above=0
    )
    cohorts: str = key(
        "secret", "drawn from a secret of the server's, or from seed as in the simulator", kind=str
    )
    populations: str = key(
        "", "file at the server with each node's population, by its key", kind=str
    )

    def __post_init__(self):
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, checked(f, getattr(self, f.name)))
        if self.min_replies > 1:
            raise MixflError(f"min_replies = {self.min_replies}: it is a share, at most 1.")
        if self.cohorts not in COHORTS:
            raise unknown("value of cohorts:", self.cohorts, COHORTS)


DEPLOYMENT_KEYS = {f.name: f for f in dataclasses.fields(Deployment)}


def chosen(
    problem: Problem, run_config: Mapping[str, Any]
) -> tuple[Problem, Recipe, Settings, Deployment]:
    """The problem with the weights that were set, and what else a run is made of."""
    given = {k: v for k, v in run_config.items() if "." not in k}
    d = Deployment(**{k: given.pop(k) for k in DEPLOYMENT_KEYS if k in given})
    found = recipe(d.algorithm)
    if found.id in ELSEWHERE:
        raise MixflError(f"{found.id} can't be deployed: {ELSEWHERE[found.id]}.")
    uses = found.uses - UNUSED
    check_keys(given, valid={**KEYS, **DEPLOYMENT_KEYS}, used=uses, by=f"'{found.id}' here")
    check_keys(problem.settings, valid=KEYS)
    keys = {"checkpoint_every": 1, **problem.settings, **given}
    s = Settings(**{k: v for k, v in keys.items() if k in uses})
    return problem.weighted(s.w_f, s.w_c), dataclasses.replace(found, uses=uses), s, d
