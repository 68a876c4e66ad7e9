"""A run whose engine is a deployment."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.serverapp import Grid

from mixfl.deploy.flower.config import Deployment, chosen
from mixfl.deploy.flower.engine import DeployedEngine
from mixfl.deploy.flower.link import Link
from mixfl.deploy.flower.replies import Clock
from mixfl.problem import Problem
from mixfl.process.compilation_cache import keep_programs
from mixfl.runs.folder import OPERATION
from mixfl.runs.plan import Plan
from mixfl.runs.sinks.terminal import Quiet, reporter
from mixfl.runs.training import Result, run


class Deployed(NamedTuple):
    plan: Plan
    engine: DeployedEngine


def serve(problem: Problem, grid: Grid, run_config: Mapping[str, Any]) -> Result:
    """A run from its beginning, or from its last checkpoint, to its end."""
    keep_programs()
    report = reporter(True)
    d = chosen(problem, run_config)[3]
    out = Path(d.out or f"runs/{problem.name}-{d.algorithm}").absolute()
    plan, engine = deployed(problem, grid, run_config, report, out=out)
    report.note(f"the run is kept in {out}")
    return run(plan, out, True, report, track=d.track or None, engine=engine)


def deployed(
    problem: Problem, grid: Grid | Link, run_config: Mapping[str, Any], report: Quiet,
    clock: Clock = time, out: Path | None = None,
) -> Deployed:  # fmt: skip
    problem, recipe, s, d = chosen(problem, run_config)
    options = {k: getattr(d, k) for k in OPERATION} | {"cohorts": d.cohorts}
    plan = Plan(problem, recipe, s, options=options)
    return Deployed(plan, DeployedEngine(problem, recipe, s, d, grid, report.note, clock, out))


__all__ = ["Deployed", "Deployment", "deployed", "serve"]
