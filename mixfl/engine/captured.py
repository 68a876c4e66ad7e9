"""What a function takes from outside of itself: global constants and variables of functions around
it.

A compiled program keeps the values that were there when it was traced. If one was replaced since,
as a constant in a notebook, the program must not be used again. What is changed in place (an entry
of a dict, an attribute of an object) is not seen.
"""

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

PLAIN = (int, float, complex, str, bytes, types.NoneType)  # bool is an int


def captured(*functions: Any) -> tuple:
    return tuple(_captured(list(functions)))


def _captured(waiting: list) -> Iterator[Any]:
    """Follows functions to those that they call, but not into installed libraries."""
    seen = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, PLAIN):
            yield value
            continue
        yield id(value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.MethodType):
            waiting += [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType) and _own(value.__code__):
            waiting += [found for _, found in outside(value)]
            waiting.append(getattr(value, "__wrapped__", None))


def outside(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The names and values of global constants, of variables of functions around it, and of its
    defaults."""
    code = function.__code__
    for name in sorted(set(_names(code))):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield name, cell.cell_contents
    first = code.co_argcount - len(function.__defaults__ or ())
    yield from zip(code.co_varnames[first:], function.__defaults__ or (), strict=False)
    yield from (function.__kwdefaults__ or {}).items()


def _own(code: types.CodeType) -> bool:
    return not any(part in code.co_filename for part in ("site-packages", "/lib/python"))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
