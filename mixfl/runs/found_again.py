"""Where the problem of a Python program can be found again, to repeat its run from config.toml."""

import ast
import os
import sys
from pathlib import Path
from types import ModuleType

from mixfl.problem import Problem
from mixfl.syntax import parsed
from mixfl.tasks import PYTHON


def task_of(problem: Problem) -> str:
    """`path.py:name` if importing that file makes the problem again; otherwise `python:NAME`.

    The problem must be a variable of a module, assigned once, in a statement that always runs when
    the file is imported (not below `if __name__ == "__main__"`, nor in a loop).
    """
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(file, str) and file.endswith(".py"):
            for name, value in list(vars(module).items()):
                if value is problem and _assigned_once(Path(file), name):
                    return f"{os.path.abspath(file)}:{name}"
    return PYTHON + problem.name


def _assigned_once(file: Path, name: str) -> bool:
    try:
        tree = parsed(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) and name in node.names:
            return False
        if isinstance(node, ast.ImportFrom) and node.level:  # such a file is no program of its own
            return False
    always = [n for n in ast.iter_child_nodes(tree) if isinstance(n, ast.Assign | ast.AnnAssign)]
    return _bound(tree, name) == 1 == sum(_bound(n, name) for n in always)


def _bound(node: ast.AST, name: str) -> int:
    """How often a module's own code gives the name a value; what functions do is theirs."""
    inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    if isinstance(node, inner):
        return int(getattr(node, "name", "") == name)
    if isinstance(node, ast.alias):
        return int((node.asname or node.name).split(".")[0] == name)
    own = isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
    return int(own) + sum(_bound(child, name) for child in ast.iter_child_nodes(node))
