"""What a private run spends, round by round, and the noise or the rounds that follow from it.

Several populations have different clients. A client is in one of them, so the largest epsilon of
any population holds for all.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mixfl.errors import MixflError
from mixfl.losses import takes
from mixfl.privacy.accountant import ADJACENCY, ASSUMES, Rounds, usual_cap
from mixfl.privacy.banded import bands
from mixfl.privacy.planning import check_delta
from mixfl.problem import Problem
from mixfl.settings import Settings


@dataclass(frozen=True)
class Budget:
    populations: Sequence[Rounds]
    delta: float
    before: int  # rounds at the start in which no client takes part

    def spent(self, noise: float, rounds: int, repeated: int = 0) -> float:
        """Epsilon after a number of rounds. In each of the `repeated` ones, a client may have taken
        part once more than its turns allow."""
        private = max(0, rounds - self.before)
        return max(
            p.epsilon(noise, private + repeated * p.min_sep, self.delta) for p in self.populations
        )

    def noise_for(self, epsilon: float, rounds: int) -> float:
        private = max(1, rounds - self.before)
        return max(p.noise_for(epsilon, private, self.delta) for p in self.populations)

    def affordable(self, noise: float, epsilon: float, rounds: int) -> int:
        private = rounds - self.before
        most = min(p.affordable(noise, epsilon, self.delta, private) for p in self.populations)
        return most + self.before


def budget(problem: Problem, algorithm: str, s: Settings) -> Budget | None:
    """None if the run is not private."""
    if not s.private:
        return None
    assert s.dp_delta is not None
    if problem.client_eval is not None and not problem.client_eval.at_server:
        raise MixflError(
            "client_eval with differential privacy: what it tells about participants is not in the "
            "budget. Evaluate held-out clients at the server (at_server=True), or leave it out."
        )
    before = 0
    if algorithm == "pretrain":
        before = s.rounds // 2 if isinstance(s.pretrain_rounds, str) else s.pretrain_rounds
    populations = []
    for term in problem.populations:
        if takes(term.loss).state:
            raise MixflError(
                f"the loss of '{term.name}' carries a state, which would be merged without noise: "
                "use a model without one (layer or group norm in place of batch norm)."
            )
        clients = len(term.clients) if s.dp_clients == "auto" and term.here else s.dp_clients
        if isinstance(clients, str):
            raise MixflError(
                "dp: how many clients are there? Give dp_clients: delta must be below 1/clients."
            )
        clients *= s.dp_scale
        check_delta(s.dp_delta, clients)
        if term.sampling is not None and s.dp_sampling != "none":
            raise MixflError(
                f"the population '{term.name}' has weights of its own (Federated(sampling=...)): "
                "there is no credit for that. Give --dp sampling=none."
            )
        plan = Rounds(
            clients, s.dp_scale * s.cohort_size, s.dp_sampling, _cap(s, clients), s.dp_min_sep,
            bands(s.dp_min_sep) if s.dp_mechanism == "banded" else 1,
            s.dp_mechanism == "distributed",
        )  # fmt: skip
        plan.check()
        if clients // s.dp_min_sep < plan.cohort:
            raise MixflError(
                f"dp: with min_sep = {s.dp_min_sep}, a round of '{term.name}' can choose among "
                f"{clients // s.dp_min_sep} of its {clients} clients: cohort_size = "
                f"{s.cohort_size} is more."
            )
        populations.append(plan)
    return Budget(tuple(populations), s.dp_delta, before)


def _cap(s: Settings, clients: int) -> int | None:
    if s.dp_sampling != "poisson":
        return None
    cap = s.cohort_cap
    if s.dp_scale > 1:  # it is far above all cohorts
        return None
    if isinstance(cap, str):
        return usual_cap(clients, s.cohort_size)
    return min(cap, clients) if cap >= s.cohort_size else cap


def settled(problem: Problem, algorithm: str, s: Settings) -> Settings:
    """With the noise for the budget. If noise is given too, with as many rounds as the budget
    allows."""
    plan = budget(problem, algorithm, s)
    if plan is None:
        return s
    if s.dp_noise_multiplier is None:
        assert s.dp_epsilon is not None
        return dataclasses.replace(s, dp_noise_multiplier=plan.noise_for(s.dp_epsilon, s.rounds))
    if s.dp_epsilon is None or plan.spent(s.dp_noise_multiplier, s.rounds) <= s.dp_epsilon:
        return s
    rounds = plan.affordable(s.dp_noise_multiplier, s.dp_epsilon, s.rounds)
    if rounds <= plan.before:
        raise MixflError(
            f"dp: one round with noise_multiplier = {s.dp_noise_multiplier:g} spends more than "
            f"epsilon = {s.dp_epsilon:g}: give more noise, or leave it out."
        )
    more: Any = {"pretrain_rounds": plan.before} if algorithm == "pretrain" else {}
    return dataclasses.replace(s, rounds=rounds, **more)


def promise(plan: Budget, s: Settings, wanted: int) -> str:
    """What the run promises, in a sentence. `wanted`: the rounds that were asked for."""
    assert s.dp_noise_multiplier is not None
    epsilon = plan.spent(s.dp_noise_multiplier, s.rounds)
    text = "no" if math.isinf(epsilon) else f"({epsilon:.4g}, {plan.delta:g})-differential"
    ends = ""
    if s.rounds < wanted:
        ends = (
            f". The budget of epsilon = {s.dp_epsilon:g} is spent after round {s.rounds} of "
            f"{wanted}: the run ends there"
        )
    return (
        f"{text} privacy after {s.rounds} rounds, of neighbours that differ in "
        f"{ADJACENCY[s.dp_sampling]}; noise multiplier {s.dp_noise_multiplier:.4g}; "
        f"{plan.populations[0].accountant()}; assumes: {ASSUMES[s.dp_sampling]}{ends}"
    )
