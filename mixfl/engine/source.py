"""What an algorithm of the user's own depends on, beside its settings: its code, and the values
that its functions take from outside.

Declared settings are in config.toml. A hyperparameter in a global constant or in a closure is not,
and a run that goes on with another one would go on with another algorithm. Of an object of a class
of the user's own, only the name of the class is known.
"""

import ast
import dataclasses
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mixfl.algorithms.contract import Recipe
from mixfl.algorithms.marks import of_mixfl
from mixfl.engine.captured import PLAIN, outside
from mixfl.syntax import parsed


def source(recipe: Recipe) -> dict[str, dict[str, str]]:
    """By the name of each of the user's functions: a digest of its code, and the values that it
    takes from outside. Empty for mixfl's own algorithms."""
    if of_mixfl(recipe.make):
        return {}
    package = _package(recipe.make)
    found: dict[str, dict[str, str]] = {}
    waiting: list[Any] = [recipe.make]
    while waiting:
        function = waiting.pop()
        name = getattr(function, "__qualname__", "algorithm")
        if name in found:
            continue
        about = found.setdefault(name, {"code": _code(function)})
        if not isinstance(function, types.FunctionType):
            continue
        for variable, value in outside(function):
            value, given = _parts(value)
            if given:
                about[variable] = _words(given)
            if not isinstance(value, types.FunctionType | type):
                if not isinstance(value, types.ModuleType):
                    about[variable] = _words(value)
            elif _package(value) == package:
                waiting.append(value)
    return found


def _parts(value: Any) -> tuple[Any, Any]:
    """Of an algorithm or a partial: its function, and what is given to it. Otherwise itself."""
    if isinstance(value, Recipe):
        return value.make, value.settings
    if isinstance(value, functools.partial):
        inner, given = _parts(value.func)
        return inner, [given, *value.args, value.keywords]
    return inspect.unwrap(value) if callable(value) else value, None


def _package(function: Any) -> str:
    return (getattr(function, "__module__", None) or "").split(".")[0]


def _code(function: Any) -> str:
    """A digest of its text, without comments and line breaks."""
    try:
        text = ast.unparse(parsed(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError):
        code = getattr(function, "__code__", None)
        text = repr((code.co_code, code.co_names)) if code else ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _words(value: Any) -> str:
    """The value as text, the same in every process."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
        return f"{array.dtype}{list(array.shape)} {digest}"
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_words(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_words, value)) + "]"
    return type(value).__name__
