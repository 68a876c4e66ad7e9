"""What a problem's `evaluate` and `validate` say of a model, as keys of metrics.jsonl; in a
thread."""

import math
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from mixfl.engine import processes
from mixfl.engine.preflight import attempt
from mixfl.errors import MixflError
from mixfl.problem import Params, Problem


class Evaluation:
    """A model being evaluated, in a thread of its own and by process 0. The rest of its `row` is
    known already."""

    def __init__(self, problem: Problem, round: int, x: Params, row: dict[str, Any]):
        self.round, self.row = round, row
        self.found: dict[str, float | None] = {}
        self.error: BaseException | None = None
        # A second Ctrl-C does not wait for it.
        if processes.first():
            args = (problem, one_copy(x))
            self.thread = threading.Thread(target=self._run, args=args, daemon=True)
            self.thread.start()

    def _run(self, problem: Problem, x: Params) -> None:
        try:
            self.found = evaluated(problem, x)
        except BaseException as error:  # raised by `result`
            self.error = error

    @property
    def done(self) -> bool:
        return not self.thread.is_alive()

    def result(self) -> dict[str, float | None]:
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.found


def one_copy(x: Params) -> Params:
    """A model's copy, for the next round uses up what it is given. On one device, and bound to it
    always: all devices would do the same work, and for arrays that are bound or not JAX compiles
    twice."""
    copy = jax.tree.map(lambda a: jax.numpy.array(a.addressable_data(0), copy=True), x)
    return jax.device_put(copy, jax.local_devices()[0])


def evaluated(problem: Problem, x: Params) -> dict[str, float | None]:
    """What the problem's `evaluate` and `validate` say of x, as keys of metrics.jsonl."""
    judges = {"eval": ("evaluate", problem.evaluate), "valid": ("validate", problem.validate)}
    rows: dict[str, float | None] = {}
    for prefix, (name, judge) in judges.items():
        if judge is None:
            continue
        found = attempt(name, partial(judge, x))
        if not isinstance(found, Mapping):
            raise MixflError(f"{name} returned {found!r}: expected a dict of numbers.")
        rows |= {f"{prefix}/{key}": number(value, key) for key, value in found.items()}
    return rows


def number(value: Any, key: str) -> float | None:
    """A float for JSON, which knows no NaN."""
    try:
        value = float(value)
    except (TypeError, ValueError):
        raise MixflError(
            f"evaluate returned {key} = {value!r}: expected a dict of numbers."
        ) from None
    return value if math.isfinite(value) else None
