"""Where an algorithm comes from, so that it can be built again with the learning rates of a round.

A compiled round takes the rates as arguments. It builds the algorithm with settings in which the
rates are JAX's tracers; an algorithm's file reads `s.client_lr` and knows nothing of this. The same
goes for frozen arrays, which the terms' losses hold.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mixfl.problem import Problem
from mixfl.settings import RATES, Settings

# Two runs that differ only in these and in rates share a program, unless it has read them.
OF_A_RUN = frozenset(
    {"rounds", "seed", "eval_every", "checkpoint_every", "measure", "dp_epsilon", "dp_delta",
     "dp_noise_multiplier", "dp_clip_start", "dp_clip_quantile", "dp_seed", "dp_scale"}
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Origin:
    make: Callable[[Problem, Settings], Any]
    problem: Problem
    settings: Settings  # with every `auto` that the algorithm determines replaced
    built: tuple  # the algorithm's functions. If one was replaced, the origin is not its own
    at: Callable[[int], Settings] | None = None  # the settings of a round, if a rate is a schedule

    def rates(self, round: int = 0) -> dict[str, float]:
        """The rates of a round of the run that the algorithm was built for."""
        s = self.settings if self.at is None else self.at(round)
        values = {name: getattr(s, name) for name in RATES}
        for term in self.problem.populations:
            if "client_lr" in term.settings:
                values[rate_of(term)] = s.of(term).at(round).client_lr
        return {name: value for name, value in values.items() if not isinstance(value, str)}

    def scheduled(self, round: int) -> dict[str, float]:
        """The rates of a round that are not the same in all rounds."""
        return {} if self.at is None else self.rates(round)

    def again(self, problem: Problem, s: Settings) -> Any:
        """With the rates and the frozen arrays of a round."""
        return self.make(problem, s)

    def of(self, problem: Problem) -> Any:
        """The same algorithm for another form of the problem."""
        built = self.make(problem, self.settings)
        return built._replace(origin=dataclasses.replace(self, problem=problem, built=built[:-1]))


class TracedSettings(Settings):
    """Settings inside a traced function. Rates are tracers, so nothing is checked. Notes which of
    OF_A_RUN were read."""

    def __post_init__(self):
        pass

    def __getattribute__(self, name: str):
        if name in OF_A_RUN:
            vars(self).get("noted", set()).add(name)
        return super().__getattribute__(name)

    def of(self, term: Any) -> "TracedSettings":
        if not term.settings:
            return self
        own = {k: v for k, v in term.settings.items() if k != "client_lr"}
        known = vars(self)
        traced = object.__new__(TracedSettings)
        vars(traced).update(known, **own, client_lr=known.get(rate_of(term), known["client_lr"]))
        return traced


def rate_of(term: Any) -> str:
    """The name of a population's own client_lr."""
    return f"{term.name}.client_lr"


def traced_settings(s: Settings, rates: dict[str, Any], noted: set[str]) -> TracedSettings:
    traced = object.__new__(TracedSettings)
    values = {f.name: getattr(s, f.name) for f in dataclasses.fields(s)}
    vars(traced).update(values, **rates, noted=noted)
    return traced


def with_rates(algorithm: Any, rates: dict[str, Any], frozen: Sequence[Any] = ()) -> Any:
    """The algorithm with other rates and frozen arrays, which may be tracers. Without them, the
    algorithm itself."""
    origin = algorithm.own_origin()
    if origin is None or not (rates or frozen):
        return algorithm
    problem = origin.problem.with_frozen(frozen) if frozen else origin.problem
    s = traced_settings(origin.settings, rates, set()) if rates else origin.settings
    return origin.again(problem, s)
