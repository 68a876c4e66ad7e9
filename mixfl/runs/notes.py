"""What is worth a word at the beginning of a run."""

from collections.abc import Iterator
from typing import Any

from mixfl.forms.rows import why_dense
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
    marked = [name for p in plan.problem.populations for name in p.rows]
    reason = why_dense(plan.algorithm(), s)
    if marked and reason and simulator.algorithm.feed.clients and s.tables == "auto":
        yield f"clients get the whole of {', '.join(marked)}: {reason}"
    layers = {name for weights in simulator.low_rank.values() for name in weights}
    if layers and one:  # a comparison would say it for every run
        yield f"low-rank steps at the clients, exact and faster: {', '.join(layers)}"
    if never_finite:
        yield (
            f"{', '.join(sorted(never_finite))} of the initial model is not finite: look "
            "at the data and the function that evaluate; it is written as null"
        )
