"""What is worth a word at the beginning of a run."""

from collections.abc import Iterator
from typing import Any

from mixfl.runs.plan import Plan


def noteworthy(plan: Plan, simulator: Any, never_finite: set[str], one: bool) -> Iterator[str]:
    """`one`: it is a run of its own, and not one of several."""
    s = plan.settings
    for term in (p for p in plan.problem.populations if p.here):
        if term.clients.dropped:
            yield (
                f"{term.clients.dropped} clients of '{term.name}' have no example and were "
                f"dropped; {len(term.clients)} remain"
            )
        most = -(-int(term.clients.sizes().max()) // s.client_batch)
        if simulator.algorithm.feed.clients and most < s.local_steps:
            yield (
                f"no client of '{term.name}' has more than {most} batches of {s.client_batch}: "
                f"local_steps = {s.local_steps} is never reached"
            )
    if one:  # a comparison would say it for every run
        yield from simulator.notes()
    if never_finite:
        yield (
            f"{', '.join(sorted(never_finite))} of the initial model is not finite: look "
            "at the data and the function that evaluate; it is written as null"
        )
