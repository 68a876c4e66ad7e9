"""Pretrain: `central` for the first rounds, then `fedavg`. Shows forgetting."""

from typing import NamedTuple

from mixfl.algorithms.central import State as CentralState
from mixfl.algorithms.central import central as central_alone
from mixfl.algorithms.contract import AUTO_KEYS, CENTRAL_KEYS, CLIENT_KEYS, Algorithm, algorithm
from mixfl.algorithms.fed_avg import State as FedAvgState
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.errors import MixflError
from mixfl.problem import Params, Problem
from mixfl.settings import Settings


class State(NamedTuple):
    x: Params
    central: tuple  # the rest of central's state
    server: tuple  # the rest of fedavg's state


@algorithm(
    "pretrain", CLIENT_KEYS, CENTRAL_KEYS, AUTO_KEYS, frozenset({"pretrain_rounds", "rounds"})
)
def pretrain(problem: Problem, s: Settings) -> Algorithm:
    """The central terms alone for the first rounds, then FedAvg.

    >>> mixfl.pretrain(pretrain_rounds=10).settings
    {'pretrain_rounds': 10}
    """
    rounds = int(s.pretrain_rounds)
    if rounds > s.rounds:
        raise MixflError(f"pretrain_rounds = {rounds} is more than rounds = {s.rounds}.")
    first = central_alone.build(problem, s)
    then = fed_avg.build(problem, s)

    def init(x):
        return State(x, first.init(x)[1:], then.init(x)[1:])

    # Each phase sees its own state and leaves the other's alone.
    def central(state, drawn):
        return first.central(CentralState(state.x, *state.central), drawn)

    def update_first(state, broadcasts, sums, central):
        new, info = first.update(CentralState(state.x, *state.central), broadcasts, sums, central)
        return State(new.x, new[1:], state.server), info

    def update_then(state, broadcasts, sums, central):
        new, info = then.update(FedAvgState(state.x, *state.server), broadcasts, sums, central)
        return State(new.x, state.central, new[1:]), info

    phases = (
        first._replace(init=init, central=central, update=update_first),
        then._replace(init=init, update=update_then),
    )
    return phases[1]._replace(phase=lambda t: phases[0] if t < rounds else phases[1])
