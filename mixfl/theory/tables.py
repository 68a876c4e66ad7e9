"""`mixfl bounds`: the bounds for one setting, as tables. Needs no JAX."""

from typing import Any, NamedTuple

from mixfl.errors import MixflError
from mixfl.theory.bounds import (
    ALGORITHMS,
    Condition,
    Rates,
    Rounds,
    max_rates,
    max_step,
    rate_condition,
    rounds,
)
from mixfl.theory.one_way import one_way_rounds

NAMES = {"pt": "PT", "1wgt": "1-w GT", "2wgt": "2-w GT"}


class Entry(NamedTuple):
    algorithm: str
    convexity: str
    rounds: Rounds
    max_step: float
    rates: Rates
    condition: Condition
    explicit_rounds: int | None  # with the constants of the proof; None: it has none here


def bounds(
    *, beta, sigma2, sigma_c2, sigma_f2, K, S, epsilon, mu, G2, B2, D2, F, eta_s, eta_m
) -> list[Entry]:  # fmt: skip
    """Every algorithm in every class for which enough is given."""
    needed = {"strongly-convex": mu != 0, "convex": D2 is not None, "nonconvex": F is not None}
    if not any(needed.values()):
        raise MixflError(
            "mu, D2 and F are not given: expected at least one. Give --mu for the strongly convex, "
            "--D2 for the convex, --F for the nonconvex bounds."
        )
    noise = dict(sigma2=sigma2, sigma_c2=sigma_c2, sigma_f2=sigma_f2, K=K, S=S)
    entries = []
    for convexity in (c for c, given in needed.items() if given):
        for algorithm in ALGORITHMS:
            order = rounds(
                algorithm, convexity, **noise, beta=beta, epsilon=epsilon, mu=mu, D2=D2, F=F,
                G2=G2, B2=B2,
            )  # fmt: skip
            step = max_step(algorithm, convexity, beta=beta, mu=mu, B2=B2)
            rates = max_rates(
                algorithm, convexity, beta=beta, K=K, eta_s=eta_s, eta_m=eta_m, mu=mu, B2=B2
            )
            condition = rate_condition(algorithm, convexity, S=S, eta_s=eta_s, eta_m=eta_m)
            explicit = None
            if algorithm == "1wgt" and convexity != "strongly-convex" and condition.holds:
                start = {"D2": D2} if convexity == "convex" else {"F": F}
                if sigma_f2 == 0 and (S >= 2 or convexity == "nonconvex"):
                    explicit = one_way_rounds(
                        convexity, epsilon=epsilon, beta=beta, eta_s=eta_s, **start, **noise
                    )
            entries.append(Entry(algorithm, convexity, order, step, rates, condition, explicit))
    return entries


def tables(entries: list[Entry]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and cells of each table to print."""
    order, steps = [], []
    for e in entries:
        name = [NAMES[e.algorithm], e.convexity]
        order.append([*name, *(_short(v) for v in (e.rounds.total, *e.rounds)), e.rounds.dominant])
        eta_c = "" if e.rates.eta_c is None else _short(e.rates.eta_c)
        holds = "yes" if e.condition.holds else "no"
        steps.append([
            *name, _short(e.max_step), _short(e.rates.eta), eta_c, str(e.condition), holds
        ])  # fmt: skip
    return [
        ("Table 1: order of the rounds to reach epsilon",
         ["", "class", "rounds", "variance", "dissimilarity", "smoothness", "largest term"], order),
        ("Tables 4 and 5: largest effective step, learning rates that follow, condition",
         ["", "class", "eta eta_s K", "eta", "eta_c", "condition", "fulfilled"], steps),
    ]  # fmt: skip


def notes(entries: list[Entry]) -> list[str]:
    lines = [
        f"1-w GT, {e.convexity}, with the proof's constants and a tuned step: "
        f"{e.explicit_rounds} rounds suffice."
        for e in entries
        if e.explicit_rounds is not None
    ]
    if not all(e.condition.holds for e in entries):
        lines.append("Where the condition is not fulfilled, the paper proves nothing.")
    return [
        *lines,
        "Orders, constants dropped, and upper bounds: to compare algorithms, loose in practice.",
    ]


def as_json(entries: list[Entry]) -> list[dict[str, Any]]:
    return [
        {
            "algorithm": e.algorithm,
            "convexity": e.convexity,
            "rounds": {"total": e.rounds.total, **e.rounds._asdict()},
            "largest_term": e.rounds.dominant,
            "max_step": e.max_step,
            **e.rates._asdict(),
            "condition": e.condition._asdict(),
            "explicit_rounds": e.explicit_rounds,
        }
        for e in entries
    ]


def _short(value: float) -> str:
    """Three digits, and no exponent where it would be short without."""
    return f"{float(f'{value:.3g}'):.0f}" if 100 <= value < 1e8 else f"{value:.3g}"
