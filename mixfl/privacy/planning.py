"""The answer of `mixfl privacy`: the epsilon of a plan, or the noise for an epsilon."""

import math
from typing import Any

from mixfl.errors import MixflError
from mixfl.privacy.accountant import ADJACENCY, ASSUMES, Rounds, Sampling
from mixfl.privacy.banded import bands


def planned(
    clients: int, cohort: int, rounds: int, delta: float, noise: float | None = None,
    epsilon: float | None = None, sampling: Sampling = "poisson", cap: int | None = None,
    min_sep: int = 1, mechanism: str = "gaussian",
) -> dict[str, Any]:  # fmt: skip
    if (noise is None) == (epsilon is None):
        raise MixflError("give one of --noise and --epsilon: the other one is computed.")
    if mechanism == "banded" and sampling != "none":
        raise MixflError("--mechanism banded gets no credit for sampling: give --sampling none.")
    if cap is not None and sampling != "poisson":
        raise MixflError("--cap is for --sampling poisson.")
    if min_sep != 1 and sampling != "none":
        raise MixflError("--min-sep is for --sampling none.")
    check_delta(delta, clients)
    if noise is not None:
        check_number("noise", noise)
    if epsilon is not None:
        check_number("epsilon", epsilon)
    plan = Rounds(
        clients, cohort, sampling, cap, min_sep, bands(min_sep) if mechanism == "banded" else 1
    )
    plan.check()
    if noise is None:
        assert epsilon is not None
        noise = plan.noise_for(epsilon, rounds, delta)
    return {
        "epsilon": plan.epsilon(noise, rounds, delta), "delta": delta, "noise_multiplier": noise,
        "accountant": plan.accountant(), "neighbours": ADJACENCY[sampling],
        "assumes": ASSUMES[sampling],
    }  # fmt: skip


def check_number(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise MixflError(f"{name} = {value:g}: expected a number above 0.")


def check_delta(delta: float, clients: int) -> None:
    if not 0 < delta < 1 / clients:
        raise MixflError(
            f"delta = {delta:g} with {clients} clients: expected a number above 0 and below "
            f"1/clients = {1 / clients:.3g}. With 1/clients, publishing one client's data in full "
            "would be allowed."
        )
