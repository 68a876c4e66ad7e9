"""Runs of the tiny problem, what their folders hold, and how to damage it."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_problem
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.cli import main
from mixfl.errors import MixflError
from mixfl.runs.loop import Loop

TINY = Path(tiny_problem.__file__)
ROUNDS = 7
# Optimizers with a state wherever the algorithm has one.
ADAPTIVE = dict(
    client_opt="sgd(momentum=0.9)", server_opt="adam", server_lr=0.05, central_opt="adam",
    central_lr=0.02, merge_opt="sgd(momentum=0.5)",
)  # fmt: skip


class StopError(MixflError):
    """Stands for a process that ends in the middle of a run."""


def problem_of(algorithm):
    return tiny_problem.regularized if algorithm == "baseline" else tiny_problem.problem


def adaptive(algorithm) -> dict:
    return {k: v for k, v in ADAPTIVE.items() if k in ALGORITHMS[algorithm].uses}


def train(algorithm, out, problem=None, **changes):
    settings = {"rounds": ROUNDS, "checkpoint_every": 2, **adaptive(algorithm), **changes}
    return mixfl.train(problem or problem_of(algorithm), algorithm, out=out, **settings)


def evaluating(algorithm, action):
    """The problem, with `action(n)` called before its n-th evaluation (0: before the run)."""
    problem, calls = problem_of(algorithm), iter(range(1000))

    def evaluate(params):
        action(next(calls))
        return problem.evaluate(params)

    return dataclasses.replace(problem, evaluate=evaluate)


def stopping(algorithm, at):
    def action(n):
        if n == at:
            raise StopError("stopped")

    return evaluating(algorithm, action)


def train_until(algorithm, out, at, **changes):
    with pytest.raises(StopError):
        train(algorithm, out, stopping(algorithm, at), **changes)


def timeless(rows):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def lines(out):
    text = (out / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events(out) -> list:
    """(tag, round, value) as TensorBoard shows them."""
    board = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = board.Tags()["scalars"]
    return sorted((tag, e.step, e.value) for tag in tags for e in board.Scalars(tag))


def expected_events(rows) -> list:
    return sorted(
        (k, row["round"], float(np.float32(v)))
        for row in rows
        for k, v in row.items()
        if k != "round"
    )


def assert_same(out, other):
    """Two folders hold the same run: model bytes and metrics, times aside."""
    assert (out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert timeless(lines(out)) == timeless(lines(other))


def snapshot(out) -> dict:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in out.rglob("*") if p.is_file()}


def cli(monkeypatch, *arguments):
    """The command line, in this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["mixfl", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return stop.code
    return 0


def assert_equal_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def after_round(monkeypatch, round, action):
    """Calls `action` in the main thread, once a round is done and before it is evaluated."""
    check = Loop._check

    def acting(self, result):
        check(self, result)
        if result.round == round:
            action()

    monkeypatch.setattr(Loop, "_check", acting)


def truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file, at=None):
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(content)


def array_files(checkpoint):
    return sorted(p for p in checkpoint.glob("state/**/d/*") if p.is_file())


def kept(out) -> dict:
    """What must not be lost."""
    files = [p for p in (out / "checkpoints").rglob("*") if p.is_file()]
    return {p.relative_to(out): p.read_bytes() for p in [*files, out / "metrics.jsonl"]}
