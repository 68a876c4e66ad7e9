"""From what the user says to a run that is checked and can begin."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mixfl
from mixfl.algorithms import recipe as find_recipe
from mixfl.algorithms.contract import Algorithm, Recipe
from mixfl.algorithms.keys import DP_KEYS
from mixfl.algorithms.marks import of_mixfl
from mixfl.engine import Simulator
from mixfl.engine.base import Engine
from mixfl.errors import MixflError
from mixfl.format_versions import RUN_FOLDER
from mixfl.privacy import rules
from mixfl.privacy.budget import Budget, budget, promise, settled
from mixfl.problem import Problem
from mixfl.runs import loud_noise
from mixfl.runs.keys import chosen_keys, merged, preset_keys, settings_of
from mixfl.runs.user_input import ALGORITHM_FILE
from mixfl.settings import KEYS, Settings
from mixfl.tasks import PYTHON, Task, find

__all__ = ["Plan", "chosen_keys", "plan", "plan_of", "preset_keys"]


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
    make_engine: Callable[["Plan"], Engine] | None = None  # None: the simulator
    wanted: int = 0  # rounds that were asked for, if a budget allows fewer

    @property
    def budget(self) -> Budget | None:
        """What it spends, if it is private."""
        return budget(self.problem, self.recipe.id, self.settings)

    def within_budget(self) -> "Plan":
        """With the noise and the rounds that its budget allows."""
        s = settled(self.problem, self.recipe.id, self.settings)
        return dataclasses.replace(self, settings=s, wanted=self.settings.rounds)

    def promise(self) -> Iterator[str]:
        """What it promises to its clients, if it is private."""
        if self.budget is not None:
            yield promise(self.budget, self.settings, self.wanted)
            yield from rules.notes(self.settings)
            yield from loud_noise.notes(self.problem, self.settings)

    def engine(self) -> Engine:
        """What runs its rounds."""
        return self.make_engine(self) if self.make_engine else self.simulator()

    def simulator(self) -> Simulator:
        s = self.recipe.resolve(self.problem, self.settings)
        return Simulator(self.problem, self.algorithm(), s)

    def algorithm(self) -> Algorithm:
        return self.recipe.build(self.problem, self.settings)

    def config(self, engine: Engine) -> dict[str, Any]:
        """Everything that the run depends on, with `auto` replaced by what it came to."""
        s = engine.resolved()
        every = {**{k: getattr(s, k) for k in KEYS}, **s.own}
        every |= s.named_schedules()
        idle = set() if s.private else set(DP_KEYS)
        idle |= {"cohort_cap"} if s.cohort_cap == "auto" else set()  # no Poisson sampling
        uses = self.recipe.uses - idle
        keys = {k: _plain(v) for k, v in every.items() if k in uses and v is not None}
        for term in self.problem.populations:
            own = {**term.settings, **s.of(term).named_schedules(term.settings)}
            keys |= {f"{term.name}.{k}": _plain(v) for k, v in own.items()}
        head = dict(
            task=self.task or PYTHON + self.problem.name, algorithm=self.recipe.id,
            algorithm_from=self._algorithm_from(), preset=self.preset, data=self.data,
            version=mixfl.__version__, format=RUN_FOLDER,
        )  # fmt: skip
        return {k: v for k, v in head.items() if v is not None} | keys | dict(self.options)

    def _algorithm_from(self) -> str | None:
        """Where an algorithm of the user's own is found again."""
        own = not of_mixfl(self.recipe.make)
        return (self.recipe.place or _plain(self.recipe.make)) if own else None

    def copies(self) -> dict[str, str]:
        """Files that are copied into the run folder: that of an algorithm of the user's own."""
        file, _, _ = self.recipe.place.rpartition(":")
        return {ALGORITHM_FILE: Path(file).read_text()} if file else {}


def _plain(value):
    """An optimizer given as a function is named; it can't be repeated from the file alone."""
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
    """The plan of one run of a task. `given` are keys set by hand: they must have an effect on the
    algorithm, or on one of those in `shared_with`. `problems` keeps built problems between
    plans."""
    known, recipe = find(task), find_recipe(algorithm)
    keys = chosen_keys(task, algorithm, preset, config or {}, given or {}, shared_with)
    if data is not None and (idle := sorted(known.synthetic & set(given or {}))):
        raise MixflError(
            f"{', '.join(idle)}: only for the synthetic data of the task {task}, without effect on "
            f"--data {data}. Leave it out."
        )
    options = {k: keys.get(k, default) for k, default in known.options.items()}
    options = rules.private_options(options, keys, {**(config or {}), **(given or {})})
    problem, s = settings_of(_cached(problems, known, options, data), recipe, keys)
    # Absolute paths: the run can be repeated from any folder.
    data = os.path.abspath(data) if data is not None else None
    task = os.path.abspath(task) if ".py" in task else task
    return Plan(problem, recipe, s, task, preset, data, options).within_budget()


def plan_of(problem: Problem, algorithm: str | Recipe, given: Mapping[str, Any]) -> Plan:
    """The plan of one run of a problem in a Python program."""
    recipe = find_recipe(algorithm)
    weighted, s = settings_of(problem, recipe, merged(recipe, given))
    return Plan(weighted, recipe, s).within_budget()


def _cached(problems: dict | None, task: Task, options: dict, data: str | None) -> Problem:
    key = (task.name, repr(sorted(options.items())), data)
    if problems is not None and key in problems:
        return problems[key]
    built = task.build(options, Path(data) if data is not None else None)
    if problems is not None:
        problems[key] = built
    return built
