"""A run's model together with its problem, which knows how to predict."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.runs.folder import OPERATION
from mixfl.runs.origin import changed
from mixfl.runs.plan import plan
from mixfl.runs.reading import best_round, load
from mixfl.runs.user_input import read_config
from mixfl.tasks import describe
from mixfl.trees import Model

Columns = dict[str, np.ndarray]
DEPLOYED = (*OPERATION, "cohorts", "secure")  # keys of deployments only
CHUNK = 1000  # rows at a time
ADD = (
    "Give it one: mixfl.Problem(..., predict=predict), where predict(params, batch) returns an "
    "array, or a dict of arrays, with a row per example (docs/export.md)."
)


@dataclass(frozen=True)
class Trained:
    path: Path
    config: dict[str, Any]
    problem: Problem
    model: Any  # the parameters, or a trees.Model
    notes: list[str]
    best: int | None = None  # the round of the model, if it is the best one and not the last

    @cached_property
    def predict(self) -> Callable[[Any, Mapping[str, Any]], dict[str, Any]]:
        """(model, batch) -> outputs by name; for a problem without `predict`, an error."""
        function = self.problem.predict
        if function is None:
            raise MixflError(f"the problem '{self.problem.name}' has no `predict`. {ADD}")
        names = _parameters(function)

        def predict(model, batch):
            state = isinstance(model, Model)
            more = {"state": model.state} if "state" in names and state else {}
            if "frozen" in names and self.problem.frozen is not None:
                more["frozen"] = self.problem.frozen.arrays
            outputs = function(model.params if state else model, batch, **more)
            return dict(outputs) if isinstance(outputs, Mapping) else {"output": outputs}

        return predict

    def outputs(self, columns: Mapping[str, np.ndarray]) -> Columns:
        """For all rows, chunk by chunk. Every output must have a row per example."""
        count = len(next(iter(columns.values()))) if columns else 0
        if not count:
            raise MixflError("the data has no row.")
        model, parts = jax.tree.map(jax.numpy.asarray, self.model), []
        run = self.predict if self.in_torch else jax.jit(self.predict)
        for start in range(0, count, CHUNK):
            batch = {k: a[start : start + CHUNK] for k, a in columns.items()}
            parts.append(self._of_chunk(run, model, batch))
        return {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}

    def _of_chunk(self, run, model, batch) -> Columns:
        rows = len(next(iter(batch.values())))
        try:
            outputs = {k: np.asarray(v) for k, v in run(model, batch).items()}
        except KeyError as error:
            raise MixflError(
                f"the model needs the column {error}; the data has {', '.join(batch)}."
            ) from None
        except Exception as error:  # whatever the user's function raises
            raise MixflError(f"`predict` failed: {describe(error)}") from error
        for name, a in outputs.items():
            if a.ndim < 1 or len(a) != rows:
                raise MixflError(
                    f"`predict` returned {name} of shape {a.shape} for {rows} rows: expected a row "
                    "per example."
                )
        return outputs

    @property
    def in_torch(self) -> bool:
        return hasattr(self.problem.predict, "torch_model")

    def some(self, rows: int = 8) -> Columns:
        """Examples of the problem's own, to compare outputs on; empty if it has none here."""
        terms = [t for t in self.problem.populations if t.here] or self.problem.central
        for term in terms:
            examples = term.examples
            if examples is not None and len(examples):
                return examples.take(np.arange(min(rows, len(examples))))
        return {}

    def used(self, columns: Columns) -> Columns:
        """The columns that `predict` reads."""
        seen: dict[str, None] = {}

        class Seen(dict):
            def __getitem__(self, key):
                seen[key] = None
                return super().__getitem__(key)

            def __contains__(self, key):
                seen[key] = None
                return super().__contains__(key)

            def get(self, key, default=None):
                seen[key] = None
                return super().get(key, default)

            def __iter__(self):
                seen.update(dict.fromkeys(super().__iter__()))
                return super().__iter__()

        self._of_chunk(self.predict, self.model, Seen(columns))
        return {k: columns[k] for k in columns if k in seen} or columns


def trained(path: Path, task: str | None = None, best: bool = False) -> Trained:
    """The model of a run, or its best one. `task`: path.py:problem, in place of the run's own."""
    if not (path / "config.toml").is_file():
        raise MixflError(f"{path} holds no run (no config.toml in it): give a run folder.")
    head, keys = read_config(path / "config.toml")
    keys = {k: v for k, v in keys.items() if k not in DEPLOYED}
    planned = plan(
        task or head.get("task", ""), head.get("algorithm", ""), preset=head.get("preset"),
        data=head.get("data"), config=keys, given={},
    )  # fmt: skip
    problem = planned.problem
    like = jax.eval_shape(problem.init, jax.random.key(0))
    run = load(path, like=like, best=best)
    if run.params is None:
        raise MixflError(
            f"{path} has no model: its status is {run.status}. Finish it with --resume, or give "
            "--best for the best model so far."
        )
    if run.frozen and run.frozen != problem.frozen_digest():
        raise MixflError(f"the frozen arrays are not those that {path} was trained with.")
    model = run.params if run.state is None else Model(run.params, run.state)
    others = changed(path, problem)
    notes = [f"the data is not what {path} was trained on ({'; '.join(others)})"] if others else []
    return Trained(path, run.config, problem, model, notes, best_round(path) if best else None)


def _parameters(function: Callable) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
