"""Python files of users: what `path.py:name` stands for. And the algorithms that installed
packages offer. No JAX."""

import contextlib
import importlib.util
import sys
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from mixfl.errors import MixflError, unknown

GROUP = "mixfl.algorithms"  # of entry points


def is_file_name(name: str) -> bool:
    """Is it `path.py:name`, or the name of something that comes with mixfl?"""
    return ".py" in name


def place(name: str, default: str) -> tuple[Path, str]:
    """The file and the name in `path.py:name`. The file is looked for in the current folder, then
    where Python looks for modules, as in an app of Flower's."""
    file, _, attribute = name.rpartition(":") if ":" in name else (name, "", default)
    path = Path(file)
    if path.is_absolute() or path.is_file():
        return path, attribute
    found = (Path(folder) / path for folder in sys.path if (Path(folder) / path).is_file())
    return next(found, path), attribute


def attribute_of(path: Path, attribute: str, kind: type, what: str) -> Any:
    """The object of this name in a user's file. `kind` and `what` say what it should be."""
    module = _module(path.resolve(), path.stat().st_mtime_ns, attribute, kind)
    if not hasattr(module, attribute):
        names = [k for k, v in vars(module).items() if isinstance(v, kind)]
        raise MixflError(
            f"{path.resolve()}: it has no '{attribute}'. "
            + (f"It has: {', '.join(names)}." if names else f"It defines no {what}.")
        )
    return getattr(module, attribute)


class Enough(BaseException):
    """What is wanted is there: the rest of the file, which trains, need not run."""


_wanted: list[tuple[ModuleType, str, type]] = []  # being imported, and what is wanted of each
_modules: dict[tuple[Path, int], ModuleType] = {}


def enough() -> None:
    """Called by `mixfl.train`: in a file that is imported for its problem or algorithm, it trains
    nothing if that is there already."""
    if _wanted:
        module, attribute, kind = _wanted[-1]
        if isinstance(vars(module).get(attribute), kind):
            raise Enough


def _module(path: Path, changed: int, attribute: str, kind: type) -> ModuleType:
    """One file may have the problem and the algorithms, and may load large data: it runs once."""
    if (path, changed) in _modules:
        return _modules[path, changed]
    # A unique module name, and its folder last: a file named like a package must not hide it.
    name = f"mixfl_problem_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.path.append(str(path.parent.resolve()))
    sys.modules[name] = module
    _wanted.append((module, attribute, kind))
    try:
        with failing(path), contextlib.suppress(Enough):
            spec.loader.exec_module(module)  # type: ignore[union-attr]
    finally:
        _wanted.pop()
    _modules[path, changed] = module
    return module


class failing:  # noqa: N801
    """Errors that a user's file raises are reported with its name and line."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, MixflError):
            raise MixflError(f"{self.path}: {error}") from None
        if isinstance(error, Exception | SystemExit):
            raise MixflError(f"{self.path} failed: {describe(error, self.path)}") from error


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


def installed() -> dict[str, EntryPoint]:
    """Algorithms of other packages, by name. Nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def check_algorithm(name: str, known: Collection[str]) -> None:
    """Checks that there is such an algorithm or file. `known` has the names of mixfl's own."""
    if is_file_name(name):
        if not (file := place(name, "")[0]).is_file():
            raise MixflError(f"there is no file {file} (name your own algorithm as path.py:name).")
    elif name not in known and name not in installed():
        raise unknown("algorithm", name, [*known, *installed(), "path.py:name"])
