"""Is the advice of `mixfl diagnose` right on real problems? Compares it with tuned algorithms.

    python -m benchmarks.advice_real logistic:0.1 mlp:1 smile text movie
    python -m benchmarks.advice_real smile --data /path/to/a/store   # recorded as smile-data
    python -m benchmarks.advice_real --show

A problem is a task (preset demo), or a model of mixed_zoo.py with the alpha of its Dirichlet
partition. Optimizers are plain SGD, as in the diagnosis. The loss is the mixed training loss on a
fixed sample of at least 2,000 rows of each term, which the diagnosis does not use.

Each of pt, 1wgt and 2wgt runs with learning rates a factor of 2 apart, from the problem's own
outward for as long as the best one is at an edge: by rounds to the target or by the last loss. The
target is 90 % of the way from the first loss to the least loss of all these runs at the horizon
(60 rounds). It is reached when the loss, and its mean over five rounds, is below. Rates whose first
seed is within 1.3 of the best so far run with three seeds; the mean of their losses counts. So does
the advised rate. Results are saved after each problem. Problems that are there already are left
out, or diagnosed again (--again) against the same tuned runs.
"""

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import mixed_zoo
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.engine.first_model import first_model
from mixfl.measure.curvature import Curvature
from mixfl.measure.diagnosis import AGAIN, PLAIN, Diagnosis, diagnose, most_examples, setup_of
from mixfl.measure.gradients import Gradients
from mixfl.problem import Problem
from mixfl.settings import Settings
from mixfl.theory import bounds

NAMES = ("pt", "1wgt", "2wgt")
HORIZON, KEPT, PART = 60, 5, 0.9
SEEDS, CLOSE, MOST_RATES = 3, 1.3, 9
ROWS, SAMPLED = 2000, AGAIN + 1000  # rows of a sample; the round of its first cohort


def load(name: str, data: str | None) -> tuple[Problem, Settings]:
    model, _, alpha = name.partition(":")
    if model in mixed_zoo.MODELS:
        return mixed_zoo.problem(model, float(alpha))
    from mixfl.runs.plan import plan

    planned = plan(name, "pt", preset="demo", data=data, given={}, shared_with=NAMES)
    return planned.problem, planned.settings


def large_sample(problem: Problem, s: Settings) -> Curvature:
    """Samples of several rounds as one."""
    found = Curvature(problem, Gradients(problem, s, 4).simulator, SAMPLED)
    parts, rows = [found.samples], min(p.weights.size for p in found.samples)
    while rows < ROWS and len(parts) < 16:
        parts.append(found.of_round(SAMPLED + len(parts)).samples)
        rows += min(p.weights.size for p in parts[-1])
    joined = jax.tree.map(lambda *a: np.concatenate(a), *parts)
    found.samples = jax.device_put([p._replace(weights=p.weights / len(parts)) for p in joined])
    return found


def reached(curve: np.ndarray, goal: float) -> float:
    """The round from which a curve of losses is below `goal`, as is the mean of five rounds;
    interpolated. inf if there is none."""
    mean = np.convolve(curve, np.ones(KEPT) / KEPT, "valid")
    height = np.minimum.accumulate(np.maximum(curve[: len(mean)], mean))
    below = np.flatnonzero(height <= goal)
    if not len(below):
        return math.inf
    t = int(below[0])
    if t == 0 or not math.isfinite(height[t - 1]):
        return float(t)
    return t - 1 + float((height[t - 1] - goal) / (height[t - 1] - height[t]))


def last(curve: np.ndarray) -> float:
    return float(np.mean(curve[-KEPT:]))


def edge(values: dict[int, float]) -> int:
    """The next exponent to try: beyond the best one, if that is at an edge; otherwise 0."""
    best = min(values, key=lambda i: (values[i], abs(i)))
    if not math.isfinite(values[best]) and max(values.values()) == math.inf:
        return min(values) - 1  # nothing works: shorter steps
    return best + 1 if best == max(values) else best - 1 if best == min(values) else 0


class Tuning:
    """The runs of one problem."""

    def __init__(self, problem: Problem, s: Settings, horizon: int):
        self.problem, self.horizon = problem, horizon
        self.s = dataclasses.replace(s.at(0), **PLAIN, clip="off", aggregation="mean")
        self.setup, self.sample = setup_of(problem, self.s), large_sample(problem, self.s)
        self.curves: dict[str, dict[int, np.ndarray]] = {a: {} for a in NAMES}  # of the first seed
        self.known_goal: float | None = None

    def rate(self, i: int) -> float:
        return self.s.client_lr * 2.0**i

    def run(self, algorithm: str, eta: float, seed: int = 0, rounds: int | None = None):
        """Losses after 0, 1, ... rounds; inf from where it diverges."""
        batch = self.s.central_batch
        if algorithm == "1wgt" and batch != "auto":  # as many central rows as the others
            batch = most_examples(self.problem, self.setup.central)
        s = dataclasses.replace(self.s, client_lr=eta, seed=self.s.seed + seed, central_batch=batch)
        simulator = Simulator(self.problem, ALGORITHMS[algorithm].build(self.problem, s), s)
        x = first_model(self.problem, s.seed)
        rounds = self.horizon if rounds is None else rounds
        curve = np.full(rounds + 1, np.inf)
        curve[0] = self.loss(self.sample.flat(x))
        for result in simulator.rounds(simulator.state(x), 0, rounds):
            loss = self.loss(self.sample.flat(result.state.x))
            if not loss < 10 * abs(curve[0]):
                break
            curve[result.round] = loss
        return curve

    def loss(self, x) -> float:
        return float(self.sample.losses(x).sum())

    @property
    def goal(self) -> float:
        if self.known_goal is not None:
            return self.known_goal
        every = [c for of in self.curves.values() for c in of.values()]
        first, least = every[0][0], min(last(c) for c in every)
        return float(first - PART * (first - least))

    def grow(self) -> None:
        """Runs all algorithms with rates until the best of each is inside."""
        for a in NAMES:
            for i in (-1, 0, 1):
                self.curves[a][i] = self.run(a, self.rate(i))
        growing = True
        while growing:
            growing = False
            for a in NAMES:
                of, goal = self.curves[a], self.goal
                rounds = {i: reached(c, goal) for i, c in of.items()}
                losses = {i: last(c) for i, c in of.items()}
                some = math.isfinite(min(rounds.values()))
                for i in {edge(losses), edge(rounds) if some else 0} - {0, *of}:
                    if len(of) < MOST_RATES:
                        of[i] = self.run(a, self.rate(i))
                        growing = True

    def rounds(self, algorithm: str, eta: float, most: float, first=None) -> float:
        """With all seeds, as far as `most` rounds and what the mean needs."""
        far = min(2 * self.horizon, math.ceil(most) + KEPT)
        if first is not None:
            far = min(far, len(first) - 1)
        curves = [
            self.run(algorithm, eta, seed, far) if seed or first is None else first[: far + 1]
            for seed in range(SEEDS)
        ]
        return reached(np.mean(curves, 0), self.goal)

    def tuned(self) -> dict[str, dict[str, float]]:
        """The best rate of each. Those within CLOSE of the best run with all seeds. The best counts
        with all seeds too: with the first one, it may be luck."""
        goal = self.goal
        rounds = {(a, i): reached(c, goal) for a, of in self.curves.items() for i, c in of.items()}
        left, fewest = sorted(rounds, key=rounds.__getitem__), math.inf
        while left and rounds[left[0]] <= min(CLOSE * fewest, self.horizon):
            a, i = key = left.pop(0)
            most = min(2 * CLOSE * fewest, self.horizon)
            rounds[key] = self.rounds(a, self.rate(i), most, self.curves[a][i])
            fewest = min(fewest, rounds[key])
        found = {}
        for a in NAMES:
            of = self.curves[a]
            least, _, i = min((rounds[a, i], last(of[i]), i) for i in of)
            found[a] = {"client_lr": self.rate(i), "rounds": least, "tried": len(of)}
        return found


def constants(tuning: Tuning, advice: Diagnosis, F: float) -> dict[str, float]:
    """What the bounds need. F is taken from the best loss at the horizon. Epsilon is a tenth of the
    squared norm of the mixed gradient at the start."""
    clients = next(t for t in advice.terms if t.federated)
    x = tuning.sample.flat(first_model(tuning.problem, tuning.s.seed))
    slope = np.asarray(tuning.sample.gradients(x).sum(0), np.float64)
    return {
        "beta": max(t.beta.mean for t in advice.terms),
        "epsilon": (1 - PART) * float(slope @ slope),
        "sigma2": clients.sigma2.mean,
        "sigma_c2": max(sum(t.sigma2.mean for t in advice.terms if not t.federated), 0.0),
        "sigma_f2": max(clients.between.mean, 0.0) if clients.between else 0.0,
        "K": tuning.setup.K, "S": tuning.setup.S, "F": F, "G2": advice.g2,
        "B2": max(advice.b2, 1.0),
    }  # fmt: skip


def bound(measured: dict[str, Any]) -> dict[str, float]:
    """The orders of Table 1 (nonconvex) with the measured constants."""
    return {a: bounds.rounds(a, "nonconvex", **measured).total for a in NAMES}


def diagnosed(problem: Problem, s: Settings, budget: float) -> tuple[Diagnosis, dict[str, float]]:
    """The advice, and the seconds that it took and was given."""
    begun, used = time.perf_counter(), time.process_time()
    advice = diagnose(problem, s, budget=budget)
    seconds, processor = time.perf_counter() - begun, time.process_time() - used
    return advice, {"seconds": seconds, "processor_seconds": processor, "budget": budget}


def judged(name: str, data: str | None, horizon: int, budget: float) -> dict[str, Any]:
    problem, s = load(name, data)
    advice, took = diagnosed(problem, s, budget)
    used = time.process_time()
    tuning = Tuning(problem, s, horizon)
    tuning.grow()
    tuned = tuning.tuned()
    best = min(tuned, key=lambda a: tuned[a]["rounds"])
    fewest = tuned[best]["rounds"]
    rounds = tuning.rounds(advice.algorithm, advice.eta, 3 * fewest)
    curves = [c for of in tuning.curves.values() for c in of.values()]
    F = float(curves[0][0]) - min(last(c) for c in curves)
    measured = constants(tuning, advice, F)
    return {
        "problem": name + ("-data" if data else ""),
        "advised": {"algorithm": advice.algorithm, "client_lr": advice.eta, "rounds": rounds},
        "predicted": {p.algorithm: [p.rounds, p.eta] for p in advice.choice.all},
        "probe": advice.probe, "tried": dict(advice.tried), "tuned": tuned, "best": best,
        "ratio": rounds / fewest,
        "ratio_tuned": tuned[advice.algorithm]["rounds"] / fewest,
        "diagnosis": took,
        "tuning": {"processor_seconds": time.process_time() - used},
        "first_loss": float(curves[0][0]), "goal": tuning.goal, "horizon": horizon,
        "measured": measured, "bound": bound(measured),
    }  # fmt: skip


def again(row: dict[str, Any], data: str | None, budget: float) -> dict[str, Any]:
    """Only the diagnosis and the advised runs, against the same tuned ones."""
    problem, s = load(row["problem"].removesuffix("-data"), data)
    advice, took = diagnosed(problem, s, budget)
    tuning = Tuning(problem, s, row["horizon"])
    tuning.known_goal = row["goal"]
    fewest = row["tuned"][row["best"]]["rounds"]
    rounds = tuning.rounds(advice.algorithm, advice.eta, 3 * fewest)
    measured = constants(tuning, advice, row["measured"]["F"])
    return row | {
        "advised": {"algorithm": advice.algorithm, "client_lr": advice.eta, "rounds": rounds},
        "predicted": {p.algorithm: [p.rounds, p.eta] for p in advice.choice.all},
        "probe": advice.probe, "tried": dict(advice.tried), "ratio": rounds / fewest,
        "ratio_tuned": (row["tuned"][advice.algorithm]["rounds"] or math.inf) / fewest,
        "diagnosis": took,
        "measured": measured, "bound": bound(measured),
    }  # fmt: skip


def show(rows: list[dict]) -> None:
    def at(run: dict) -> str:
        return f"{run['rounds'] or math.inf:5.1f} at {run['client_lr']:<7.3g}"

    for r in rows:
        t, a, took = r["tuned"], r["advised"], r["diagnosis"]
        budget = f"{took['budget']:.0f} s" if "budget" in took else "not recorded"
        print(
            f"{r['problem']:14s} tuned {', '.join(f'{n} {at(t[n])}' for n in NAMES)} "
            f"advised {a['algorithm']:4s} {at(a)} x {r['ratio'] or math.inf:.2f} "
            f"(its algorithm, tuned: {r['ratio_tuned'] or math.inf:.2f})  diagnosis "
            f"{took['processor_seconds']:.0f} s of processor time, {took['seconds']:.0f} s by the "
            f"clock, budget {budget}",
            flush=True,
        )
    good = sum((r["ratio"] or math.inf) <= 1.25 for r in rows)
    print(f"{good} of {len(rows)} within 1.25 times the rounds of the best tuned algorithm")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", nargs="*")
    parser.add_argument("--data", help="a store for the task; only with one problem")
    parser.add_argument("--rounds", type=int, default=HORIZON)
    parser.add_argument("--budget", type=float, default=60)
    parser.add_argument("--again", action="store_true", help="repeat only the diagnosis")
    parser.add_argument("--show", action="store_true", help="only show the results so far")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "advice_real.json")
    options = parser.parse_args()
    if options.data and len(options.problems) != 1:
        parser.error("--data is for one problem")
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    done = {r["problem"]: i for i, r in enumerate(rows)}
    for name in [] if options.show else options.problems:
        at = done.get(name + ("-data" if options.data else ""))
        if at is None:
            at = len(rows)
            rows.append(judged(name, options.data, options.rounds, options.budget))
        elif options.again:
            rows[at] = again(rows[at], options.data, options.budget)
        else:
            continue
        options.out.write_text(as_json(rows))
        show(rows[at : at + 1])
    show(rows)


def as_json(rows: list[dict]) -> str:
    """One line a problem. Rounds that were not reached are null."""

    def finite(value):
        if isinstance(value, dict):
            return {k: finite(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [finite(v) for v in value]
        if isinstance(value, float):
            return float(f"{value:.5g}") if math.isfinite(value) else None
        return value

    return "[\n" + ",\n".join(json.dumps(finite(r)) for r in rows) + "\n]\n"


if __name__ == "__main__":
    main()
