"""Which functions of an algorithm may run in another form (see forms/)."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from mixfl.algorithms.contract import Algorithm

C = TypeVar("C", bound=Callable)


def own_loss_only(function: C) -> C:
    """Marks a client function whose steps use the model through the client's own loss alone; and a
    summand that uses the own part only as a vector, in sums and products with numbers.

    Only such functions may run in another form (see forms/): a form gives them other arrays in
    place of the model's. Functions without the mark always get the model itself. A mark on a
    function that is not mixfl's is checked on a client before the first round.
    """
    function.own_loss_only = True  # type: ignore[attr-defined]
    return function


def uses_own_loss_only(algorithm: "Algorithm") -> bool:
    return all(getattr(f, "own_loss_only", False) for f in (algorithm.client, algorithm.summand))


def marked_by_user(algorithm: "Algorithm") -> bool:
    """Is there a mark that must be checked?"""
    both = (algorithm.client, algorithm.summand)
    return uses_own_loss_only(algorithm) and not all(map(of_mixfl, both))


def known_marks(algorithm: "Algorithm") -> "Algorithm":
    """Without marks that can't be checked where a client's data is not: in a deployment."""
    if not marked_by_user(algorithm):
        return algorithm
    return algorithm._replace(client=lambda *given: algorithm.client(*given))


def of_mixfl(function: Any) -> bool:
    """Is it known here, and need not be checked?"""
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or "").split(".")[0] == "mixfl"
