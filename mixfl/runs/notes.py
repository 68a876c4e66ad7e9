"""What the user should know when a run begins."""

from collections.abc import Iterable, Iterator

from mixfl.engine.base import Engine
from mixfl.problem import Problem
from mixfl.runs.sinks.base import Detail


def start_notes(engine: Engine, not_finite: Iterable[str]) -> Iterator[str]:
    """`not_finite`: the metrics of the initial model that are not."""
    for term in (p for p in engine.problem.populations if p.here):
        if term.clients.dropped:
            yield (
                f"{term.clients.dropped} clients of '{term.name}' have no example and were "
                f"dropped; {len(term.clients)} remain"
            )
    yield from map(Detail, engine.notes())
    yield from map(Detail, loss_notes(engine.problem))
    names = ", ".join(sorted(not_finite))
    if names:
        yield (
            f"{names} of the initial model is not finite, and is written as null: look at the "
            "evaluation's data and function"
        )


def loss_notes(problem: Problem) -> Iterator[str]:
    """What losses found out when they were tried (mixfl.pytorch)."""
    for term in problem.terms:
        yield from getattr(term.loss, "notes", ())
