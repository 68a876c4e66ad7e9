"""The loop of a run: its rounds, evaluations and checkpoints, until it ends or is stopped."""

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.engine import processes
from mixfl.engine.base import Engine, RoundResult
from mixfl.errors import Diverged, Interrupted, MixflError
from mixfl.measure.gradients import Gradients
from mixfl.runs import manifest
from mixfl.runs.callbacks import Callbacks
from mixfl.runs.checkpoint import Checkpoints, where_model_is
from mixfl.runs.choice import Choice
from mixfl.runs.clock import RoundClock
from mixfl.runs.counts import counted, reasons
from mixfl.runs.endings import diverged, interrupted
from mixfl.runs.evaluation import Evaluation, number
from mixfl.runs.first import by_first, only_first
from mixfl.runs.manifest import Judged
from mixfl.runs.meeting import Meetings
from mixfl.runs.plan import Plan
from mixfl.runs.record import Record
from mixfl.runs.restore import evaluates
from mixfl.runs.sinks.base import Row, Sinks
from mixfl.runs.spending import Spending
from mixfl.runs.stopping import Asked, stop_requested

CHECKPOINT_SECONDS = 60  # a checkpoint at least this often, however long the rounds are


@dataclass
class Loop:
    """One run's rounds. `run` returns the state at the end; `record` has the rest."""

    plan: Plan
    engine: Engine
    sinks: Sinks
    record: Record
    out: Path | None  # the run folder
    checkpoints: Checkpoints | None  # in it; process 0 has them
    # Metrics that are not finite from the start: the evaluation is at fault, not the training.
    never_finite: frozenset[str] = frozenset()
    choice: Choice = Choice(None)
    callbacks: Callbacks = field(default_factory=Callbacks)
    saved: int = 0  # the round of the newest checkpoint
    pending: Evaluation | None = None
    state: Any = None  # the engine's, when the run was interrupted
    best_params: Any = None  # of the best model so far, if it is kept and there is no folder
    due: list[RoundResult] = field(default_factory=list)  # rounds to be checked
    meetings: Meetings = field(default_factory=Meetings)

    def __post_init__(self):
        self.s = self.plan.settings
        self.resolved = self.engine.resolved()
        self.spending = Spending(self.plan, self.engine.repeated())
        self.gradients = None
        if self.s.measure == "dissimilarity":
            self.gradients = Gradients(self.plan.problem, self.s)

    def run(self, state: Any, start: int) -> Any:
        self._count_restarts(start)
        if not self.record.ended:
            with stop_requested(self.out) as asked:
                start, state = self._rounds(state, start, asked)
        self._check_end(start)
        if self.record.ended:
            self.sinks.stopped(self.record.ended)
            self.sinks.note(f"stopped after round {start}: {self.record.ended}")
        return state

    def _count_restarts(self, start: int) -> None:
        if self.spending.repeated and not self.record.ended:
            self.sinks.note(
                f"{self.spending.said()}: each counts as one more round in privacy/epsilon, "
                "because the server may have got the sum of a round that it repeats"
            )
            self.record.ended = self.spending.ends(start)

    def _rounds(self, state: Any, start: int, asked: Asked) -> tuple[int, Any]:
        s, clock = self.s, RoundClock(start)
        saved = time.perf_counter()
        rounds = iter(self.engine.rounds(state, start, s.rounds))
        result = RoundResult(start, state, {})
        try:
            while result.round < s.rounds:
                with clock:
                    result = next(rounds)
                    t = result.round
                    evaluate = evaluates(s, t)
                    save = t % s.checkpoint_every == 0 or t == s.rounds
                    overdue = time.perf_counter() - saved > CHECKPOINT_SECONDS
                    stop, overdue = self.meetings.agreed(t, evaluate or save, asked(), overdue)
                    save = save or overdue or stop
                    self.due.append(result)
                    self._check_due(but=0 if evaluate or save else 1)
                self.sinks.advance(t)
                # Several processes settle at the same rounds; one alone, as soon as it can.
                alone = jax.process_count() == 1
                if evaluate or save or (alone and self.pending and self.pending.done):
                    self._settle()
                if evaluate:
                    self._evaluate(result, clock)
                ended = self._told(result) if self.callbacks.after_rounds else ""
                ended = ended or self.spending.ends(t)
                if ended and not evaluate:  # the last model is always evaluated
                    evaluate = True
                    self._check_due()
                    self._settle()
                    self._evaluate(result, clock)
                if evaluate and self.decides:
                    ended, better = self._decided(result, ended)
                    save = save or better
                self.record.ended = ended if t < s.rounds else ""
                if save or self.record.ended:
                    self._save(t, result.state)
                    saved = time.perf_counter()
                if self.record.ended:
                    break
                if t == start + 1 and not evaluate:  # compilation is not part of a round's time
                    clock.restart(t)
                if stop and t < s.rounds:
                    self.state = result.state
                    raise interrupted(t, s.rounds, self.out, asked.by_file)
        except (Diverged, Interrupted):
            raise
        except MixflError:
            if jax.process_count() == 1:  # otherwise the others may have left
                with contextlib.suppress(MixflError):
                    self._settle()
            raise
        except processes.FAILED as error:
            raise processes.lost(error) or error from None
        finally:
            rounds.close()  # type: ignore[attr-defined]
        return result.round, result.state

    def _told(self, result: RoundResult, row: Row | None = None) -> str:
        """Calls the callbacks. If one fails, the run is saved before it ends."""
        rounds = self.s.rounds
        try:
            if row is None:
                return by_first(lambda: self.callbacks.round(result, rounds))
            return by_first(lambda: self.callbacks.evaluation(result, rounds, row))
        except Exception:
            with contextlib.suppress(MixflError):
                self._check_due()
                self._save(result.round, result.state)
            raise

    @property
    def decides(self) -> bool:
        """Does the course of the run depend on what evaluations say? Then it waits for them."""
        return bool(self.callbacks.after_evaluations) or self.choice.keep

    def _decided(self, result: RoundResult, ended: str) -> tuple[str, bool]:
        """Why the run ends after this evaluation, and whether its model is the best one so far."""
        self._settle()
        rows = self.record.rows
        ended = ended or self.choice.ends(rows)
        if self.callbacks.after_evaluations:
            ended = self._told(result, rows[-1]) or ended
        better = self.choice.keep and self.choice.best(rows) is rows[-1]
        if better and self.out is None:
            self.best_params = jax.tree.map(np.array, result.state.x)
        return ended, better

    def _check_due(self, but: int = 0) -> None:
        """One round may be in flight. It is waited for only if its outcome is needed now."""
        while len(self.due) > but:
            self._check(self.due.pop(0))

    def _check(self, result: RoundResult) -> None:
        """Counts the clients left out, and stops a run that has diverged."""
        t, info, counts = result.round, result.info, self.record.counts
        rejected, clipped = int(info["clients/rejected"]), int(info.get("clients/clipped", 0))
        if rejected and not counts["clients/rejected"] and not reasons(info):
            self.sinks.note(
                f"round {t}: the updates of {rejected} clients were not finite and are left out "
                "(counted in clients/rejected)"
            )
        if clipped and not counts["clients/clipped"]:  # said once; the metrics have the rest
            self.sinks.note(
                f"round {t}: {clipped} client update{'s' if clipped > 1 else ''}, far longer than "
                "the others, shortened (clip; counted in clients/clipped)"
            )
        counts.update({k: int(v) for k, v in info.items() if counted(k)})
        left = sum(float(info.get(f"clients/{p.name}", 0)) for p in self.plan.problem.populations)
        skipped = info.get("rounds/failed", 0)
        self.record.done = self.record.done if skipped else t
        if not bool(info["finite"]) or (rejected and not left and not skipped):
            self._settle()  # earlier rounds are reported first
            raise self._diverged(t)

    def _diverged(self, t: int) -> Diverged:
        return diverged(self.plan.recipe, self.resolved, t, self.s.merge_lr, bool(self.saved))

    def _evaluate(self, result: RoundResult, clock: RoundClock) -> None:
        """Starts to evaluate a round's model, while the next rounds run.

        Not if several CPU devices share a cohort: XLA has one thread for each and no more. They
        would wait for each other's sums, and for the evaluation that has the thread of one of
        them; after a while XLA takes them for stuck and ends the process.
        """
        t, x, measured = result.round, result.state.x, {}
        if self.gradients is not None:
            g2, b2 = self.gradients.dissimilarity(x, t)
            measured = {"theory/g2": number(g2, "g2"), "theory/b2": number(b2, "b2")}
        round_ms = clock.mean_ms(t)
        clock.restart(t)
        row = only_first(lambda: self._row(result, measured, round_ms))
        self.pending = Evaluation(self.plan.problem, t, x, row or {}, self.s.eval_clients)
        if self.resolved.devices not in (1, "auto") and jax.default_backend() == "cpu":
            self._settle()

    def _row(self, result: RoundResult, measured: Row, round_ms: float) -> Row:
        """All but what the evaluation finds."""
        info = {k: v for k, v in result.info.items() if k != "finite" and not counted(k)}
        sent = self.engine.round_bytes(result.round - 1)
        return {
            **{k: number(v, k) for k, v in info.items()},
            **measured,
            **self.spending.row(result.round),
            "clients/rejected": 0,
            **{k: n for k, n in self.record.counts.items() if k != "alarms/loss"},
            "comm/down_bytes": sent.down,
            "comm/up_bytes": sent.up,
            **self._scheduled(result.round - 1),
            "time/round_ms": round(round_ms, 3),
        }

    def _scheduled(self, t: int) -> Row:
        """The rates of round t that change from round to round."""
        s, uses = self.s, self.plan.recipe.uses
        apart = [(p, s.of(p)) for p in self.plan.problem.populations if "client_lr" in p.settings]
        now = s.at(t)
        found = {k: getattr(now, k) for k in s.schedules}
        found |= {"central_lr": now.eta_c} if s.changing_eta_c else {}
        found = {k: v for k, v in found.items() if k in uses}
        found |= {f"{p.name}.client_lr": o.at(t).client_lr for p, o in apart if o.schedules}
        return {f"rate/{k}": float(f"{v:.6g}") for k, v in found.items()}

    def _settle(self) -> None:
        """Waits for the evaluation under way, if there is one, and reports its row."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.record.rows.append(by_first(lambda: self._reported(pending)))

    def _reported(self, pending: Evaluation) -> Row:
        metrics = pending.result()
        loss = metrics.get("eval/loss")
        if "eval/loss" in metrics.keys() - self.never_finite and loss is None:
            raise self._diverged(pending.round)
        if self.record.jumps(loss):
            self.record.counts["alarms/loss"] += 1
            self.sinks.note(self._jump(pending.round, loss))
        alarms = self.record.counts["alarms/loss"]
        row = {"round": pending.round, **metrics, **({"alarms/loss": alarms} if alarms else {}),
               **pending.row}  # fmt: skip
        self.sinks.evaluated(row)
        return row

    def _jump(self, t: int, loss: float | None) -> str:
        before, back = self.record.losses(), ""
        with contextlib.suppress(MixflError, ValueError, OSError):  # not readable: not named
            back = self._way_back()
        return (
            f"the loss jumped from {before[-1]:.4g} to {loss:.4g} in round {t} (the best was "
            f"{min(before):.4g}){back}"
        )

    def _way_back(self) -> str:
        """The best model may be of a round that was not saved: so the checkpoint's own value."""
        best = self.checkpoints.best() if self.checkpoints is not None else None
        if best is None or self.checkpoints is None:
            return ""
        judged = manifest.judged(self.checkpoints.path / str(best))
        value = f", {judged.by} {judged.value:.4g}" if judged is not None else ""
        return (
            f"; of the checkpoints, the best is of round {best}{value}: --from-best goes on there"
        )

    def _save(self, t: int, state: Any) -> None:
        self._settle()  # the rows up to a checkpoint are written before it
        if self.out is not None:
            by_first(lambda: self._write_checkpoint(t, state))
            self.saved = t

    def _write_checkpoint(self, t: int, state: Any) -> None:
        assert self.checkpoints is not None
        meta = {**self.record.meta(), "model": where_model_is(state)}
        value = self.choice.value(self.record.row(t))
        judged = None if value is None else Judged(str(self.choice.by), value)
        self.engine.flush()
        self.checkpoints.save(t, state, meta, judged, secret=self.s.private)
        self.engine.saved(t, self.checkpoints.rounds())
        self.sinks.saved(t)

    def _check_end(self, rounds: int) -> None:
        """A run whose last rounds were all skipped has lost its clients: it has not finished."""
        record = self.record
        skipped = record.skipped(rounds)
        if record.failed(rounds):
            raise MixflError(
                f"{skipped}, up to the end of the run, because too few clients gave a good reply: "
                "there is no model. Find out why; the same command (with --resume, if it takes "
                f"that) goes on from round {record.done}."
            )
        if skipped:
            self.sinks.note(f"{skipped}: the model is that of round {record.done}")
