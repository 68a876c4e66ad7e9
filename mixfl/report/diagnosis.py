"""`mixfl diagnose`: the verdict on a task, in words, as JSON and as a page."""

import base64
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.engine import Simulator
from mixfl.measure.diagnosis import PLAIN, diagnose
from mixfl.report.page.render import render
from mixfl.report.private_diagnosis import private_changes, private_json, private_words
from mixfl.report.style import NAMES
from mixfl.runs.folder import write_whole
from mixfl.runs.notes import loss_notes
from mixfl.runs.plan import plan
from mixfl.theory import bounds
from mixfl.theory.intervals import Interval

Report = Callable[[int, int, str], None]


class Verdict:
    """A task's diagnosis, and the settings that follow from it."""

    def __init__(
        self, task: str, preset: str | None, data: str | None, given: Mapping[str, Any],
        target: float, budget: float, column: str | None, report: Report,
    ):  # fmt: skip
        shared = ["pt", "1wgt", "2wgt"]
        problems: dict = {}
        planned = plan(task, "pt", preset=preset, data=data, given=given, shared_with=shared,
                       problems=problems)  # fmt: skip
        self.problem, self.s = planned.problem, planned.settings
        self.diagnosis = diagnose(self.problem, self.s, target, budget, column, report)
        algorithm = self.diagnosis.algorithm
        best = plan(task, algorithm, preset=preset, data=data, given=given, shared_with=shared,
                    problems=problems)  # fmt: skip
        simulator: Simulator = best.simulator()
        self.bytes = simulator.round_bytes(0)

    # What theory guarantees

    def guaranteed(self) -> dict[str, float]:
        """The largest client learning rate of the nonconvex theorem, by algorithm."""
        d = self.diagnosis
        symbols: dict[str, Any] = dict(
            beta=max(d.beta.mean, *(t.beta.mean for t in d.terms)), B2=max(d.b2, 1.0), K=d.setup.K,
            eta_s=d.setup.eta_s,
        )  # fmt: skip
        return {
            a: bounds.max_rates(a, "nonconvex", eta_m=1, **symbols).eta for a in bounds.ALGORITHMS
        }

    def as_json(self) -> dict[str, Any]:
        d = self.diagnosis
        return _finite({
            "algorithm": d.algorithm,
            "client_lr": d.eta,
            "g2": d.g2,
            "b2": d.b2,
            "variances": {
                t.name: {
                    "per_example": t.v._asdict(), "sigma2": t.sigma2._asdict(),
                    "sigma_f2": t.between._asdict() if t.between else None,
                }
                for t in d.terms
            },
            "beta": {**{t.name: t.beta._asdict() for t in d.terms}, "sum": d.beta._asdict()},
            "beta_start": {t.name: t.beta_start for t in d.terms},
            "steps": {
                "recommended": d.eta * d.setup.K * d.setup.eta_s,
                "recommended_client_lr": d.eta,
                "predicted_client_lr": d.predicted_eta,
                "guaranteed_client_lr": self.guaranteed(),
                "K": d.setup.K,
            },
            "central_batch": {"rubric": d.batch[0], "recommended": d.batch[1]},
            "rounds": {p.algorithm: p.rounds for p in d.choice.all} if d.choice.reached else {},
            "rounds_at_equal_step": dict(d.equal),
            "target": d.target,
            "download_bytes": self.bytes[0],
            "upload_bytes": self.bytes[1],
            "probe": [{"client_lr": eta, "loss": loss} for eta, loss in d.probe],
            "loss_in_probes": dict(d.tried),
            "cut_short": d.cut_short,
            "changes": [{"if": what, "then": a} for what, a in d.changes],
            "splits": [split._asdict() for split in d.splits],
            "curve": [{"round": t, "g2": g, "b2": b} for t, g, b in d.curve],
            "seconds": d.seconds,
            **({"private": private_json(d.private)} if d.private else {}),
        })  # fmt: skip

    # In words

    def headline(self) -> str:
        d = self.diagnosis
        return (
            f"Use {NAMES[d.algorithm]} ({d.algorithm}) with client_lr = {d.eta:.3g} "
            f"(K = {d.setup.K}, effective step {d.eta * d.setup.K * d.setup.eta_s:.3g})."
        )

    def sections(self) -> list[tuple[str, list[str]]]:
        """Titles and lines."""
        d = self.diagnosis
        splits = [self.split_words(split) for split in d.splits]
        return [
            *([("Privacy", private_words(d.private))] if d.private else []),
            ("Why", self.reasons()),
            ("Settings", self.settings()),
            *([("Dividing a population", splits)] if splits else []),
            ("What would change this", self.changes()),
        ]

    def lines(self) -> list[str]:
        """For the terminal."""
        lines = [self.headline()]
        for title, content in self.sections():
            lines += ["", title, *("  " + line for line in content)]
        return lines + [f"\nNote: {note}" for note in loss_notes(self.problem)]

    def changes(self) -> list[str]:
        d = self.diagnosis
        if d.private:
            return private_changes(d.private, d.algorithm)
        if d.changes:
            return [f"{what}: {NAMES[a]}" for what, a in d.changes]
        if d.tried:
            return ["not predicted: the quadratic model does not fit this problem"]
        if not d.choice.reached:
            return ["a larger --target: at this one nothing can be compared"]
        return [
            "nothing that was tried: K, the cohort and the central examples up and down, a smaller "
            "and a larger target error"
        ]

    def reasons(self) -> list[str]:
        d = self.diagnosis
        lines = []
        if d.choice.reached:
            rounds = ", ".join(f"{NAMES[p.algorithm]} {_count(p.rounds)}" for p in d.choice.all)
            lines.append(
                f"rounds to {100 * d.target:g} % of the first error, each at its best step, on a "
                f"quadratic model of the problem: {rounds}"
            )
        else:
            lines.append(
                f"no algorithm gets to {100 * d.target:g} % of the first error on a quadratic "
                "model of the problem: noise, or too few rounds; this one gets closest"
            )
        if d.tried:
            losses = ", ".join(f"{NAMES[a]} {_loss(loss)}" for a, loss in d.tried.items())
            lines.append(
                "on the problem itself, it takes more than twice as long: so the algorithms were "
                f"compared by probes instead, by rounds; their least losses there are {losses}"
            )
        if d.cut_short:
            lines.append(
                "the probe contradicts the model, or might have, when the time ran out: so the "
                "choice of the algorithm rests on the model alone. Give more time, such as "
                f"--budget {self.longer()}"
            )
        equal = ", ".join(f"{NAMES[a]} {_count(n)}" for a, n in d.equal)
        lines.append(f"at the same effective step: {equal}")
        lines.append(f"dissimilarity of the terms: max G~^2 {d.g2:.3g}, max B~^2 {d.b2:.3g} "
                     f"({self.about_dissimilarity()})")  # fmt: skip
        lines.append(self.about_noise())
        return lines

    def longer(self) -> int:
        """A budget of whole minutes, three times as long."""
        return 60 * math.ceil(self.diagnosis.seconds / 20)

    def about_dissimilarity(self) -> str:
        # PT's fixed point is off by about the effective step times the terms' dissimilarity.
        return (
            "the terms pull in about the same direction"
            if self.diagnosis.b2 < 2
            else "the terms pull apart: PT's fixed point is off the minimum"
        )

    def about_noise(self) -> str:
        d = self.diagnosis
        parts = []
        for t in d.terms:
            words = f"{t.name} {_interval(t.sigma2)}"
            if t.between is not None:
                words += f" within and {_interval(t.between)} between clients"
            parts.append(words)
        return "variance of a batch's gradient: " + "; ".join(parts)

    def settings(self) -> list[str]:
        d, s = self.diagnosis, self.s
        rubric, corrected = d.batch
        down, up = self.bytes
        guaranteed = self.guaranteed()[d.algorithm]
        tried = ", ".join(f"{eta:.3g}: {_loss(loss)}" for eta, loss in d.probe)
        batch = (
            f"central_batch {corrected}: the rubric says {rubric}; corrected so that the central "
            "noise of a round is that of the cohort"
            if any(t.examples is not None for t in self.problem.central)
            else "no central batch: the server has no data"
        )
        ignored = [k for k, v in PLAIN.items() if getattr(s, k) != v]
        return [
            *([f"measured with plain SGD: {', '.join(ignored)} ignored"] if ignored else []),
            f"client_lr {d.eta:.3g}: recommended after a probe (loss by client_lr {tried}); theory "
            f"only guarantees {guaranteed:.2g}, {d.eta / guaranteed:.0f} times less",
            batch,
            f"cohort_size {s.cohort_size}, local_steps {d.setup.K}, client_batch {s.client_batch}: "
            "as given",
            f"a client downloads {_bytes(down)} and uploads {_bytes(up)} a round",
            f"smoothness beta: {', '.join(f'{t.name} {_interval(t.beta)}' for t in d.terms)}, sum "
            f"{_interval(d.beta)}; at the start "
            f"{', '.join(f'{t.name} {t.beta_start:.3g}' for t in d.terms)}",
        ]

    def split_words(self, split) -> str:
        verdict = "would pay off" if split.pays else "would not pay off"
        return (
            f"{split.population} by '{split.column}' {verdict}: the two groups explain "
            f"{100 * split.explained:.0f} % of the differences between clients; "
            f"{100 * split.noise:.0f} % of the cohort's noise would go away; G~^2 would be "
            f"{split.g2:.3g} (now {self.diagnosis.curve[-1][1]:.3g})"
        )

    def page(self) -> str:
        """Self-contained HTML, with the curves."""
        d = self.diagnosis
        return render(
            "diagnosis.html.j2",
            name=self.problem.name,
            verdict=self.headline(),
            target=f"{100 * d.target:g} %",
            rows=[
                (NAMES[p.algorithm], _count(p.rounds), f"{p.eta:.3g}", _count(equal))
                for p, (_, equal) in zip(d.choice.all, d.equal, strict=True)
            ],
            picture=self.picture(),
            sections=self.sections(),
        )

    def picture(self) -> str:
        """The curves of G~^2 and B~^2 as a PNG, in base64."""
        from mixfl.report import plots

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "curves.png"
            rounds, g2, b2 = (list(column) for column in zip(*self.diagnosis.curve, strict=True))
            plots.dissimilarity(rounds, np.array(g2), np.array(b2), path)
            return base64.b64encode(path.read_bytes()).decode()

    def save(self, out: Path) -> Path:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "diagnosis.json", json.dumps(self.as_json(), indent=2).encode())
        page = out / "diagnosis.html"
        write_whole(page, self.page().encode())
        return page


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def _count(rounds: float) -> str:
    return str(math.ceil(rounds)) if math.isfinite(rounds) else "not reached"


def _loss(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "diverged"


def _interval(i: Interval) -> str:
    mean, low, high = (max(a, 0.0) for a in i)  # an estimate of 0 may be negative
    return f"{mean:.3g} ({low:.3g} to {high:.3g})" if math.isfinite(i.low) else f"{mean:.3g}"


def _bytes(n: float) -> str:
    for unit in ("B", "KB", "MB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} GB"
