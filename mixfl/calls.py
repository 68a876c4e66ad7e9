"""A call as text, such as `sgd(momentum=0.9)` or `cosine(0.1, 500)`. Only literals: nothing is
run."""

import ast
from typing import Any, NamedTuple

from mixfl.syntax import parsed


class Call(NamedTuple):
    name: str
    positional: tuple
    keywords: dict[str, Any]


def parsed_call(text: str) -> Call | None:
    """None if the text is neither a name nor the call of a name with literals."""
    try:
        node = parsed(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else None
        name = call.func if call else node
        if not isinstance(name, ast.Name):
            return None
        keywords = call.keywords if call else []
        named = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
        if len(named) < len(keywords) or any(k.arg is None for k in keywords):
            return None
        given = tuple(ast.literal_eval(a) for a in call.args) if call else ()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return Call(name.id, given, named)
