"""Answers that go wrong in every way, at random but by a seed. The chaos test copies this file into
a project, and itself looks up here what must have gone wrong."""

import time

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from mixfl.deploy.flower.apps import answer as honest

SEED = 7
SHARE = 0.3  # of the answers that go wrong
DEADLINE = 20.0  # of a round


def spoiled(good: RecordDict, **changes) -> RecordDict:
    """With something else about the first array of the change."""
    name, first = next(iter(good["weighted"].items()))
    fields = dict(dtype=first.dtype, shape=first.shape, stype=first.stype, data=first.data)
    own = ArrayRecord({**good["weighted"], name: Array(**{**fields, **changes})})
    return RecordDict({**good, "weighted": own})


def first(good: RecordDict) -> Array:
    return next(iter(good["weighted"].values()))


def raising(good: RecordDict) -> RecordDict:
    raise RuntimeError("the owner's secret")


def late(good: RecordDict) -> RecordDict:
    time.sleep(DEADLINE)
    return good


# By the reason for which the server is to leave the answer out.
FAULTS = {
    "nonfinite": lambda good: spoiled(good, data=b"\xff" * len(first(good).data)),
    "shape": lambda good: spoiled(good, shape=(10**9, 10**9)),
    "dtype": lambda good: spoiled(good, dtype="object"),
    "size": lambda good: spoiled(good, data=first(good).data[:-1]),
    "malformed": lambda good: RecordDict({**good, "numbers": MetricRecord({"weight": 1.0})}),
    "failed": raising,
    "late": late,
}


def fault(round: int, number: int) -> str | None:
    """What goes wrong with a client's answer in a round, if anything does."""
    rng = np.random.default_rng([SEED, round, number])
    if rng.random() >= SHARE:
        return None
    return str(rng.choice(list(FAULTS)))


def answer(problem, kind, content, context) -> RecordDict:
    good = honest(problem, kind, content, context)
    if kind != "train":
        return good
    wrong = fault(content["train"]["round"], context.node_config["partition-id"])
    return FAULTS[wrong](good) if wrong else good
