"""The rounds of a deployment: an engine like the simulator, whose clients are Flower's nodes.

    messages are sent, the central work is done while the clients train, the replies are fetched
    until all are there or the deadline has passed, and the sums go into the algorithm's update.

What a client sends is checked (messages.py); one that fails in any way is left out and counted. A
round with too few replies is skipped: the state stays as it was, and the next round has other
clients. Uploads are added up in the order of the cohort, whenever they came: so a round has the
same bits each time.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.serverapp import Grid

from mixfl.aggregation.clipping import Clipping, Form, histories, remember
from mixfl.aggregation.robust import robust_sums
from mixfl.algorithms.contract import Algorithm, Batches, ClientFeed, Recipe, Upload
from mixfl.deploy.flower.config import Deployment, chosen
from mixfl.deploy.flower.exchange import Exchange, with_rows
from mixfl.deploy.flower.link import Link, link_to
from mixfl.deploy.flower.members import Members
from mixfl.deploy.flower.nodes import Nodes
from mixfl.deploy.flower.replies import Clock
from mixfl.engine.auto import model_shapes, row_sparse_tables
from mixfl.engine.feeding import Draws
from mixfl.engine.round import State
from mixfl.engine.simulator import RoundResult, check_params
from mixfl.engine.summing import finite
from mixfl.forms.rows import add_rows, row_sparse, zeros_for
from mixfl.problem import Params, Problem
from mixfl.process.compilation_cache import keep_programs
from mixfl.runs.folder import OPERATION
from mixfl.runs.plan import Plan
from mixfl.runs.sinks.terminal import Quiet, reporter
from mixfl.runs.training import Result, run

LONGEST_PAUSE = 60.0  # seconds after a failed round


def serve(problem: Problem, grid: Grid, run_config: Mapping[str, Any]) -> Result:
    """A run from its beginning, or from its last checkpoint, to its end."""
    keep_programs()
    report = reporter(True)
    plan = deployed(problem, grid, run_config, report)
    out = Path(plan.d.out or f"runs/{problem.name}-{plan.recipe.id}").absolute()
    plan = replace(plan, out=out)
    report.note(f"the run is kept in {out}")
    return run(plan, out, True, report, track=plan.d.track or None)


def deployed(
    problem: Problem, grid: Grid | Link, run_config: Mapping[str, Any], report: Quiet,
    clock: Clock = time, out: Path | None = None,
) -> "DeployedPlan":  # fmt: skip
    problem, recipe, s, d = chosen(problem, run_config)
    options = {k: getattr(d, k) for k in OPERATION} | {"cohorts": d.cohorts}
    return DeployedPlan(
        problem, recipe, s, options=options, grid=grid, d=d, report=report, clock=clock, out=out
    )


@dataclass(frozen=True)
class DeployedPlan(Plan):
    """A run whose engine is a deployment."""

    grid: Any = None
    d: Deployment = Deployment()
    report: Quiet = Quiet()
    clock: Clock = time
    out: Path | None = None

    def simulator(self):
        return DeployedEngine(self)


class Programs(NamedTuple):
    """The algorithm's functions, compiled."""

    broadcast: Any
    norms: Any  # upload, message -> norms, [kinds]
    add: Any  # sums, upload, message, norms, limits -> sums
    robust: Any  # stacked uploads, message, norms before -> sums, clipped, norms
    central: Any
    update: Any
    like: list[Upload]  # per population, the shapes of an upload
    zeros: list  # per population, where its sums begin


class DeployedEngine:
    """What mixfl.runs.training needs of an engine; see Simulator."""

    devices, low_rank = 1, {}  # type: ignore[var-annotated]

    def __init__(self, plan: DeployedPlan):
        self.problem, self.s, self.d = plan.problem, plan.settings, plan.d
        self.clock, self.note = plan.clock, plan.report.note
        self.recipe: Recipe = plan.recipe
        algorithm, x = plan.algorithm(), model_shapes(plan.problem)
        self.tables = row_sparse_tables(plan.problem, x, algorithm, self.s)
        self.algorithm = row_sparse(algorithm, plan.problem, self.s, self.tables)
        self.clipping = Clipping(self.s)
        self.feeder = Draws(plan.problem, self.s)
        self.feeder.check_draws(self.at(0))
        self.members = Members(plan.problem, self.d, plan.out, self.note)
        self.nodes = Nodes(
            link_to(plan.grid, self.clock), plan.problem, self.s, self.d, self.tables,
            self.members, self.clock, self.note,
        )  # fmt: skip
        self.programs: dict[Algorithm, Programs] = {}
        self.bytes = (0.0, 0.0)  # of the last round
        self.failures = 0  # rounds in a row
        self.within: Any = lambda *_: None

    def init(self) -> Any:
        x = self.problem.init(jax.random.key(self.s.seed))
        check_params(x)
        return State(self.algorithm.init(x), histories(self.problem, self.algorithm, self.s))

    def shapes(self) -> Any:
        return jax.eval_shape(self.init)

    def at(self, round: int) -> Algorithm:
        return self.algorithm.phase(round) if self.algorithm.phase else self.algorithm

    def message_bytes(self, round: int) -> tuple[float, float]:
        """Bytes per client that were sent and received in the last round."""
        return self.bytes

    def rounds(self, state: Any, start: int, stop: int) -> Iterator[RoundResult]:
        for t in range(start, stop):
            state, info = self._round(t, state)
            yield RoundResult(t + 1, state, info)

    def _round(self, t: int, state: Any) -> tuple[Any, dict[str, Any]]:
        algorithm = self.at(t)
        programs, drawn = self._programs(algorithm), self.feeder.drawn(algorithm, t)
        if not algorithm.feed.clients:
            central = programs.central(state.algorithm, drawn)
            after, info = programs.update(state.algorithm, [], [], central)
            return state._replace(algorithm=after), {**info, "clients/rejected": 0}
        cohorts = self.nodes.cohorts(t)
        messages = programs.broadcast(state.algorithm, drawn)
        exchange = Exchange(self.nodes, t, cohorts, programs.like)
        exchange.push(messages)
        # The clients train meanwhile.
        central = jax.block_until_ready(programs.central(state.algorithm, drawn))
        exchange.pull()
        self.bytes = exchange.bytes()
        counts = exchange.counted()
        self.members.save()
        short = [
            f"{len(got)} of {len(asked)} clients of '{p.name}'"
            for p, got, asked in zip(
                self.problem.populations, exchange.uploads, cohorts, strict=True
            )
            if len(got) < self.nodes.least
        ]
        if short:
            self._failed(t, short)
            return state, {**counts, "rounds/failed": 1, "finite": True}
        self.failures = 0
        sums, norms, clipped = [], [], 0
        for j, uploads in enumerate(exchange.ordered()):
            before = state.norms[j] if state.norms else None
            sums_j, norms_j, clipped_j = self._sums(programs, j, uploads, messages[j], before)
            sums.append(sums_j)
            norms.append(norms_j)
            clipped += clipped_j
        after, info = programs.update(state.algorithm, messages, sums, central)
        kept = tuple(map(remember, state.norms, norms)) if state.norms else ()
        if state.norms:
            counts["clients/clipped"] = clipped
        return State(after, kept), {**info, **counts}

    def _sums(self, programs: Programs, j: int, uploads, message, before) -> tuple[Any, Any, int]:
        """Over the clients of a population, their norms, and how many were clipped."""
        if self.s.aggregation != "mean":
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(u for _, u in uploads))
            sums, clipped, norms = programs.robust(stacked, message, before)
            return sums, norms, int(clipped)
        sums, tables = programs.zeros[j], self.nodes.tables[self.problem.populations[j].name]
        uploads = [with_rows(upload, rows, tables) for rows, upload in uploads]
        norms, limits, over = None, None, np.zeros(len(uploads), bool)
        if before is not None:
            found = [programs.norms(upload, message) for upload in uploads]
            norms = jnp.stack(found, axis=1)
            limits = self.clipping.current(before, norms)
            over = np.any(np.asarray(norms) > np.asarray(limits)[:, None], axis=0)
        for i, upload in enumerate(uploads):
            own = None if norms is None else norms[:, i]
            sums = programs.add(sums, upload, message, own, limits)
        return sums, norms, int(over.sum())

    def _failed(self, t: int, short: list[str]) -> None:
        seconds = min(2.0 ** min(self.failures, 10), LONGEST_PAUSE)
        self.failures += 1
        self.note(
            f"round {t + 1} is skipped: good replies from {', '.join(short)}, at least "
            f"{self.nodes.least} wanted (min_replies); going on in {seconds:.0f} s"
        )
        self.clock.sleep(seconds)

    def _programs(self, algorithm: Algorithm) -> Programs:
        if algorithm not in self.programs:
            like = self._uploads() if algorithm.feed.clients else []
            zeros = [zeros_for(jax.eval_shape(algorithm.summand, upload)) for upload in like]

            def form(upload):
                tables = {n: t.rows for held in self.nodes.tables.values() for n, t in held.items()}
                return Form({n: ids < tables[n] for n, ids in (upload.rows or {}).items()})

            def norms(upload, message):
                return self.clipping.norms(upload, message, form(upload))

            def add(sums, upload, message, own, limits):
                if own is not None:
                    upload = self.clipping.clipped(upload, message, own, limits, form(upload))
                return add_rows(sums, algorithm.summand(upload))

            def robust(uploads, message, before):
                good, clipped, own = jnp.ones(len(uploads.steps), bool), 0, None
                if before is not None:
                    uploads, clipped, own = self.clipping.all_clipped(uploads, message, before)
                found = robust_sums(self.s, algorithm.summand, uploads, message, good)
                return found, clipped, own

            def update(state, messages, sums, central):
                state, info = algorithm.update(state, messages, sums, central)
                return state, {**info, "finite": finite(state)}

            self.programs[algorithm] = Programs(
                jax.jit(algorithm.broadcast), jax.jit(norms), jax.jit(add), jax.jit(robust),
                jax.jit(algorithm.central), jax.jit(update), like, zeros,
            )  # fmt: skip
        return self.programs[algorithm]

    def _uploads(self) -> list[Upload]:
        """Per population, the shapes of what its clients send: those of the algorithm's own
        `client`, with losses in place of the problem's that need no columns."""

        def loss(x, batch):
            return batch["loss"] * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(x))

        terms = [replace(t, loss=loss) if t in self.problem.populations else t
                 for t in self.problem.terms]  # fmt: skip
        stand_in = replace(self.problem, terms=terms)
        algorithm = self.recipe.build(stand_in, self.s)
        one = np.ones((1, 1), np.float32)
        feed = ClientFeed(Batches({"loss": one}, one))

        def client(j: int) -> Upload:
            drawn = self.feeder.drawn(algorithm, 0)
            message = algorithm.broadcast(algorithm.init(self._model()), drawn)[j]
            return algorithm.client(stand_in.populations[j], message, feed)

        return [jax.eval_shape(lambda j=j: client(j)) for j in range(len(stand_in.populations))]

    def _model(self) -> Params:
        return self.problem.init(jax.random.key(self.s.seed))
