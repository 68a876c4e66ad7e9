"""`mixfl check --algorithm`: does an algorithm keep its contract on a problem?

A few rounds are run in several ways that must not make a difference.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mixfl.algorithms.contract import Recipe
from mixfl.engine import Simulator
from mixfl.measure.check import COHORT, TOLERANCE, Finding, said
from mixfl.problem import Problem
from mixfl.settings import Settings

ROUNDS = 3


def check_algorithm(problem: Problem, recipe: Recipe, s: Settings) -> tuple[list[str], bool]:
    """Lines to print, and whether all checks passed."""
    return said(list(findings(problem, recipe, s)))


def findings(problem: Problem, recipe: Recipe, s: Settings) -> Iterator[Finding]:
    clients = min([s.cohort_size, COHORT, *(len(t.clients) for t in problem.populations)])
    s = dataclasses.replace(s, rounds=ROUNDS, cohort_size=clients, devices=1, cohort_chunk="auto")
    simulator, states = rounds(problem, recipe, s)
    before, after = map(shapes, (states[0], states[-1]))
    name = f"'{recipe.id}'"
    yield Finding(before == after, f"{name}: a state keeps its structure, shapes and dtypes", "")
    good = all(np.isfinite(a).all() for a in jax.tree.leaves(states[-1]))
    yield Finding(good, f"{name}: {ROUNDS} rounds are finite", "" if good else "lower client_lr")
    if before != after or not good:
        return
    moved = distance(states[-1].x, states[0].x)
    yield Finding(moved > 0, f"{name}: it trains", f"the model moved by {moved:.3g}")
    _, again = rounds(problem, recipe, s)
    same = all(map(np.array_equal, *map(jax.tree.leaves, (states, again))))
    yield Finding(same, f"{name}: the same seed gives the same bits", "")
    ways: dict[str, dict[str, Any]] = {
        "clients one at a time": dict(cohort_chunk=1),
        "whole tables and layers": dict(tables="dense", first_layer="plain"),
    }
    if s.aggregation != "mean" or not simulator.algorithm.feed.clients:
        return
    for way, keys in ways.items():
        _, other = rounds(problem, recipe, dataclasses.replace(s, **keys))
        error = distance(other[-1].x, states[-1].x) / moved if moved else 0.0
        detail = f"differs by {error:.2g} of the way"
        yield Finding(error < TOLERANCE, f"{name}: {way}: the same model", detail)


def rounds(problem: Problem, recipe: Recipe, s: Settings) -> tuple[Simulator, list[Any]]:
    """The states in NumPy: before the first round, and after each."""
    simulator = Simulator(problem, recipe.build(problem, s), recipe.resolve(problem, s))
    state = simulator.init()
    states = [jax.tree.map(np.array, state)]
    for result in simulator.rounds(state, 0, ROUNDS):
        states.append(jax.tree.map(np.array, result.state))
    return simulator, states


def shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(a.shape, a.dtype) for a in leaves]


def distance(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    squares = [np.sum(np.square(np.asarray(x, float) - np.asarray(y, float))) for x, y in pairs]
    return float(np.sqrt(sum(squares)))
