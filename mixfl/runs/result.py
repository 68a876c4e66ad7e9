"""What a run returns."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mixfl.engine import processes
from mixfl.errors import MixflError
from mixfl.problem import Params
from mixfl.runs.checkpoint import Checkpoints
from mixfl.runs.choice import Choice
from mixfl.runs.first import by_first
from mixfl.runs.html import summary
from mixfl.runs.sinks.base import Sinks
from mixfl.trees import Model


@dataclass(frozen=True)
class Result:
    """What `mixfl.train` returns.

    >>> result = mixfl.train(problem, "fedavg", rounds=1)
    >>> result.params["w"].shape, result.metrics[-1]["round"], result.config["rounds"]
    ((4,), 1, 1)
    """

    params: Params  # after the last round
    metrics: list[dict[str, Any]]  # one row per evaluated round, as in metrics.jsonl
    config: dict[str, Any]
    rejected: int = 0  # client updates that were left out (not finite)
    best: dict[str, Any] | None = None  # the best row, by the key best_by
    best_params: Params | None = None  # its model, with keep_best or early_stop
    state: Any = None  # of the model after the last round, if the problem has one
    best_state: Any = None

    def __post_init__(self):
        for params, state in (("params", "state"), ("best_params", "best_state")):
            if isinstance(model := getattr(self, params), Model):
                object.__setattr__(self, params, model.params)
                object.__setattr__(self, state, model.state)

    @property
    def model(self) -> Any:
        """The parameters, with the state if there is one."""
        return self.params if self.state is None else Model(self.params, self.state)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        left_out = [f"{self.rejected} client updates left out"] if self.rejected else []
        best = [f"the best model is of round {self.best['round']}"] if self.best else []
        return summary(self.config, self.metrics, left_out + best)


def best_model(
    choice: Choice, rows: list[dict[str, Any]], like: Params, checkpoints: Checkpoints | None,
    sinks: Sinks,
) -> Params | None:  # fmt: skip
    """The model of the best row, from its checkpoint, for all processes."""
    best = choice.best(rows)
    if not choice.keep or best is None:
        return None
    params = jax.tree.map(np.zeros_like, like)

    def read() -> bool:
        nonlocal params
        assert checkpoints is not None  # process 0 has them
        try:
            params = checkpoints.model(best["round"], like)
        except MixflError as error:
            sinks.note(f"there is no best model, of round {best['round']}: {error}")
            return False
        return True

    return processes.share(params) if by_first(read) else None
