"""The keys of a run, merged in one place. Later ones override earlier ones:

    the keys' defaults, the problem's own settings, the preset, the preset's part for the
    algorithm, a configuration file, what is set by hand

A key that is unknown, or has no effect on the algorithm, is an error.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from mixfl.algorithms import recipe as find_recipe
from mixfl.algorithms.contract import Recipe
from mixfl.errors import MixflError, unknown
from mixfl.optimizers import make
from mixfl.privacy.rules import applied, check_epochs, check_optimizer
from mixfl.problem import Federated, Problem
from mixfl.settings import POPULATION_KEYS, Settings, check_keys
from mixfl.tasks import Task, find, read_toml

NONE: Mapping[str, Any] = MappingProxyType({})


def chosen_keys(
    task: str, algorithm: str, preset: str | None, config: Mapping[str, Any],
    given: Mapping[str, Any], shared_with: Iterable[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """What the preset, a file and the user say about a run of a task. No data is read for it."""
    known, recipe = find(task), find_recipe(algorithm)
    return merged(
        recipe, given, preset=preset_keys(known, preset, recipe.id), config=config,
        options=known.options, shared_with=shared_with, where=f" on {task}",
        listed=shlex.join(["mixfl", "keys", task, "--algorithm", algorithm]),
    )  # fmt: skip


def merged(
    recipe: Recipe, given: Mapping[str, Any], *, preset: Mapping[str, Any] = NONE,
    config: Mapping[str, Any] = NONE, options: Iterable[str] = (),
    shared_with: Iterable[str] = (), where: str = "", listed: str = "mixfl keys",
) -> dict[str, Any]:  # fmt: skip
    """All but the defaults and the problem's own settings, which `settings_of` puts beneath.

    `given` is set by hand, and so are the settings of the recipe. These and `config` must have an
    effect on the algorithm or on one of `shared_with`. `options` are the task's own keys."""
    given = {**recipe.settings, **given}
    others = [recipe, *map(find_recipe, shared_with)]
    uses = frozenset(options).union(*(other.uses for other in others))
    valid = {*options}.union(*(other.valid for other in others))
    for keys in (given, config):
        of_run = [k for k in keys if "." not in k]  # others are of a population: settings_of
        check_keys(of_run, valid=valid, used=uses, by=f"'{recipe.id}'{where}", listed=listed)
    return {**preset, **config, **given}


def settings_of(
    problem: Problem, recipe: Recipe, keys: Mapping[str, Any], defaults: Mapping[str, Any] = NONE
) -> tuple[Problem, Settings]:
    """The settings of a run with these keys, and the problem with the weights that they set.
    `defaults` are other ones than a key's own."""
    check_keys(problem.settings, valid=recipe.valid)
    problem = with_own_settings(problem, {k: v for k, v in keys.items() if "." in k})
    keys = {**defaults, **problem.settings, **{k: v for k, v in keys.items() if "." not in k}}
    if keys.get("local_epochs") and "local_steps" not in keys:
        check_epochs(keys)
        keys["local_steps"] = steps_of_epochs(problem, keys)
    s = applied(recipe.id, recipe.chosen(keys))
    check_optimizer(recipe.id, s, make(s.client_opt, 1.0).plain)
    return problem.weighted(s.w_f, s.w_c), s


def with_own_settings(problem: Problem, keys: Mapping[str, Any]) -> Problem:
    """With the keys of single populations, `<population>.<key>`."""
    own: dict[str, dict[str, Any]] = {term.name: {} for term in problem.populations}
    valid = [f"{name}.{key}" for name in own for key in POPULATION_KEYS]
    for key, value in keys.items():
        if key not in valid:
            raise unknown("key", key, valid)
        name, _, last = key.rpartition(".")
        own[name][last] = value
    if not keys:
        return problem
    return problem.with_terms([
        dataclasses.replace(t, settings={**t.settings, **own[t.name]})
        if isinstance(t, Federated) else t for t in problem.terms
    ])  # fmt: skip


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


def steps_of_epochs(problem: Problem, keys: Mapping[str, Any]) -> int:
    """The steps of the largest client, so that local_steps limits none."""
    if not all(term.here for term in problem.populations):
        raise MixflError(
            "local_epochs: give local_steps too, the most steps of any client. The server does not "
            "know it, because the data is at the nodes, and what clients send depends on it."
        )
    s = Settings(**{k: keys[k] for k in ("local_epochs", "client_batch") if k in keys})
    largest = max([1, *(int(term.clients.sizes().max()) for term in problem.populations)])
    return -(-largest // s.client_batch) * (s.local_epochs or 1)
