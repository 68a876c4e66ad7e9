"""A user's own functions in a run: called after each evaluation, or after each round.

A callback is a function, called with an `Event` after each evaluation; or an object with
`on_evaluation(event)`, `on_round(event)` or both.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from mixfl.engine.base import RoundResult
from mixfl.errors import MixflError
from mixfl.problem import Params
from mixfl.runs.counts import counted
from mixfl.runs.evaluation import number
from mixfl.trees import params_of

Hook = Callable[["Event"], Any]


class Event:
    """What a callback is told. It may look, and it may stop the run.

    Nothing is copied from the device before `metrics` or `params` is read. They can be read only
    while the callback runs: the next round overwrites the model.

    >>> def enough(event):
    ...     if event.metrics["eval/accuracy"] > 0.9:
    ...         event.stop("it is good enough")
    """

    def __init__(
        self, result: RoundResult, rounds: int, config: Mapping[str, Any],
        row: dict[str, Any] | None = None,
    ):  # fmt: skip
        self.round = result.round  # rounds done so far
        self.rounds = rounds  # in all
        self.config = config  # what config.toml has
        self.reason = ""  # to stop
        self._result: RoundResult | None = result
        self._row, self._params = row, None

    @property
    def metrics(self) -> dict[str, Any]:
        """After an evaluation, the row of metrics.jsonl. After a round, the round's own numbers
        (`train/...`, `clients/...`)."""
        if self._row is None:
            info = self._now().info
            own = {k: v for k, v in info.items() if k != "finite" and not counted(k)}
            self._row = {"round": self.round, **{k: number(v, k) for k, v in own.items()}}
        return self._row

    @property
    def params(self) -> Params:
        """The model after this round, a copy in NumPy's arrays."""
        if self._params is None:
            self._params = jax.tree.map(np.array, params_of(self._now().state.x))
        return self._params

    def stop(self, reason: str = "a callback stopped it") -> None:
        """Ends the run after this round. It is finished then, with the model of this round."""
        self.reason = str(reason) or "a callback stopped it"

    def _now(self) -> RoundResult:
        if self._result is None:
            raise MixflError(
                f"the event of round {self.round} is over: read its metrics and params while the "
                "callback runs."
            )
        return self._result

    def _over(self) -> None:
        self._result = None


class Callbacks:
    """All callbacks of a run."""

    def __init__(self, callbacks: Iterable[Any] = (), config: Mapping[str, Any] | None = None):
        self.config = config or {}
        self.after_rounds: list[Hook] = []
        self.after_evaluations: list[Hook] = []
        if not isinstance(callbacks, Iterable):
            raise MixflError("callbacks: expected a list of functions or objects.")
        for given in callbacks:
            hooks = [getattr(given, name, None) for name in ("on_round", "on_evaluation")]
            if not any(map(callable, hooks)):
                hooks = [None, given]
            if not all(hook is None or callable(hook) for hook in hooks) or isinstance(given, type):
                raise MixflError(
                    f"callbacks: {given!r} is not a callback: expected a function of an event, or "
                    "an object with on_evaluation(event) or on_round(event)."
                )
            self.after_rounds += [hooks[0]] if hooks[0] is not None else []
            self.after_evaluations += [hooks[1]] if hooks[1] is not None else []

    def round(self, result: RoundResult, rounds: int) -> str:
        """Why the run is to stop now; "" if it is not."""
        return _told(self.after_rounds, Event(result, rounds, self.config))

    def evaluation(self, result: RoundResult, rounds: int, row: dict[str, Any]) -> str:
        return _told(self.after_evaluations, Event(result, rounds, self.config, dict(row)))


def _told(hooks: Iterable[Hook], event: Event) -> str:
    try:
        for hook in hooks:
            hook(event)
    finally:
        event._over()
    return event.reason
