"""Training from beginning to end: evaluate, log, save, survive."""

import contextlib
import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from mixfl.algorithms.contract import Recipe
from mixfl.engine import processes
from mixfl.engine.base import Engine
from mixfl.engine.native import never_compiled
from mixfl.engine.preflight import preflight
from mixfl.engine.source import source
from mixfl.errors import Interrupted, MixflError
from mixfl.privacy.config import DP
from mixfl.problem import Problem
from mixfl.process.compilation_cache import ProgramsKept
from mixfl.runs.agreement import check_alike
from mixfl.runs.aside import CLIENTS
from mixfl.runs.callbacks import Callbacks
from mixfl.runs.choice import Choice
from mixfl.runs.counts import reasons
from mixfl.runs.evaluation import Metrics, evaluated, one_copy
from mixfl.runs.first import by_first, only_first
from mixfl.runs.found_again import task_of
from mixfl.runs.loop import Loop
from mixfl.runs.notes import start_notes
from mixfl.runs.origin import other_data
from mixfl.runs.outputs import Continue, Outputs, open_outputs
from mixfl.runs.plan import Plan, plan_of
from mixfl.runs.reading import read_run_config
from mixfl.runs.record import Record
from mixfl.runs.restore import Restore, Restored
from mixfl.runs.result import Result, best_model
from mixfl.runs.sinks.base import Sink, Start
from mixfl.runs.sinks.terminal import reporter
from mixfl.runs.sinks.trackers import tracker
from mixfl.settings import Settings
from mixfl.tasks import enough
from mixfl.typed_keys import Keys


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
    callbacks: Iterable[Any] = (),
    dp: DP | None = None,
    **settings: Unpack[Keys],
) -> Result:
    """Train a problem with an algorithm, and keep the run in the folder `out` if one is given.

    `settings` are the keys of `mixfl.Settings`, as type checkers and editors know (typed_keys.py).
    They override those given to the algorithm, which override the problem's.
    `resume`: go on with the run that `out` holds; `from_best`: go on from its best checkpoint;
    `changed_data`: go on although the data has changed; `restart`: start over. Files in the way are
    moved aside.
    `progress`: True, False, or None for a bar on a terminal or curves in a notebook only. Without
    it, notes go to the logger "mixfl". `track`: "mlflow" or "wandb", to log the metrics there too.
    `dp`: train with differential privacy, `mixfl.DP(epsilon=4, delta=1e-6)`.

    In the main thread, Ctrl-C and SIGTERM save the run and stop it with `mixfl.Interrupted`, whose
    `result` has the model and the metrics so far: their handlers are replaced while it trains, and
    put back afterwards. Likewise, JAX caches compiled programs on disk while
    it trains (unless it has a cache of its own). Nothing else in the process is changed; call
    `mixfl.prepare_process()` first to train as fast as the command line does.

    `callbacks`: functions, called with a `mixfl.Event` after each evaluation, or objects with
    `on_evaluation(event)` and `on_round(event)`. An error in one ends the run, which is saved.

    A second training of the same problem that differs only in seed, rates or rounds compiles
    nothing.

    >>> result = mixfl.train(problem, mixfl.two_way_gt(client_lr=0.2), rounds=2, seed=1)
    >>> result.metrics[-1]["round"]
    2
    """
    enough()  # a program may be imported only for its problem
    plan = plan_of(problem, algorithm, {**settings, **(dp.keys() if dp is not None else {})})
    if out is not None:
        plan = dataclasses.replace(plan, task=task_of(problem))
    if track is not None and out is None:
        raise MixflError("track needs a run folder, to find the run again: give out.")
    return run(
        plan, Path(out) if out is not None else None, resume, reporter(progress), track=track,
        restart=restart, from_best=from_best, changed_data=changed_data, callbacks=callbacks,
    )  # fmt: skip


@ProgramsKept()
def run(
    plan: Plan, out: Path | None, resume: bool, report: Sink, label: str = "",
    track: str | None = None, *, restart: bool = False, from_best: bool = False,
    changed_data: bool = False, repeats: Path | None = None, callbacks: Iterable[Any] = (),
) -> Result:  # fmt: skip
    """Makes a run, or the rest of it. Everything is checked before anything is written.

    `report`: the terminal's sink. `label`: what it calls the run. `repeats`: the folder of the run
    that this one repeats.
    """
    then = Continue(resume, restart, from_best, changed_data)
    then.check()
    if changed_data and plan.settings.private:
        raise MixflError(
            "--changed-data with differential privacy: rounds that are made again would have the "
            "same noise on other data, which cancels it. Start a new run in another folder."
        )
    with processes.Together():
        plan = _as_before(plan, out)
        make_tracker = only_first(lambda: tracker(track))
        engine = plan.engine()
        metrics = _checked(plan.problem, plan.settings, engine)
        never_finite = frozenset(k for k, v in metrics.items() if v is None)
        config = plan.config(engine)
        hooks = Callbacks(callbacks, config)
    choice = Choice.of(plan.settings, by_first(lambda: sorted(metrics)))
    check_alike(plan.problem, config)
    notes = [*plan.promise(), *start_notes(engine, never_finite)]
    notes += other_data(repeats, plan.problem) if repeats is not None else []
    start = Start(
        label or plan.recipe.id, plan.problem.name, config, plan.settings.rounds, notes
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        with processes.Together():
            opening = partial(
                open_outputs, out, config, then, report=report, make_tracker=make_tracker,
                files=plan.problem.files, copies=plan.copies(), at_end=stack.callback,
            )  # fmt: skip
            outputs = only_first(opening) or Outputs()
        finished = _finished(engine, outputs, start, choice)
        if finished is not None:
            return finished
        try:
            restored = _restored(plan, engine, outputs, changed_data, stack)
            loop = Loop(
                plan, engine, outputs.sinks, restored.record, out=out, saved=restored.round,
                checkpoints=outputs.checkpoints, never_finite=never_finite, choice=choice,
                callbacks=hooks,
            )  # fmt: skip
            result = _trained(loop, restored, start)
        except BaseException as error:
            outputs.sinks.ended(error)
            raise
        outputs.sinks.ended(None)
        return result


def _as_before(plan: Plan, out: Path | None) -> Plan:
    """What was timed when a run began is not timed again when it goes on: that might come to
    something else."""
    if out is None or plan.settings.loops != "auto" or not (out / "config.toml").is_file():
        return plan
    before = read_run_config(out)
    known = {"loops": before["loops"]} if "loops" in before else {}
    if known.get("loops") == "pytorch" and plan.settings.devices == "auto":
        known["devices"] = before.get("devices", "auto")
    return dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, **known))


def _checked(problem: Problem, s: Settings, engine: Engine) -> Metrics:
    """Looks for mistakes in the problem. Returns the metrics of the initial model, in process 0."""
    chosen = engine.resolved()
    by_pytorch = chosen.loops == "pytorch"
    preflight(never_compiled(problem) if by_pytorch else problem, s, chosen.tables == "rows")
    # A mistake in `evaluate` shows now, not after the first rounds.
    return only_first(lambda: evaluated(problem, one_copy(engine.init().x), s.eval_clients)) or {}


def _finished(engine: Engine, outputs: Outputs, start: Start, choice: Choice) -> Result | None:
    """The result of a run that had finished before; None if it had not."""
    shapes = engine.shapes().x
    params = None

    def rows_if_finished():
        nonlocal params
        rows, params = outputs.finished(start, shapes) or (None, None)
        return rows

    rows = by_first(rows_if_finished)
    if rows is None:
        return None
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    params = processes.share(zeros if params is None else params)
    rejected = rows[-1]["clients/rejected"] if rows else 0
    best = best_model(choice, rows, params, outputs.checkpoints, outputs.sinks)
    return Result(params, rows, start.config, rejected, choice.best(rows), best)


def _restored(
    plan: Plan, engine: Engine, outputs: Outputs, changed_data: bool, stack: contextlib.ExitStack
) -> Restored:
    """Where the run begins or goes on, in all processes."""
    state = engine.init()

    def restored():
        nonlocal state
        round, record = 0, Record()
        if outputs.folder is not None and outputs.checkpoints is not None:
            restore = Restore(
                outputs.folder, outputs.checkpoints, plan.problem, plan.settings, changed_data,
                outputs.sinks.note, source(plan.recipe),
            )  # fmt: skip
            round, state, record = restore(state)
            outputs.folder.frozen = plan.problem.frozen_digest()
            engine.keep(outputs.folder.path / CLIENTS, round)
            stack.callback(outputs.checkpoints.close)
        return round, record.rows, dict(record.counts), record.done, record.ended

    round, *content = by_first(restored)
    return Restored(round, processes.share(state), Record(*content))


def _trained(loop: Loop, restored: Restored, start: Start) -> Result:
    sinks, record = loop.sinks, restored.record
    start = start._replace(round=restored.round, rows=tuple(record.rows))
    by_first(lambda: sinks.begin(start))
    loop.engine.on_progress = sinks.within

    def result(state: Any) -> Result:
        params = jax.tree.map(np.array, state.x)
        best, rows = loop.best_params, record.rows
        if loop.out is not None:
            best = best_model(loop.choice, rows, params, loop.checkpoints, sinks)
        rejected = record.counts["clients/rejected"]
        return Result(params, rows, start.config, rejected, loop.choice.best(rows), best)

    try:
        ended = result(loop.run(restored.state, restored.round))
    except Interrupted as error:
        error.result = result(loop.state)
        raise
    by_first(lambda: sinks.finished(ended.model))
    if ended.rejected:
        why = reasons(record.counts)
        why = f"were left out ({why})" if why else "were not finite and were left out"
        sinks.note(f"{ended.rejected} client updates {why}")
    return ended
