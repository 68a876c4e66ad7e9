"""bridge: today's simulator and deployment as an Engine, until they are engines themselves."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from mixfl.engine.base import Progress, RoundBytes, RoundResult
from mixfl.forms.rows import why_dense
from mixfl.problem import Central
from mixfl.settings import Settings


class Bridge:
    def __init__(self, plan: Any, simulator: Any):
        self.plan, self.simulator, self.problem = plan, simulator, plan.problem
        self.init, self.shapes = simulator.init, simulator.shapes
        self.on_progress: Callable[[Progress], None] = lambda _: None
        simulator.within = lambda *progress: self.on_progress(Progress(*progress))

    def rounds(self, state: Any, start: int, stop: int) -> Iterator[RoundResult]:
        return self.simulator.rounds(state, start, stop)

    def round_bytes(self, round: int) -> RoundBytes:
        return RoundBytes(*self.simulator.message_bytes(round))

    def resolved(self) -> Settings:
        s, p, simulator = self.plan.settings, self.problem, self.simulator
        draws = {
            draw.batch
            for algorithm in (simulator.at(0), simulator.algorithm)
            for term, draw in zip(p.terms, algorithm.feed.draw, strict=True)
            if draw and isinstance(term, Central) and term.examples is not None
        }
        auto: dict[str, Any] = dict(
            central_lr=s.eta_c,
            central_steps=s.J,
            merge_lr=1 / len(p.terms) if self.plan.recipe.id == "2wgt" else 1.0,
            pretrain_rounds=s.rounds // 2,
            cohort_chunk=simulator.feeder.chunk,
            devices=simulator.devices,
            tables="rows" if any(simulator.tables.values()) else "dense",
            first_layer="low-rank" if simulator.low_rank else "plain",
        )
        if len(draws) == 1:
            auto["central_batch"] = draws.pop()
        return dataclasses.replace(s, **{k: v for k, v in auto.items() if getattr(s, k) == "auto"})

    def notes(self) -> Iterator[str]:
        s, feed = self.plan.settings, self.simulator.algorithm.feed
        for term in (p for p in self.problem.populations if p.here):
            most = -(-int(term.clients.sizes().max()) // s.client_batch)
            if feed.clients and most < s.local_steps:
                yield (
                    f"no client of '{term.name}' has more than {most} batches of {s.client_batch}: "
                    f"local_steps = {s.local_steps} is never reached"
                )
        marked = [name for p in self.problem.populations for name in p.rows]
        reason = why_dense(self.plan.algorithm(), s)
        if marked and reason and feed.clients and s.tables == "auto":
            yield f"clients get the whole of {', '.join(marked)}: {reason}"
        layers = {name for weights in self.simulator.low_rank.values() for name in weights}
        if layers:
            yield f"low-rank steps at the clients, exact and faster: {', '.join(layers)}"
