"""Python source as a syntax tree, also while other threads parse."""

import ast
from typing import Any

ATTEMPTS = 100


def parsed(source: str | bytes, mode: str = "exec") -> Any:
    """`ast.parse`, tried again where CPython before 3.11.9 fails by chance: its threads share a
    counter (CPython's issue 106905), and a traceback that is printed elsewhere parses too."""
    for _ in range(ATTEMPTS - 1):
        try:
            return ast.parse(source, mode=mode)
        except SystemError:
            continue
    return ast.parse(source, mode=mode)
