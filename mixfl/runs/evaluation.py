"""What a problem's `evaluate` and `validate` say about a model, as keys of metrics.jsonl."""

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from mixfl.engine.preflight import attempt
from mixfl.errors import MixflError
from mixfl.losses import takes
from mixfl.problem import Params, Problem
from mixfl.runs.first import only_first
from mixfl.trees import Model, params_of

Metrics = dict[str, float | None]


class Evaluation:
    """A model that is being evaluated, by process 0 in its own thread. The rest of its `row` is
    known already."""

    def __init__(
        self, problem: Problem, round: int, x: Params, row: dict[str, Any], most: int = 10_000
    ):
        self.problem, self.round, self.row, self.most = problem, round, row, most
        self.metrics: Metrics = {}
        self.error: BaseException | None = None
        only_first(lambda: self._start(one_copy(x)))

    def _start(self, x: Params) -> None:
        # A daemon: a second Ctrl-C does not wait for it.
        self.thread = threading.Thread(target=self._run, args=(x,), daemon=True)
        self.thread.start()

    def _run(self, x: Params) -> None:
        try:
            self.metrics = evaluated(self.problem, x, self.most)
        except BaseException as error:  # raised by `result`
            self.error = error

    @property
    def done(self) -> bool:
        return not self.thread.is_alive()

    def result(self) -> Metrics:
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.metrics


def one_copy(x: Params) -> Params:
    """A copy of a model, because the next round overwrites what it is given. It is on one device:
    on all of them, each would do the same work. And it is always committed to that device: JAX
    would compile once more for arrays that are not."""
    copy = jax.tree.map(lambda a: jax.numpy.array(a.addressable_data(0), copy=True), x)
    return jax.device_put(copy, jax.local_devices()[0])


def evaluated(problem: Problem, x: Params, most: int = 10_000) -> Metrics:
    """The metrics of x, by `evaluate`, `validate` and `client_eval` (of at most `most` clients)."""
    each = problem.client_eval and partial(
        problem.client_eval, most=most, **_more(problem, problem.client_eval.metric, x)
    )
    judges: dict[str, tuple[str, Any]] = {
        "eval": ("evaluate", problem.evaluate), "valid": ("validate", problem.validate),
        "eval/clients": ("client_eval", each),
    }  # fmt: skip
    metrics: Metrics = {}
    for prefix, (name, judge) in judges.items():
        if judge is None:
            continue
        values = attempt(name, partial(judge, params_of(x), **_more(problem, judge, x)))
        if not isinstance(values, Mapping):
            raise MixflError(f"{name} returned {values!r}: expected a dict of numbers.")
        metrics |= {f"{prefix}/{key}": number(value, key) for key, value in values.items()}
    return metrics


def _more(problem: Problem, judge: Callable, x: Params) -> dict[str, Any]:
    """What it takes besides the parameters."""
    wants = takes(judge)
    more = {"frozen": problem.frozen.arrays} if problem.frozen and wants.frozen else {}
    return more | ({"state": x.state} if wants.state and isinstance(x, Model) else {})


def number(value: Any, key: str) -> float | None:
    """A float for JSON, which has no NaN."""
    try:
        value = float(value)
    except (TypeError, ValueError):
        raise MixflError(
            f"evaluate returned {key} = {value!r}: expected a dict of numbers."
        ) from None
    return value if math.isfinite(value) else None
