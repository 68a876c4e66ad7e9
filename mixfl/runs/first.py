"""Of several processes that train one model (engine/processes.py), only process 0 evaluates, writes
and prints. This file is where that is decided."""

from collections.abc import Callable
from typing import TypeVar

from mixfl.engine import processes

T = TypeVar("T")


def by_first(action: Callable[[], T]) -> T:
    """Process 0 does it, the others wait. All get what it returns (as JSON makes it, if there are
    several) or its error."""
    with processes.Together() as shared:
        shared.value = only_first(action)
    return shared.value


def only_first(action: Callable[[], T]) -> T | None:
    """Process 0 does it, the others go on with None."""
    return action() if processes.first() else None
