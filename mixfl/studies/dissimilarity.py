"""`mixfl dissimilarity`: the paper's protocol for G~^2 and B~^2 (Table 2, Appendix C.1).

One local step (with K = 1 all algorithms are the same), 100 rounds, 5 simulations. The result is
the maximum over all simulations and the rounds from 10 on.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mixfl.errors import Diverged
from mixfl.measure.gradients import Gradients
from mixfl.runs.folder import write_whole
from mixfl.runs.plan import plan

FIRST = 10  # the maximum is taken from this round on
PAPER = {"smile": (49.04, 1.26), "text": (0.03, 1.34), "movie": (0.03, 1.50)}
# The rest of Table 2: model, federated data and loss, central data and loss.
SUMMARY = {
    "smile": ("fully connected", "CelebA, smiling", "binary cross-entropy", "CelebA, not smiling",
              "binary cross-entropy"),
    "text": ("RNN", "Stack Overflow", "cross-entropy", "Wikipedia", "cross-entropy"),
    "movie": ("dual encoder", "MovieLens", "hinge", "none", "spreadout"),
}  # fmt: skip


class Curves(NamedTuple):
    task: str
    rounds: list[int]
    g2: np.ndarray  # [simulations, rounds]
    b2: np.ndarray

    def largest(self) -> tuple[float, float]:
        """The maxima over all simulations and the rounds from FIRST on."""
        first = min(FIRST, len(self.rounds) - 1)
        return float(self.g2[:, first:].max()), float(self.b2[:, first:].max())


def dissimilarity(
    task: str, preset: str | None, data: str | None, given: Mapping[str, Any],
    rounds: int, simulations: int, report: Callable[[int, int, str], None],
) -> Curves:  # fmt: skip
    problems: dict = {}
    simulated = []
    for i in range(simulations):
        planned = plan(
            task, "pt", preset=preset, data=data, given=given, problems=problems,
        )  # fmt: skip
        s = dataclasses.replace(
            planned.settings, local_steps=1, central_steps=1, rounds=rounds,
            seed=planned.settings.seed + i,
        )  # fmt: skip
        simulator = dataclasses.replace(planned, settings=s).simulator()
        gradients, points = Gradients(planned.problem, s), []
        state = simulator.init()
        points.append(gradients.dissimilarity(state.x, 0))
        for result in simulator.rounds(state, 0, rounds):
            report(i * rounds + result.round, simulations * rounds, f"simulations of {task}")
            if not bool(result.info["finite"]):
                raise Diverged(
                    f"simulation {i + 1} diverged in round {result.round}: lower client_lr (now "
                    f"{s.at(result.round - 1).client_lr:g}) with --set.", result.round,
                )  # fmt: skip
            points.append(gradients.dissimilarity(result.state.x, result.round))
        simulated.append(points)
        name = planned.problem.name
    values = np.array(simulated)  # [simulations, rounds + 1, 2]
    return Curves(name, list(range(rounds + 1)), values[..., 0], values[..., 1])


def rows(curves: Curves) -> tuple[list[str], list[list[str]]]:
    g2, b2 = curves.largest()
    cells = [[curves.task, f"{g2:.4g}", f"{b2:.4g}"]]
    if curves.task in PAPER:
        cells.append(["the paper", *(f"{v:g}" for v in PAPER[curves.task])])
    return ["", "max G~^2", "max B~^2"], cells


def as_json(curves: Curves) -> dict[str, Any]:
    g2, b2 = curves.largest()
    return {
        "task": curves.task, "g2": g2, "b2": b2, "from_round": FIRST, "rounds": curves.rounds,
        "g2_curves": curves.g2.tolist(), "b2_curves": curves.b2.tolist(),
    }  # fmt: skip


def save(curves: Curves, out: Path) -> Path:
    from mixfl.report import plots

    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "dissimilarity.json", json.dumps(as_json(curves)).encode())
    path = out / "dissimilarity.png"
    plots.dissimilarity(curves.rounds, curves.g2, curves.b2, path, curves.task)
    return path
