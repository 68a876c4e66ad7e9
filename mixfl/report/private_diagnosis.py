"""What `mixfl diagnose --dp` says about privacy, in words and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

from mixfl.measure.private_diagnosis import Figures
from mixfl.report.style import NAMES
from mixfl.theory.private_advice import Afforded, fitting


def private_words(f: Figures) -> list[str]:
    lines = [
        f"{_budget(f.epsilon)}, delta = {f.delta:g}, in {f.rounds} rounds: noise multiplier "
        f"{f.noise_multiplier:.4g}",
        f"on each of {f.parameters:,} parameters, the mean of a cohort has noise of standard "
        f"deviation {f.deviation:.3g}; clip norm {f.clip:.3g}",
        f"error left when the budget is spent, as a part of the first, each algorithm at its best "
        f"step: {_errors(f.left)}",
        *(f"with {_budget(e)}: {_errors(every)}" for e, every in f.others),
    ]
    if f.clip < f.norm / 2:
        lines.append(
            f"clients' changes are about {f.norm:.3g} long: so low a clip norm biases training, "
            "which is not in the prediction"
        )
    lines.append(
        "clients were measured without noise, so this advice is not private: use public or "
        "synthetic data"
    )
    return lines


def private_changes(f: Figures, now: str) -> list[str]:
    then = [(e, fitting(list(every)).algorithm) for e, every in f.others]
    said = [f"{_budget(e)}: {NAMES[a]}" for e, a in then if a != now]
    tried = ", ".join(_budget(e) for e, _ in f.others)
    return said or [f"no other budget that was tried: {tried}"]


def private_json(f: Figures) -> dict[str, Any]:
    numbers = {k: v for k, v in f._asdict().items() if k not in ("left", "others")}
    others = [{"epsilon": e, "left": _left(every)} for e, every in f.others]
    return {**numbers, "left": _left(f.left), "others": others}


def _left(every: Sequence[Afforded]) -> dict[str, Any]:
    return {p.algorithm: {"error": p.error, "client_lr": p.eta} for p in every}


def _errors(every: Sequence[Afforded]) -> str:
    return ", ".join(f"{NAMES[p.algorithm]} {100 * p.error:.3g} %" for p in every)


def _budget(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"epsilon = {epsilon:.4g}"
