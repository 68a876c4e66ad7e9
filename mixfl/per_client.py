"""Numbers of a population's clients, one each: an array, or a function of the round."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mixfl.errors import MixflError


@dataclass(frozen=True, eq=False)
class PerClient:
    """`at(round)` returns [clients] numbers. What was given is for all clients; those without
    examples are cut out."""

    name: str
    given: Any
    clients: int
    kept: np.ndarray | None = None  # positions of the clients that have examples
    largest: float = np.inf

    def __post_init__(self):
        if not callable(self.given):
            object.__setattr__(self, "given", self._checked(self.given))

    @property
    def fixed(self) -> bool:
        return not callable(self.given)

    def at(self, round: int) -> np.ndarray:
        return self.given if self.fixed else self._checked(self.given(round), f"({round})")

    def _checked(self, values: Any, when: str = "") -> np.ndarray:
        try:
            a = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            a = np.zeros(0)
        if a.shape != (self.clients,):
            raise MixflError(
                f"{self.name}{when}: expected one number for each of the {self.clients} clients, "
                f"got {type(values).__name__} of shape {np.shape(values)}."
            )
        if not (np.isfinite(a).all() and a.min() >= 0 and a.max() <= self.largest):
            limit = "finite and at least 0"
            limit += f", at most {self.largest:g}" if np.isfinite(self.largest) else ""
            raise MixflError(f"{self.name}{when}: the numbers of clients must be {limit}.")
        return a if self.kept is None else a[self.kept]


def per_client(
    name: str, given: Any, clients: int, kept: np.ndarray, largest: float = np.inf
) -> PerClient | None:
    if given is None or isinstance(given, PerClient):
        return given
    return PerClient(name, given, clients, kept if len(kept) < clients else None, largest)
