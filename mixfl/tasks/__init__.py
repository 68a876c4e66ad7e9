"""Finds the paper's tasks and users' own problems by name.

A task is a module with `Options` (a dataclass of its own keys, see mixfl/validation.py) and
`problem(options, data)`. Its presets are TOML files in `<task>/presets/`. A user's problem is named
`path.py:problem`.
"""

import dataclasses
import functools
import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixfl.data.limits import TOML, read_small
from mixfl.errors import MixflError, unknown
from mixfl.problem import Problem

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


def check_name(name: str) -> None:
    """Check that there is such a task or file. Needs no JAX."""
    if name.startswith(PYTHON):
        raise MixflError(
            f"the problem of this run ({name}) was made by a Python program and is not in a file: "
            "repeat the run there, or name the problem along with --config, as "
            "`mixfl run path.py:problem --config FILE`."
        )
    if ".py" not in name and name not in TASKS:
        raise unknown("task", name, [*TASKS, "path.py:problem"])
    if ".py" in name and not _place(name)[0].is_file():
        raise MixflError(
            f"there is no file {_place(name)[0]} (name your own problem as path.py:problem)."
        )


def find(name: str) -> Task:
    """A task of the library, or `path.py:problem`."""
    check_name(name)
    if ".py" in name:
        return _own(name)
    module = importlib.import_module(TASKS[name])
    presets = {p.stem: p for p in sorted((FOLDER / name / "presets").glob("*.toml"))}

    def build(options, data):
        return module.problem(module.Options(**options), data)

    help = {f.name: f.metadata.get("help", "") for f in dataclasses.fields(module.Options)}
    return Task(name, dataclasses.asdict(module.Options()), build, presets, help)


def _place(name: str) -> tuple[Path, str]:
    """The file and the name in `path.py:problem`."""
    file, _, attribute = name.rpartition(":") if ":" in name else (name, "", "problem")
    return Path(file), attribute


def _own(name: str) -> Task:
    path, attribute = _place(name)
    problem = _imported(path.resolve(), attribute, path.stat().st_mtime_ns)

    def build(options, data):
        if data is not None:
            raise MixflError(f"--data is for built-in tasks: {name} loads its data itself.")
        return problem

    return Task(name, {}, build, {})


def task_in(config: Mapping[str, Any]) -> str:
    """The task of a run, or the name of a Python program's problem."""
    return str(config.get("task", "another task")).removeprefix(PYTHON)


class Enough(BaseException):
    """The problem is there: the rest of its file, which trains, need not run."""


_wanted: list[tuple[Any, str]] = []  # modules being imported, and the name wanted of each


def enough() -> None:
    """Called by `mixfl.train`: in a file that is imported for its problem, it trains nothing if
    the problem is there already."""
    if _wanted and isinstance(vars(_wanted[-1][0]).get(_wanted[-1][1]), Problem):
        raise Enough


@functools.cache  # a comparison asks once per algorithm, and the file may load large data
def _imported(path: Path, attribute: str, changed: int) -> Problem:
    # A unique module name, and its folder last: a file named like a package must not hide it.
    name = f"mixfl_problem_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.path.append(str(path.parent.resolve()))
    sys.modules[name] = module
    try:
        _wanted.append((module, attribute))
        try:
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        except Enough:
            pass
        finally:
            _wanted.pop()
        if not hasattr(module, attribute):
            names = [k for k, v in vars(module).items() if isinstance(v, Problem)]
            raise MixflError(
                f"it has no '{attribute}'. "
                + (f"It has: {', '.join(names)}." if names else "It defines no mixfl.Problem.")
            )
        given = getattr(module, attribute)
        problem = given if isinstance(given, Problem) else given() if callable(given) else given
    except MixflError as error:
        raise MixflError(f"{path}: {error}") from None
    except (Exception, SystemExit) as error:
        raise MixflError(f"{path} failed: {describe(error, path)}") from error
    if not isinstance(problem, Problem):
        raise MixflError(
            f"{path}:{attribute} is {type(problem).__name__}: expected a mixfl.Problem, or a "
            "function without arguments that returns one."
        )
    return dataclasses.replace(problem, name=path.stem) if problem.name == "problem" else problem


def describe(error: BaseException, path: Path | None = None) -> str:
    """The error, and the line of the user's file that raised it, if one did."""
    line, trace = None, error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if path is not None and file.name == path.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f" (line {line})" if line else ""
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}{where}"
    )


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_small(path, TOML))
    except FileNotFoundError:
        raise MixflError(f"there is no file {path}.") from None
    except (ValueError, RecursionError) as error:
        raise MixflError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise MixflError(f"{path} can't be read: {error.strerror}.") from None
