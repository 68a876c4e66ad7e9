"""From what the user says to a complete configuration, and to and from TOML.

Later beats earlier: the keys' defaults, the problem's own settings, the preset, the preset's
part for the algorithm, a configuration file, what is set by hand.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

import mixfl
from mixfl.algorithms import recipe
from mixfl.algorithms.contract import Algorithm, Recipe
from mixfl.engine import Engine, Simulator
from mixfl.errors import MixflError, unknown
from mixfl.problem import Problem
from mixfl.settings import KEYS, Settings, check_keys
from mixfl.tasks import Task, find, read_toml


@dataclass(frozen=True)
class Plan:
    """A run that has been checked and can begin."""

    problem: Problem
    recipe: Recipe
    settings: Settings
    task: str = ""
    preset: str | None = None
    data: str | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    make_engine: Callable[["Plan"], Engine] | None = None  # by default, the simulator

    def engine(self) -> Engine:
        return self.make_engine(self) if self.make_engine else self.simulator()

    def simulator(self) -> Simulator:
        return Simulator(self.problem, self.algorithm(), self.settings)

    def algorithm(self) -> Algorithm:
        return self.recipe.build(self.problem, self.settings)

    def config(self, simulator: Simulator) -> dict[str, Any]:
        """Everything that the run depends on, `auto` replaced by what it came to."""
        s = dataclasses.asdict(self.recipe.resolve(self.problem, simulator.resolved()))
        keys = {k: _plain(v) for k, v in s.items() if k in self.recipe.uses and v is not None}
        head = dict(
            task=self.task or self.problem.name, algorithm=self.recipe.id, preset=self.preset,
            data=self.data, version=mixfl.__version__,
        )  # fmt: skip
        return {k: v for k, v in head.items() if v is not None} | keys | dict(self.options)


def _plain(value):
    """Optimizers given as functions are named; they can't be repeated from the file alone."""
    if callable(value):
        return f"python:{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
    return value


def plan(
    task: str,
    algorithm: str,
    *,
    preset: str | None = None,
    data: str | None = None,
    config: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    shared_with: Iterable[str] = (),
    problems: dict | None = None,
) -> Plan:
    """The plan of one run. `given` are keys set by hand: they must have an effect on it, or on
    one of the algorithms in `shared_with`. `problems` keeps built problems between plans."""
    found, chosen = find(task), recipe(algorithm)
    keys = chosen_keys(task, algorithm, preset, config or {}, given or {}, shared_with)
    options = {k: keys.get(k, default) for k, default in found.options.items()}
    built = _cached(problems, found, options, data)
    check_keys(built.settings, valid=KEYS)
    settings = {**built.settings, **{k: v for k, v in keys.items() if k in KEYS}}
    s = Settings(**{k: v for k, v in settings.items() if k in chosen.uses})
    weighted = built.weighted(s.w_f, s.w_c)
    # The same file wherever the run is repeated from.
    data = os.path.abspath(data) if data is not None else None
    task = os.path.abspath(task) if ".py" in task else task
    return Plan(weighted, chosen, s, task, preset, data, options)


def chosen_keys(
    task: str, algorithm: str, preset: str | None, config: Mapping[str, Any],
    given: Mapping[str, Any], shared_with: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """What the preset, a file and the user say. No data is read for it."""
    found, chosen = find(task), recipe(algorithm)
    valid = {*KEYS, *found.options}
    uses = {*chosen.uses, *found.options}
    for other in shared_with:
        uses |= recipe(other).uses
    check_keys(given, valid=valid, used=uses, by=f"'{algorithm}' on {task}")
    check_keys(config, valid=valid, used=uses, by=f"'{algorithm}' on {task}")
    return preset_keys(found, preset, algorithm) | dict(config) | dict(given)


def _cached(problems: dict | None, task: Task, options: dict, data: str | None) -> Problem:
    key = (task.name, repr(sorted(options.items())), data)
    if problems is not None and key in problems:
        return problems[key]
    built = task.build(options, Path(data) if data is not None else None)
    if problems is not None:
        problems[key] = built
    return built


def preset_keys(task: Task, preset: str | None, algorithm: str) -> dict[str, Any]:
    if preset is None:
        if "cpu" not in task.presets:
            return {}
        preset = "cpu"
    if preset not in task.presets:
        if not task.presets:
            raise MixflError(f"{task.name} has no presets: leave --preset out, use --set.")
        raise unknown("preset", preset, task.presets)
    keys = read_toml(task.presets[preset])
    special = keys.pop("algorithm", {}).get(algorithm, {})
    return keys | special


def to_toml(config: Mapping[str, Any]) -> str:
    return tomli_w.dumps(dict(config))
