"""A run whose engine is a deployment."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from mixfl.deploy.flower.config import chosen
from mixfl.deploy.flower.engine import DeployedEngine
from mixfl.deploy.flower.link import Link
from mixfl.deploy.flower.replies import Clock
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.runs.folder import OPERATION
from mixfl.runs.plan import Plan
from mixfl.runs.result import Result
from mixfl.runs.sinks.terminal import Quiet, reporter
from mixfl.runs.training import run
from mixfl.settings import Settings


def serve(
    problem: Problem, grid: Grid, run_config: Mapping[str, Any], callbacks: Iterable[Any] = ()
) -> Result:
    """A run from its beginning, or from its last checkpoint, to its end."""
    report = reporter(True)
    _, recipe, _, d = chosen(problem, run_config)
    out = Path(d.out or f"runs/{problem.name}-{recipe.id}").absolute()
    report.note(f"the run is kept in {out}")
    plan = deployed(problem, grid, run_config, report, out=out)
    return run(plan, out, True, report, track=d.track or None, callbacks=callbacks)


def deployed(
    problem: Problem, grid: Grid | Link, run_config: Mapping[str, Any], report: Quiet,
    clock: Clock = time, out: Path | None = None,
) -> Plan:  # fmt: skip
    """The plan of a run in the folder `out`, whose clients are the nodes of a grid."""
    problem, recipe, s, d = chosen(problem, run_config)

    def engine(plan: Plan) -> DeployedEngine:
        return DeployedEngine(
            plan.problem, plan.recipe, plan.settings, d, grid, report.note, clock, out
        )

    options = {k: getattr(d, k) for k in OPERATION} | {"cohorts": d.cohorts}
    if d.secure:
        options["secure"] = True
    plan = Plan(problem, recipe, s, options=options, make_engine=engine)
    check_private(s)
    return plan.within_budget()


def check_private(s: Settings) -> None:
    if not s.private:
        return
    if s.dp_sampling != "none":
        raise MixflError(
            f"dp_sampling = {s.dp_sampling} in a deployment: nodes come when they like, so there "
            "is no credit for sampling. Give dp_sampling = none, and dp_min_sep."
        )
    if s.checkpoint_every != 1:
        raise MixflError(
            f"checkpoint_every = {s.checkpoint_every} with differential privacy: a round that is "
            "repeated with other clients must not have the noise of one that nodes have seen. "
            "Leave it at 1."
        )
