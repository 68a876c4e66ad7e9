"""Training from beginning to end: evaluate, log, save, survive."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.algorithm import Recipe
from mixfl.algorithms import recipe as find_recipe
from mixfl.engine import RoundResult, processes
from mixfl.engine.preflight import preflight
from mixfl.errors import Diverged, Interrupted, MixflError
from mixfl.problem import Params, Problem
from mixfl.runs.alike import check_alike
from mixfl.runs.checkpoint import Checkpoints
from mixfl.runs.config import Plan, to_toml
from mixfl.runs.directory import Events, RunDirectory, load_model, read_metrics, read_status
from mixfl.runs.evaluation import Evaluation, evaluated, number, one_copy
from mixfl.runs.progress import Quiet, reporter
from mixfl.runs.stopping import stop_requested
from mixfl.runs.trackers import tracker as find_tracker
from mixfl.settings import KEYS, Settings, check_keys
from mixfl.sparse import why_dense
from mixfl.theory.gradients import Gradients

CHECKPOINT_SECONDS = 60  # a checkpoint at least this often, however long the rounds are
MEETING_SECONDS = 1.0  # between two moments at which several processes ask whether to stop


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
    progress: bool | None = None,
    track: str | None = None,
    **settings: Any,
) -> Result:
    """Train a problem with an algorithm, and keep the run in the folder `out` if one is given.

    `settings` are the keys of `mixfl.Settings`; those given to the algorithm come first.
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
    return run(plan, where, resume, reporter(progress), track=track)


def run(
    plan: Plan, out: Path | None, resume: bool, report: Quiet, label: str = "",
    track: str | None = None,
) -> Result:  # fmt: skip
    """Everything is checked before anything is written."""
    first = processes.first()
    report = report if first else Quiet()
    with processes.Together():
        tracker = find_tracker(track if first else None)
        simulator = plan.simulator()
        preflight(plan.problem, plan.settings, bool(simulator.tables))
        # A mistake in it shows now, not after the first rounds.
        before = evaluated(plan.problem, one_copy(simulator.init().x)) if first else {}
        config = plan.config(simulator)
    check_alike(plan.problem, config)
    with contextlib.ExitStack() as stack:
        directory, params = None, None
        with processes.Together() as finished:
            if out is not None and first:
                files = plan.problem.files
                directory = RunDirectory(out, config, to_toml(config), resume, files)
                stack.callback(directory.close)
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
        training = Training(plan, simulator, config, out, directory, report, stack, before, tracker)
        try:
            result = training.run(label)
        except BaseException as error:
            tracker.end(error)
            raise
        tracker.end()
        return result


class Training:
    """One run under way."""

    def __init__(self, plan, simulator, config, out, directory, report, stack, before, tracker):
        self.plan, self.simulator, self.config, self.out = plan, simulator, config, out
        self.directory, self.report, self.s = directory, report, plan.settings
        self.rows: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()  # of clients and rounds, since the beginning
        self.pending: Evaluation | None = None
        # Not finite from the start: what is evaluated is at fault, not the training.
        self.never_finite = {k for k, v in before.items() if v is None}
        self.checkpoints = self.events = None
        self.gradients = None
        if self.s.measure == "dissimilarity":
            self.gradients = Gradients(plan.problem, self.s)
        self.stack, self.tracker = stack, tracker
        self.met = (0, time.perf_counter())  # round and time at which the processes met last
        self.meeting = 0  # the round of their next meeting

    def run(self, label: str) -> Result:
        s, report = self.s, self.report
        state, start = self._begin()
        report.start(label or self.plan.recipe.id, start, s.rounds)
        self.simulator.within = report.within
        self.stack.callback(report.stop)
        for term in (p for p in self.plan.problem.populations if p.here):
            if term.clients.dropped:
                report.note(
                    f"{term.clients.dropped} clients of '{term.name}' have no example and were "
                    f"dropped; {len(term.clients)} remain"
                )
            most = -(-int(term.clients.sizes().max()) // s.client_batch)
            if self.simulator.algorithm.feed.clients and most < s.local_steps:
                report.note(
                    f"no client of '{term.name}' has more than {most} batches of {s.client_batch}: "
                    f"local_steps = {s.local_steps} is never reached"
                )
        marked = [name for p in self.plan.problem.populations for name in p.rows]
        reason = why_dense(self.plan.algorithm(), s)
        if marked and reason and self.simulator.algorithm.feed.clients and s.tables == "auto":
            report.note(f"clients get the whole of {', '.join(marked)}: {reason}")
        layers = {name for weights in self.simulator.low_rank.values() for name in weights}
        if layers and not label:  # a comparison would say it for every run
            report.note(f"low-rank steps at the clients, exact and faster: {', '.join(layers)}")
        if self.never_finite:
            report.note(
                f"{', '.join(sorted(self.never_finite))} of the initial model is not finite: look "
                "at the data and the function that evaluate; it is written as null"
            )
        with processes.Together():
            if self.directory is not None:
                self.directory.set_status("running", start)
        with stop_requested() as asked:
            state = self._loop(state, start, asked)
        return self._finish(state)

    def _begin(self) -> tuple[Any, int]:
        """The first state, or that of the newest checkpoint."""
        state, start = self.simulator.init(), 0
        with processes.Together() as begun:
            if self.directory is not None:
                start, state = self._restored(state)
            begun.value = start, dict(self.counts), self.rows
        start, counts, self.rows = begun.value
        self.counts = Counter(counts)
        return processes.share(state), start

    def _restored(self, state: Any) -> tuple[int, Any]:
        start = 0
        self.checkpoints = Checkpoints(self.directory.path / "checkpoints", self.report.note)
        self.stack.callback(self.checkpoints.close)
        found = self.checkpoints.latest(state)
        if found is not None:
            start, state, meta = found
            self.counts = Counter(meta["counts"])
            self.report.note(f"going on from the checkpoint of round {start}")
        self.rows = self.directory.keep_metrics(start)
        lost = {t for t in range(1, start + 1) if self._evaluates(t)}
        lost -= {row["round"] for row in self.rows}
        if lost:
            self.report.note(f"metrics.jsonl is damaged: it lacks round {min(lost)}")
        self.events = Events(self.directory.path / "tensorboard", start)
        name = self.plan.problem.name
        self.tracker.begin(self.directory, name, self.config, self.rows, self.report.note)
        return start, state

    def _loop(self, state: Any, start: int, asked: Callable[[], bool]) -> Any:
        s = self.s
        saved = time.perf_counter()
        seconds, since, previous = 0.0, start, None
        rounds = iter(self.simulator.rounds(state, start, s.rounds))
        result = RoundResult(start, state, {})
        try:
            while result.round < s.rounds:
                begun = time.perf_counter()
                result = next(rounds)
                t = result.round
                evaluate = self._evaluates(t)
                overdue = time.perf_counter() - saved > CHECKPOINT_SECONDS
                save = t % s.checkpoint_every == 0 or t == s.rounds
                stop, overdue = self._decided(t, evaluate or save, asked(), overdue)
                save = save or overdue or stop
                # One round is in flight; only where its outcome is needed now is it waited for.
                for due in filter(None, [previous, result if evaluate or save else None]):
                    self._check(due)
                previous = None if evaluate or save else result
                seconds += time.perf_counter() - begun
                if t == start + 1 and not evaluate:  # compilation is no part of a round's time
                    seconds, since = 0.0, t
                self.report.advance(t)
                # Several processes settle at the same rounds; one alone, as soon as it can.
                alone = jax.process_count() == 1
                if evaluate or save or (alone and self.pending and self.pending.done):
                    self._settle()
                if evaluate:
                    self._evaluate(result, 1000 * seconds / (t - since))
                    seconds, since = 0.0, t
                if save:
                    self._settle()  # the rows up to a checkpoint are written before it
                    with processes.Together():
                        if self.checkpoints is not None:
                            self.checkpoints.save(t, result.state, {"counts": dict(self.counts)})
                    saved = time.perf_counter()
                if stop and t < s.rounds:
                    self._interrupted(t)
        except Diverged as error:
            if self.directory is not None:
                self.directory.set_status("diverged", error.round, str(error))
            raise
        except Interrupted:
            raise
        except MixflError as error:
            if jax.process_count() == 1:  # otherwise others may have left
                with contextlib.suppress(MixflError):
                    self._settle()
            self._failed(result.round, error)
            raise
        except processes.FAILED as error:
            lost = processes.lost(error)
            if lost is None:
                raise
            self._failed(result.round, lost)
            raise lost from None
        finally:
            rounds.close()  # type: ignore[attr-defined]
        return result.state

    def _decided(self, t: int, meet: bool, stop: bool, overdue: bool) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint is overdue. Several processes do what one of
        them wants; they ask each other about once a second, as process 0 counts it, and where
        they meet anyway."""
        if jax.process_count() == 1:
            return stop, overdue
        if t < self.meeting and not meet:
            return False, False
        now = time.perf_counter()
        rounds = (t - self.met[0]) / max(now - self.met[1], 1e-3) * MEETING_SECONDS
        wishes = processes.gather([stop, overdue, max(1, int(rounds))])
        self.met, self.meeting = (t, now), t + wishes[0][2]
        return any(w[0] for w in wishes), any(w[1] for w in wishes)

    def _failed(self, t: int, error: MixflError) -> None:
        if self.directory is not None:
            with contextlib.suppress(MixflError):
                self.directory.set_status("failed", t, str(error))

    def _evaluates(self, t: int) -> bool:
        return t % self.s.eval_every == 0 or t == self.s.rounds

    def _check(self, result: RoundResult) -> None:
        """Counts the clients left out, and stops a run that has diverged."""
        info = result.info
        rejected = int(info["clients/rejected"])
        if rejected and not self.counts["clients/rejected"] and not _reasons(info):
            self.report.note(
                f"round {result.round}: the updates of {rejected} clients were not finite and "
                "are left out (counted in clients/rejected)"
            )
        self.counts.update({k: int(v) for k, v in info.items() if _counted(k)})
        left = sum(float(info.get(f"clients/{p.name}", 0)) for p in self.plan.problem.populations)
        skipped = info.get("rounds/failed", 0)
        if not bool(info["finite"]) or (rejected and not left and not skipped):
            self._settle()  # what was evaluated before is said before
            raise self._diverged(result.round)

    def _diverged(self, t: int) -> Diverged:
        s, uses = self.s, self.plan.recipe.uses
        resolved = {k: self.config.get(k) for k in ("client_lr", "central_lr", "server_lr")}
        lower = [f"{k} (now {v:g})" for k, v in resolved.items() if k in uses and v is not None]
        hint = f"lower {' or '.join(lower)}"
        if self.plan.recipe.id == "2wgt" and s.merge_lr != "auto":
            hint += f", or set merge_lr = auto (now {s.merge_lr:g})"
        saved = self.checkpoints is not None and self.checkpoints.saved()
        kept = " The last good checkpoint is kept." if saved else ""
        return Diverged(
            f"{self.plan.recipe.id} diverged in round {t}: the model is no longer finite, or no "
            f"client's update is. To get on, {hint}.{kept}", t,
        )  # fmt: skip

    def _evaluate(self, result: RoundResult, round_ms: float) -> None:
        """Begins to evaluate a round's model, beside the following rounds.

        Not where several CPU devices share a cohort: XLA has a thread for each and no more, so
        that they would wait for each other's sums, and for the evaluation that has the thread of
        one of them; after a while XLA takes them for stuck and ends the process.
        """
        t, row, measured = result.round, {}, {}
        if self.gradients is not None:
            g2, b2 = self.gradients.dissimilarity(result.state.x, t)
            measured = {"theory/g2": number(g2, "g2"), "theory/b2": number(b2, "b2")}
        if processes.first():
            info = {k: v for k, v in result.info.items() if k != "finite" and not _counted(k)}
            row = {k: number(v, k) for k, v in info.items()} | measured
            down, up = self.simulator.message_bytes(t - 1)
            row |= {
                "clients/rejected": 0,
                **self.counts,
                "comm/down_bytes": down,
                "comm/up_bytes": up,
                "time/round_ms": round(round_ms, 3),
            }
        self.pending = Evaluation(self.plan.problem, t, result.state.x, row)
        if self.simulator.devices > 1 and jax.default_backend() == "cpu":
            self._settle()

    def _settle(self) -> None:
        """Waits for the evaluation that is under way, if any, and logs its row."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        with processes.Together() as judged:
            if processes.first():
                found = pending.result()
                if found.get("eval/loss", 0.0) is None and "eval/loss" not in self.never_finite:
                    raise self._diverged(pending.round)
                judged.value = {"round": pending.round, **found, **pending.row}
                self._write(judged.value)
        self.rows.append(judged.value)

    def _write(self, row: dict[str, Any]) -> None:
        if self.directory is not None and self.events is not None:
            self.directory.add_metrics(row)
            self.events.add(row)
            self.tracker.add(row)
        self.report.evaluated(row)

    def _interrupted(self, t: int) -> None:
        if self.out is None:
            raise Interrupted(f"stopped after round {t}; nothing is saved, as no folder was given.")
        with processes.Together():
            if self.directory is not None:
                self.directory.set_status("interrupted", t)
        raise Interrupted(
            f"stopped after round {t} of {self.s.rounds}; the state is saved in {self.out}. "
            "The same command with --resume goes on."
        )

    def _finish(self, state: Any) -> Result:
        params = jax.tree.map(np.array, state.x)
        with processes.Together():
            if self.directory is not None:
                self.directory.save_model(params)
                self.directory.set_status("finished", self.s.rounds)
        rejected = self.counts["clients/rejected"]
        if rejected:
            reasons = _reasons(self.counts)
            why = f"were left out ({reasons})" if reasons else "were not finite and were left out"
            self.report.note(f"{rejected} client updates {why}")
        return Result(params, self.rows, self.config, rejected)


COUNTED = (
    "clients/rejected", "clients/asked", "clients/accepted", "clients/surplus",
    "replies/duplicate", "replies/unknown", "rounds/failed",
)  # fmt: skip


def _counted(key: str) -> bool:
    """Is it added up over the rounds?"""
    return key in COUNTED or key.startswith("clients/rejected/")


def _reasons(counts: Mapping[str, Any]) -> str:
    """Why clients were left out, where an engine tells: `3 late, 1 shape`."""
    start = "clients/rejected/"
    return ", ".join(
        f"{n} {k.removeprefix(start)}" for k, n in sorted(counts.items()) if k.startswith(start)
    )
