"""Is the advice of `mixfl diagnose` right? Compares it with tuned algorithms on random problems.

    python -m benchmarks.advice            # 43 problems, about half an hour on two cores
    python -m benchmarks.advice --problems 6

Fixed in advance: the problems (random_problems.py); the target, 0.05 % of the first error f - f*,
or 1 % for logistic regressions, which are noisier; learning rates a factor of 2 apart; the same
number of central examples a round for all algorithms. The mean over 8 seeds counts. The target is
reached when the error stays below it, by the mean of ten rounds. "Tuned" means the fewest rounds
over all learning rates. The advice is judged by runs with the recommended learning rate, on the
same seeds.
"""

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_problems import CENTRAL, CLIENTS, Case, case
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import Batches, ClientFeed
from mixfl.measure.diagnosis import diagnose
from mixfl.settings import Settings

NAMES = ("pt", "1wgt", "2wgt")
SEEDS, ROUNDS, KEPT = 8, 250, 10
MOST = 150  # problems on which the best algorithm needs more rounds are left out
GRID = [2.0**i for i in range(-5, 7)]  # times 1 / (K beta)


def settings(case: Case, algorithm: str, eta: float = 0.1) -> Settings:
    batch = case.central if algorithm == "1wgt" else case.central // case.K
    return Settings(
        cohort_size=case.S, local_steps=case.K, client_batch=case.batch, client_lr=eta,
        central_batch=batch, devices=1,
    )  # fmt: skip


class Unchecked(Settings):
    """Settings whose learning rate may be a number that JAX traces."""

    def __post_init__(self):
        pass


def runner(case: Case, algorithm: str):
    """(etas, seeds) -> errors [etas, seeds, ROUNDS], with mixfl's own algorithm. Cohorts and
    batches are drawn in the compiled program, so that all runs run at once."""
    problem, base = case.problem, settings(case, algorithm)
    fed, cent = problem.terms
    columns, server = (
        jax.tree.map(jnp.asarray, t.examples.take(np.arange(len(t.examples)))) for t in (fed, cent)
    )
    n, steps = case.K * case.batch, 1 if algorithm == "1wgt" else case.K

    def course(eta, seed):
        s = Unchecked(**dataclasses.asdict(base) | {"client_lr": eta})
        a = ALGORITHMS[algorithm].build(problem, s)

        def round(state, key):
            who, order, drawn = jax.random.split(key, 3)
            chosen = jax.random.permutation(who, CLIENTS)[: case.S]
            orders = jax.vmap(lambda k: jax.random.permutation(k, n))(
                jax.random.split(order, case.S)
            )
            rows = (chosen[:, None] * n + orders).reshape(case.S, case.K, case.batch)
            feed = ClientFeed(
                Batches({k: v[rows] for k, v in columns.items()}, jnp.ones(rows.shape))
            )
            picked = jax.random.randint(drawn, (steps, 1, base.central_batch), 0, CENTRAL)
            batches = Batches({k: v[picked] for k, v in server.items()}, jnp.ones(picked.shape))
            draws = (None, batches)
            (message,) = a.broadcast(state, draws)
            uploads = jax.vmap(lambda f: a.summand(a.client(fed, message, f)))(feed)
            sums = jax.tree.map(lambda u: u.sum(0), uploads)
            state, _ = a.update(state, [message], [sums], a.central(state, draws))
            return state, case.gap(state.x)

        state = a.init(problem.init(None))
        return jax.lax.scan(round, state, jax.random.split(jax.random.key(seed), ROUNDS))[1]

    inner = jax.vmap(course, (None, 0))
    return jax.jit(jax.vmap(inner, (0, None)))


def first_below(errors: np.ndarray, start: float, goal: float) -> float:
    """The round from which the mean error over seeds stays below `goal`; it is `start` before the
    first round. Interpolated between two rounds by the logarithm of the error, so that one round
    more or less does not decide when there are only a few."""
    with np.errstate(over="ignore"):
        mean = np.concatenate([[start], np.nan_to_num(errors, nan=np.inf).mean(0)])
        kept = np.convolve(mean, np.ones(KEPT) / KEPT, "valid")  # mean of this and later rounds
        mean = np.minimum.accumulate(np.maximum(mean[: len(kept)], kept))
    below = np.flatnonzero(mean <= goal)
    if not len(below):
        return math.inf
    t = int(below[0])
    before, after = math.log(mean[t - 1]), math.log(max(mean[t], 1e-30))
    return t - 1 + (before - math.log(goal)) / (before - after)


def judged(seed: int, budget: float) -> dict:
    chosen = case(seed)
    start = float(chosen.gap(chosen.problem.init(None)))
    seeds = jnp.arange(SEEDS)
    etas = jnp.asarray([g / (chosen.K * chosen.beta) for g in GRID], jnp.float32)
    runners = {a: runner(chosen, a) for a in NAMES}
    tuned, at = {}, {}
    for a in NAMES:
        courses = np.asarray(runners[a](etas, seeds), np.float64)
        rounds = [first_below(c, start, chosen.target * start) for c in courses]
        tuned[a], at[a] = min(rounds), float(etas[int(np.argmin(rounds))])
    begun = time.perf_counter()
    advice = diagnose(
        chosen.problem,
        settings(chosen, "pt", 0.3 / chosen.beta),
        target=chosen.target,
        budget=budget,
        horizon=ROUNDS,
    )
    seconds = time.perf_counter() - begun
    a = advice.algorithm
    own = np.asarray(runners[a](jnp.asarray([advice.eta], jnp.float32), seeds), np.float64)
    return {
        "seed": seed, "kind": chosen.kind, "note": chosen.note, "S": chosen.S, "K": chosen.K,
        "central": chosen.central, "tuned": tuned, "advised": a,
        "predicted": {p.algorithm: p.rounds for p in advice.choice.all},
        "rounds": first_below(own[0], start, chosen.target * start),
        "eta_to_tuned": advice.eta / at[a], "seconds": seconds,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=43)
    parser.add_argument("--seeds", help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--budget", type=float, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "advice.json")
    options = parser.parse_args()
    rows: list[dict] = []
    seeds = [int(seed) for seed in options.seeds.split(",")] if options.seeds else range(200)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for row in pool.imap(functools.partial(judged, budget=options.budget), seeds):
            if min(row["tuned"].values()) > MOST:
                print(f"{row['seed']:4d} left out: the best needs over {MOST} rounds", flush=True)
                continue
            rows.append(row)
            show(row)
            if len(rows) == options.problems:
                break
    report(rows)
    options.out.write_text(json.dumps(rows, indent=1).replace("Infinity", "null") + "\n")


def show(row: dict) -> None:
    t = row["tuned"]
    best = min(t.values())
    print(
        f"{row['seed']:4d} {row['kind']:9s} S {row['S']:2d} K {row['K']:2d} |B_c| x J "
        f"{row['central']:3d} {row['note']:32s} tuned "
        + " ".join(f"{a} {t[a]:5.1f}" for a in NAMES)
        + " predicted " + " ".join(f"{row['predicted'].get(a, math.nan):5.1f}" for a in NAMES)
        + f"  advised {row['advised']:4s} {row['rounds']:5.1f}  x {row['rounds'] / best:.2f}"
        + f"  eta x {row['eta_to_tuned']:.2f}"
        + f" ({row['seconds']:.0f} s)", flush=True,
    )  # fmt: skip


def report(rows: list[dict]) -> None:
    def within(rounds) -> float:
        good = [rounds(r) <= 1.25 * min(r["tuned"].values()) for r in rows]
        return 100 * float(np.mean(good))

    best = {a: sum(r["tuned"][a] == min(r["tuned"].values()) for r in rows) for a in NAMES}
    print(f"\n{len(rows)} problems; best when tuned (ties count for each): {best}")
    print(f"advised algorithm and learning rate: {within(lambda r: r['rounds']):.0f} % within 1.25 "
          "x the best")  # fmt: skip
    print(f"advised algorithm, tuned: {within(lambda r: r['tuned'][r['advised']]):.0f} %")
    for a in NAMES:
        print(f"always {a}, tuned: {within(lambda r, a=a: r['tuned'][a]):.0f} %")


if __name__ == "__main__":
    main()
