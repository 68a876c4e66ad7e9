"""Finds the paper's tasks and users' own problems by name.

A task is a module with `Options` (a dataclass of its own keys, see mixfl/validation.py) and
`problem(options, data)`. Its presets are TOML files in `<task>/presets/`. A user's problem is named
`path.py:problem`.
"""

import dataclasses
import functools
import importlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixfl.data.limits import TOML, read_small
from mixfl.errors import MixflError, unknown
from mixfl.problem import Problem
from mixfl.tasks.user_file import attribute_of, describe, enough, failing, is_file_name, place

__all__ = [
    "PYTHON", "TASKS", "Task", "check_name", "describe", "enough", "find", "read_toml", "task_in",
]  # fmt: skip

TASKS = {name: f"mixfl.tasks.{name}" for name in ("smile", "text", "movie")}
FOLDER = Path(__file__).parent
PYTHON = "python:"  # before the name of a problem that only its Python program has


@dataclass(frozen=True)
class Task:
    name: str
    options: dict[str, Any]  # its own keys and their defaults
    build: Callable[[dict[str, Any], Path | None], Problem]  # options, data -> problem
    presets: dict[str, Path]
    help: dict[str, str] = field(default_factory=dict)  # what its keys mean
    synthetic: frozenset[str] = frozenset()  # keys that only describe its synthetic data


def check_name(name: str) -> None:
    """Check that there is such a task or file. Needs no JAX."""
    if name.startswith(PYTHON):
        raise MixflError(
            f"the problem of this run ({name}) was made by a Python program and is not in a file: "
            "repeat the run there, or name the problem along with --config, as "
            "`mixfl run path.py:problem --config FILE`."
        )
    if not is_file_name(name):
        if name not in TASKS:
            raise unknown("task", name, [*TASKS, "path.py:problem"])
    elif not (file := place(name, "problem")[0]).is_file():
        raise MixflError(f"there is no file {file} (name your own problem as path.py:problem).")


def find(name: str) -> Task:
    """A task of the library, or `path.py:problem`."""
    check_name(name)
    if is_file_name(name):
        return _own(name)
    module = importlib.import_module(TASKS[name])
    presets = {p.stem: p for p in sorted((FOLDER / name / "presets").glob("*.toml"))}

    def build(options, data):
        return module.problem(module.Options(**options), data)

    fields = dataclasses.fields(module.Options)
    help = {f.name: f.metadata.get("help", "") for f in fields}
    synthetic = frozenset(f.name for f in fields if f.metadata.get("synthetic"))
    return Task(name, dataclasses.asdict(module.Options()), build, presets, help, synthetic)


def _own(name: str) -> Task:
    path, attribute = place(name, "problem")
    problem = _imported(path.resolve(), attribute, path.stat().st_mtime_ns)

    def build(options, data):
        if data is not None:
            raise MixflError(f"--data is for built-in tasks: {name} loads its data itself.")
        return problem

    return Task(name, {}, build, {})


def task_in(config: Mapping[str, Any]) -> str:
    """The task of a run, or the name of a Python program's problem."""
    return str(config.get("task", "another task")).removeprefix(PYTHON)


@functools.cache  # a comparison asks once per algorithm
def _imported(path: Path, attribute: str, changed: int) -> Problem:
    given = attribute_of(path, attribute, Problem, "mixfl.Problem")
    with failing(path):
        problem = given if isinstance(given, Problem) else given() if callable(given) else given
    if not isinstance(problem, Problem):
        raise MixflError(
            f"{path}:{attribute} is {type(problem).__name__}: expected a mixfl.Problem, or a "
            "function without arguments that returns one."
        )
    return dataclasses.replace(problem, name=path.stem) if problem.name == "problem" else problem


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(path, TOML))
    except FileNotFoundError:
        raise MixflError(f"there is no file {path}.") from None
    except (ValueError, RecursionError) as error:
        raise MixflError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise MixflError(f"{path} can't be read: {error.strerror}.") from None
