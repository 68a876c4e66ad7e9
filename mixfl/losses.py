"""What a loss takes besides the parameters and the batch. The names of its parameters say so:

    loss(params, batch)             one loss per example
    loss(params, batch, key)        also draws at random, from a key per example
    loss(params, batch, frozen)     also needs arrays that nobody trains: Problem(frozen=...)
    loss(params, batch, state)      also carries a state, and returns (losses, the next state)

All three may be combined. A parameter with a default value keeps it, except `key`: with `key=None`,
a loss can also be called without keys, as in an evaluation.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

NAMES = ("frozen", "state")  # a third parameter of any other name is the key


class Takes(NamedTuple):
    key: bool = False
    frozen: bool = False
    state: bool = False


def takes(loss: Callable) -> Takes:
    """A wrapper around a loss has the attribute `takes`: what it must still be given."""
    told: Any = getattr(loss, "takes", None)
    if isinstance(told, Takes):
        return told
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return Takes()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [p for p in parameters if p.kind not in kinds]
    needed = [p for p in own if p.default is p.empty or p.name == "key"]
    names = [p.name for p in needed]
    plain = [p.name for p in needed if p.kind is not p.KEYWORD_ONLY and p.name not in NAMES]
    return Takes("key" in names or len(plain) > 2, "frozen" in names, "state" in names)
