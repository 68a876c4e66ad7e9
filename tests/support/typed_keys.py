"""Writes mixfl/typed_keys.py, the keys of a run as type checkers and editors see them:

python tests/support/typed_keys.py
"""

import collections.abc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mixfl.settings import KEYS, Settings
from mixfl.validation import field_types

FILE = Path(__file__).parents[2] / "mixfl" / "typed_keys.py"
HEAD = '''"""The keys of a run for type checkers and editors: `mixfl.train(..., rounds=100)`.

Written by `python tests/support/typed_keys.py` from mixfl/settings.py, which has the checks.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict


class Keys(TypedDict, total=False):
    """Every key, and the type of its value."""

'''


def written(type: Any) -> str:
    origin, arguments = get_origin(type), get_args(type)
    if type is Any:
        return "Any"
    if type in (None, NoneType):
        return "None"
    if origin is Annotated:
        return written(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(quoted, arguments))}]"
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(written, arguments)))
    if origin is collections.abc.Callable:
        return "Callable[..., Any]"
    return type.__name__


def quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def content() -> str:
    types = field_types(Settings)
    return HEAD + "".join(f"    {name}: {written(types[name])}\n" for name in KEYS)


if __name__ == "__main__":
    FILE.write_text(content())
