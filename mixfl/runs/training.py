"""Training from beginning to end: evaluate, log, save, survive."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.algorithms import recipe as find_recipe
from mixfl.algorithms.contract import Recipe
from mixfl.engine import processes
from mixfl.engine.preflight import preflight
from mixfl.errors import MixflError
from mixfl.problem import Params, Problem
from mixfl.runs.agreement import check_alike
from mixfl.runs.best import back_to_best
from mixfl.runs.counts import reasons
from mixfl.runs.evaluation import evaluated, one_copy
from mixfl.runs.folder import RunDirectory, load_model, read_metrics, read_status
from mixfl.runs.loop import Training
from mixfl.runs.plan import Plan, to_toml
from mixfl.runs.sinks.mlflow import tracker as find_tracker
from mixfl.runs.sinks.terminal import Quiet, reporter
from mixfl.runs.status import Status
from mixfl.settings import KEYS, Settings, check_keys


@dataclass(frozen=True)
class Result:
    params: Params
    metrics: list[dict[str, Any]]  # one row per evaluated round, as in metrics.jsonl
    config: dict[str, Any]
    rejected: int = 0  # client updates that were left out (not finite)


def train(
    problem: Problem,
    algorithm: str | Recipe = "2wgt",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    restart: bool = False,
    from_best: bool = False,
    changed_data: bool = False,
    progress: bool | None = None,
    track: str | None = None,
    **settings: Any,
) -> Result:
    """Train a problem with an algorithm, and keep the run in the folder `out` if one is given.

    `settings` are the keys of `mixfl.Settings`; those given to the algorithm come first.
    `resume`: go on with what `out` holds; `from_best`: from the best of its checkpoints;
    `changed_data`: though the data has changed. `restart`: begin anew there. Both move aside what
    is in the way.
    `progress`: True, False, or None for a bar on a terminal only. `track`: "mlflow", to log the
    metrics there too.
    """
    chosen = find_recipe(algorithm)
    given = chosen.settings | settings
    check_keys(given, valid=KEYS, used=chosen.uses, by=f"'{chosen.id}'")
    check_keys(problem.settings, valid=KEYS)
    keys = {k: v for k, v in problem.settings.items() if k in chosen.uses} | given
    s = Settings(**keys)
    plan = Plan(problem.weighted(s.w_f, s.w_c), chosen, s)
    if track is not None and out is None:
        raise MixflError("track needs the folder of the run, by which it goes on: give out.")
    where = Path(out) if out is not None else None
    return run(
        plan, where, resume, reporter(progress), track=track, restart=restart,
        from_best=from_best, changed_data=changed_data,
    )  # fmt: skip


def run(
    plan: Plan, out: Path | None, resume: bool, report: Quiet, label: str = "",
    track: str | None = None, restart: bool = False, from_best: bool = False,
    changed_data: bool = False,
) -> Result:  # fmt: skip
    """Everything is checked before anything is written."""
    if restart and (resume or from_best):
        raise MixflError("--restart begins anew: leave --resume and --from-best out.")
    first = processes.first()
    report = report if first else Quiet()
    with processes.Together():
        tracker = find_tracker(track if first else None)
        simulator = plan.engine()
        preflight(plan.problem, plan.settings, bool(simulator.forms.tables))
        # A mistake in it shows now, not after the first rounds.
        before = evaluated(plan.problem, one_copy(simulator.init().x)) if first else {}
        config = plan.config(simulator)
    check_alike(plan.problem, config)
    with contextlib.ExitStack() as stack:
        directory, params = None, None
        with processes.Together() as finished:
            if out is not None and first:
                files, again = plan.problem.files, resume or restart or from_best
                directory = RunDirectory(out, config, to_toml(config), again, files)
                stack.callback(directory.close)
                if restart:
                    directory.restart()
                if from_best:
                    back_to_best(out, report.note)
                if directory.finished:
                    params = load_model(out / "model.safetensors", simulator.shapes().x)
                    if read_status(out).get("status") != "finished":  # killed just before it
                        directory.set_status("finished", plan.settings.rounds)
                    report.note(f"{out} is finished already")
                    finished.value = read_metrics(out)
                    tracker.begin(directory, plan.problem.name, config, finished.value, report.note)
                    tracker.end()
        rows = finished.value
        if rows is not None:
            like = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), simulator.shapes().x)
            params = processes.share(like if params is None else params)
            return Result(params, rows, config, rows[-1]["clients/rejected"] if rows else 0)
        status = Status(directory)
        try:
            training = Training(
                plan, simulator, config, out, directory, report, stack, before, tracker, status,
                changed_data,
            )  # fmt: skip
            result = finish(training, training.run(label))
        except BaseException as error:
            status.ended_by(error)
            tracker.end(error)
            raise
        tracker.end()
        return result


def finish(training: Training, state: Any) -> Result:
    """Keeps the model of the last state."""
    params = jax.tree.map(np.array, state.x)
    with processes.Together():
        if training.directory is not None:
            training.directory.save_model(params)
            training.status.finished(training.s.rounds)
    rejected = training.counts["clients/rejected"]
    if rejected:
        told = reasons(training.counts)
        why = f"were left out ({told})" if told else "were not finite and were left out"
        training.report.note(f"{rejected} client updates {why}")
    return Result(params, training.rows, training.config, rejected)
