"""The loop of a run: its rounds, evaluations and checkpoints, until it has ended or is stopped."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from mixfl.engine import RoundResult, processes
from mixfl.errors import Diverged, Interrupted, MixflError
from mixfl.measure.gradients import Gradients
from mixfl.runs import origin
from mixfl.runs.alarm import jumped
from mixfl.runs.checkpoint import Checkpoints, where_model_is
from mixfl.runs.counts import counted, reasons, too_many
from mixfl.runs.evaluation import Evaluation, number
from mixfl.runs.notes import noteworthy
from mixfl.runs.sinks.tensorboard import Events
from mixfl.runs.stopping import stop_requested

CHECKPOINT_SECONDS = 60  # a checkpoint at least this often, however long the rounds are
MEETING_SECONDS = 1.0  # between two moments at which several processes ask whether to stop


class Training:
    """One run under way."""

    def __init__(
        self, plan, simulator, config, out, directory, report, stack, before, tracker, status,
        changed,
    ):  # fmt: skip
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
        self.stack, self.tracker, self.status = stack, tracker, status
        self.changed = changed  # other data than before is wanted
        self.done = 0  # the last round that was not skipped
        self.met = (0, time.perf_counter())  # round and time at which the processes met last
        self.meeting = 0  # the round of their next meeting

    def run(self, label: str) -> Any:
        """The state at the end."""
        s, report = self.s, self.report
        state, start = self._begin()
        report.start(label or self.plan.recipe.id, start, s.rounds)
        self.simulator.on_progress = lambda progress: report.within(*progress)
        self.stack.callback(report.stop)
        for words in noteworthy(self.plan, self.simulator, self.never_finite, not label):
            report.note(words)
        with processes.Together():
            self.status.running(start, start)
        with stop_requested() as asked:
            state = self._loop(state, start, asked)
        self._check_end()
        return state

    def _begin(self) -> tuple[Any, int]:
        """The first state, or that of the newest checkpoint."""
        state, start = self.simulator.init(), 0
        with processes.Together() as begun:
            if self.directory is not None:
                start, state = self._restored(state)
            begun.value = start, dict(self.counts), self.rows, self.done
        start, counts, self.rows, self.done = begun.value
        self.counts = Counter(counts)
        return processes.share(state), start

    def _restored(self, state: Any) -> tuple[int, Any]:
        """Nothing is changed before it is known that the run can go on."""
        start, folder, note = 0, self.directory.path, self.report.note
        self.checkpoints = Checkpoints(folder / "checkpoints", note)
        newest = max(self.checkpoints.rounds(), default=0)
        made_with = origin.check(folder, self.plan.problem, newest, self.changed, note)
        found = self.checkpoints.latest(state)
        if found is not None:
            start, state, meta = found
            self.counts = Counter(meta["counts"])
            self.status.alarms = self.counts["alarms/loss"]
            start = self._unskipped(start, meta.get("done", start))
            note(f"going on from the checkpoint of round {start}")
        elif saved := self.directory.saved(self.s.checkpoint_every):
            raise MixflError(
                f"{self.checkpoints.path} has no checkpoint, but the run had one of round {saved} "
                "or so. Nothing was changed: restore it, or begin anew with --restart, which "
                "moves what there is aside."
            )
        self.checkpoints.close()  # what a kill left
        self.stack.callback(self.checkpoints.close)
        origin.write(folder, made_with)
        self.rows = self.directory.keep_metrics(start)
        lost = {t for t in range(1, start + 1) if self._evaluates(t)}
        lost -= {row["round"] for row in self.rows}
        if lost:
            note(f"metrics.jsonl is damaged: it lacks round {min(lost)}")
        self.events = Events(folder / "tensorboard", start)
        name = self.plan.problem.name
        self.tracker.begin(self.directory, name, self.config, self.rows, note)
        return start, state

    def _unskipped(self, start: int, done: int) -> int:
        """Where to go on from a checkpoint, whose last good round is `done`. A run that failed by
        skipped rounds makes them again; others are over, as if it had not been interrupted."""
        self.done = min(done, start)
        if start == self.s.rounds and too_many(start - self.done, start):
            self.checkpoints.rename(start, self.done)
            return self.done
        return start

    def _check_end(self) -> None:
        """A run whose last rounds were all skipped has lost its clients: it is not finished."""
        first, last = self.done + 1, self.s.rounds
        skipped = last - self.done
        which = f"rounds {first} to {last} were" if first < last else f"round {last} was"
        if too_many(skipped, last):
            raise MixflError(
                f"{which} skipped, as too few clients gave a good reply, up to the end of the run: "
                "it has no model. See why; the same command (with --resume, where it takes that) "
                f"goes on from round {self.done}."
            )
        if skipped:
            self.report.note(f"{which} skipped: the model is that of round {self.done}")

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
                self.status.round = t
                # Several processes settle at the same rounds; one alone, as soon as it can.
                alone = jax.process_count() == 1
                if evaluate or save or (alone and self.pending and self.pending.done):
                    self._settle()
                if evaluate:
                    self._evaluate(result, 1000 * seconds / (t - since))
                    seconds, since = 0.0, t
                if save:
                    self._save(t, result.state)
                    saved = time.perf_counter()
                if stop and t < s.rounds:
                    self._interrupted(t)
        except (Diverged, Interrupted):
            raise
        except MixflError:
            if jax.process_count() == 1:  # otherwise others may have left
                with contextlib.suppress(MixflError):
                    self._settle()
            raise
        except processes.FAILED as error:
            raise processes.lost(error) or error from None
        finally:
            rounds.close()  # type: ignore[attr-defined]
        return result.state

    def _save(self, t: int, state: Any) -> None:
        self._settle()  # the rows up to a checkpoint are written before it
        with processes.Together():
            if self.checkpoints is not None:
                last = self.rows[-1] if self.rows else {"round": 0}
                loss = last.get("eval/loss") if last["round"] == t else None
                meta = {"counts": dict(self.counts), "done": self.done,
                        "model": where_model_is(state)}  # fmt: skip
                self.checkpoints.save(t, state, meta, loss)
                self.status.running(t, t)

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

    def _evaluates(self, t: int) -> bool:
        return t % self.s.eval_every == 0 or t == self.s.rounds

    def _check(self, result: RoundResult) -> None:
        """Counts the clients left out, and stops a run that has diverged."""
        info = result.info
        rejected = int(info["clients/rejected"])
        if rejected and not self.counts["clients/rejected"] and not reasons(info):
            self.report.note(
                f"round {result.round}: the updates of {rejected} clients were not finite and "
                "are left out (counted in clients/rejected)"
            )
        self._note_clipped(result.round, int(info.get("clients/clipped", 0)))
        self.counts.update({k: int(v) for k, v in info.items() if counted(k)})
        left = sum(float(info.get(f"clients/{p.name}", 0)) for p in self.plan.problem.populations)
        skipped = info.get("rounds/failed", 0)
        self.done = self.done if skipped else result.round
        if not bool(info["finite"]) or (rejected and not left and not skipped):
            self._settle()  # what was evaluated before is said before
            raise self._diverged(result.round)

    def _note_clipped(self, t: int, clipped: int) -> None:
        """Said once: what follows is in the metrics."""
        if clipped and not self.counts["clients/clipped"]:
            self.report.note(
                f"round {t}: {clipped} client update{'s' if clipped > 1 else ''}, far longer than "
                "the others, shortened (clip; counted in clients/clipped)"
            )

    def _diverged(self, t: int) -> Diverged:
        s, uses = self.s, self.plan.recipe.uses
        resolved = {k: self.config.get(k) for k in ("client_lr", "central_lr", "server_lr")}
        lower = [f"{k} (now {v:g})" for k, v in resolved.items() if k in uses and v is not None]
        hint = f"lower {' or '.join(lower)}"
        if self.plan.recipe.id == "2wgt" and s.merge_lr != "auto":
            hint += f", or set merge_lr = auto (now {s.merge_lr:g})"
        saved = self.checkpoints is not None and self.checkpoints.rounds()
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
            info = {k: v for k, v in result.info.items() if k != "finite" and not counted(k)}
            row = {k: number(v, k) for k, v in info.items()} | measured
            down, up = self.simulator.round_bytes(t - 1)
            row |= {
                "clients/rejected": 0,
                **{k: n for k, n in self.counts.items() if k != "alarms/loss"},
                "comm/down_bytes": down,
                "comm/up_bytes": up,
                "time/round_ms": round(round_ms, 3),
            }
        self.pending = Evaluation(self.plan.problem, t, result.state.x, row)
        if self.simulator.resolved().devices > 1 and jax.default_backend() == "cpu":
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
                alarms = self._alarms(pending.round, found.get("eval/loss"))
                judged.value = {"round": pending.round, **found, **alarms, **pending.row}
                self._write(judged.value)
        self.rows.append(judged.value)

    def _alarms(self, t: int, loss: float | None) -> dict[str, int]:
        """Counts a jump of the loss, and says it at once."""
        before = [r["eval/loss"] for r in self.rows if r.get("eval/loss") is not None]
        if loss is not None and jumped([*before, loss]):
            self.counts["alarms/loss"] += 1
            self.status.alarms += 1
            best = None
            with contextlib.suppress(MixflError):  # not readable just now: then it is not named
                best = self.checkpoints.best() if self.checkpoints is not None else None
            back = f"; the best checkpoint is of round {best}: --from-best goes on from there"
            self.report.note(
                f"the loss jumped from {before[-1]:.4g} to {loss:.4g} in round {t} (the best was "
                f"{min(before):.4g}){back if best is not None else ''}"
            )
        alarms = self.counts["alarms/loss"]
        return {"alarms/loss": alarms} if alarms else {}

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
            self.status.interrupted(t)
        raise Interrupted(
            f"stopped after round {t} of {self.s.rounds}; the state is saved in {self.out}. "
            "The same command with --resume goes on."
        )
