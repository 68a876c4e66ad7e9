"""The rounds of a deployment: an engine like the simulator, whose clients are Flower's nodes.

    messages are sent, the central work is done while the clients train, the replies are fetched
    until all are there or the deadline has passed, and the sums go into the algorithm's update.

What a client sends is checked (messages.py); one that fails in any way is left out and counted. A
round with too few replies is skipped: the state stays as it was, and the next round has other
clients. Uploads are added up in the order of the cohort, whenever they came: so a round has the
same bits each time.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from mixfl.algorithm import Algorithm, Batches, ClientFeed, Recipe, Upload
from mixfl.engine.choices import model_shapes, row_sparse_tables
from mixfl.engine.feeding import Draws
from mixfl.engine.round import finite
from mixfl.engine.simulator import RoundResult, check_params
from mixfl.flower.config import Deployment, chosen
from mixfl.flower.exchange import Clock, content, pause, pull
from mixfl.flower.messages import Rejected, cut_shapes, parsed_upload, sent_bytes, task
from mixfl.flower.nodes import Node, Nodes
from mixfl.problem import Params, Problem
from mixfl.runs.config import Plan
from mixfl.runs.directory import OPERATION
from mixfl.runs.programs import keep_programs
from mixfl.runs.progress import Quiet, reporter
from mixfl.runs.training import Result, run
from mixfl.sparse import add_rows, row_sparse, zeros_for
from mixfl.trees import on_named

LONGEST_PAUSE = 60.0  # seconds after a failed round


def serve(problem: Problem, grid: Grid, run_config: Mapping[str, Any]) -> Result:
    """A run from its beginning, or from its last checkpoint, to its end."""
    keep_programs()
    report = reporter(True)
    plan = deployed(problem, grid, run_config, report)
    out = Path(plan.d.out or f"runs/{problem.name}-{plan.recipe.id}").absolute()
    report.note(f"the run is kept in {out}")
    return run(plan, out, True, report, track=plan.d.track or None)


def deployed(
    problem: Problem, grid: Grid, run_config: Mapping[str, Any], report: Quiet, clock: Clock = time
) -> "DeployedPlan":
    problem, recipe, s, d = chosen(problem, run_config)
    operation = {k: getattr(d, k) for k in OPERATION}
    return DeployedPlan(
        problem, recipe, s, options=operation, grid=grid, d=d, report=report, clock=clock
    )


@dataclass(frozen=True)
class DeployedPlan(Plan):
    """A run whose engine is a deployment."""

    grid: Any = None
    d: Deployment = Deployment()
    report: Quiet = Quiet()
    clock: Clock = time

    def simulator(self):
        return DeployedEngine(self)


class Asked(NamedTuple):
    node: Node
    population: int
    place: int  # in the cohort


class Programs(NamedTuple):
    """The algorithm's functions, compiled."""

    broadcast: Any
    add: Any  # sums, upload -> sums
    central: Any
    update: Any
    like: list[Upload]  # per population, the shapes of an upload
    zeros: list  # per population, where its sums begin


class DeployedEngine:
    """What mixfl.runs.training needs of an engine; see Simulator."""

    devices, low_rank = 1, {}  # type: ignore[var-annotated]

    def __init__(self, plan: DeployedPlan):
        self.problem, self.s, self.d = plan.problem, plan.settings, plan.d
        self.grid, self.clock, self.note = plan.grid, plan.clock, plan.report.note
        self.recipe: Recipe = plan.recipe
        algorithm, x = plan.algorithm(), model_shapes(plan.problem)
        self.tables = row_sparse_tables(plan.problem, x, algorithm, self.s)
        self.algorithm = row_sparse(algorithm, plan.problem, self.s, self.tables)
        self.feeder = Draws(plan.problem, self.s)
        self.feeder.check_draws(self.at(0))
        self.nodes = Nodes(
            self.grid, plan.problem, self.s, self.d, self.tables, self.clock, self.note
        )
        self.programs: dict[Algorithm, Programs] = {}
        self.bytes = (0.0, 0.0)  # of the last round
        self.failures = 0  # rounds in a row
        self.within: Any = lambda *_: None

    def init(self) -> Any:
        x = self.problem.init(jax.random.key(self.s.seed))
        check_params(x)
        return self.algorithm.init(x)

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
            state, info = programs.update(state, [], [], programs.central(state, drawn))
            return state, {**info, "clients/rejected": 0}
        cohorts = self.nodes.cohorts(t)
        messages = programs.broadcast(state, drawn)
        exchange = Exchange(self, t, programs, messages, cohorts)
        exchange.push()
        # The clients train meanwhile.
        central = jax.block_until_ready(programs.central(state, drawn))
        exchange.pull()
        self.bytes = exchange.bytes()
        counts = exchange.counted()
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
        state, info = programs.update(state, messages, exchange.sums(), central)
        return state, {**info, **counts}

    def _failed(self, t: int, short: list[str]) -> None:
        seconds = min(2.0**self.failures, LONGEST_PAUSE)
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

            def add(sums, upload):
                return add_rows(sums, algorithm.summand(upload))

            def update(state, messages, sums, central):
                state, info = algorithm.update(state, messages, sums, central)
                return state, {**info, "finite": finite(state)}

            self.programs[algorithm] = Programs(
                jax.jit(algorithm.broadcast), jax.jit(add), jax.jit(algorithm.central),
                jax.jit(update), like, zeros,
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


class Exchange:
    """One round's messages and replies."""

    def __init__(self, engine: DeployedEngine, t: int, programs: Programs, messages, cohorts):
        self.engine, self.t, self.programs = engine, t, programs
        self.messages = [jax.tree.map(np.asarray, message) for message in messages]
        self.cohorts: list[list[Node]] = cohorts
        self.asked: dict[str, Asked] = {}
        self.outstanding: dict[str, Asked] = {}
        self.uploads: list[dict[int, Upload]] = [{} for _ in cohorts]  # by place in the cohort
        self.down, self.up, self.received = 0, 0, 0
        self.count: Counter[str] = Counter()

    def push(self) -> None:
        """Flower gives up a message, and its reply, after the round's deadline."""
        engine, ttl = self.engine, self.engine.d.round_deadline
        self.until = engine.clock.monotonic() + ttl
        for j, (message, nodes) in enumerate(zip(self.messages, self.cohorts, strict=True)):
            shared = task(self.t, message, {}) if not engine.nodes.tables[self.name(j)] else None
            for place, node in enumerate(nodes):
                what = shared or task(self.t, message, node.rows)
                sent = Message(what, node.id, "train", ttl=ttl, group_id=str(self.t))
                self.down += sent_bytes(sent)
                ids = list(engine.grid.push_messages([sent]))  # one at a time: their memory
                asked = Asked(node, j, place)
                if ids and ids[0]:
                    self.asked[ids[0]] = asked
                else:
                    self.reject(asked, Rejected("unsent", "the message could not be sent"))
        self.outstanding = dict(self.asked)

    def name(self, j: int) -> str:
        return self.engine.problem.populations[j].name

    def pull(self) -> None:
        """Until all replies are there, or enough, or the deadline has passed."""
        clock, wanted = self.engine.clock, self.engine.s.cohort_size
        while self.outstanding:
            for message, asked in list(self.outstanding.items()):
                try:
                    for reply in pull(self.engine.grid, message):
                        self.take(reply)
                except Rejected as rejected:  # not readable
                    self.outstanding.pop(message)
                    self.reject(asked, rejected)
            if all(len(got) >= wanted for got in self.uploads):
                break
            if self.outstanding:
                if clock.monotonic() >= self.until:
                    break
                clock.sleep(pause(len(self.outstanding)))
        for asked in self.outstanding.values():
            if len(self.uploads[asked.population]) >= wanted:
                self.count["clients/surplus"] += 1
            else:
                self.reject(asked, Rejected("late", "no reply before the deadline"))

    def take(self, reply: Message) -> None:
        answered = reply.metadata.reply_to_message_id
        asked = self.asked.get(answered)
        forged = asked and reply.has_content() and reply.metadata.src_node_id != asked.node.id
        if asked is None or forged:
            self.count["replies/unknown"] += 1
            return
        if answered not in self.outstanding:
            self.count["replies/duplicate"] += 1
            return
        del self.outstanding[answered]
        if reply.has_content():
            self.up += sent_bytes(reply)
            self.received += 1
        got = self.uploads[asked.population]
        if len(got) >= self.engine.s.cohort_size:
            self.count["clients/surplus"] += 1
            return
        try:
            like = self.programs.like[asked.population]
            like = like._replace(delta=cut_shapes(like.delta, asked.node.rows))
            e = self.engine
            got[asked.place] = parsed_upload(content(reply), like, e.s, e.d.max_update_norm)
            self.count["clients/accepted"] += 1
        except Rejected as rejected:
            self.reject(asked, rejected)

    def reject(self, asked: Asked, rejected: Rejected) -> None:
        if rejected.reason == "stale":
            self.engine.nodes.forget(asked.node)
        self.count["clients/rejected"] += 1
        self.count[f"clients/rejected/{rejected.reason}"] += 1
        self.engine.note(
            f"round {self.t + 1}: client {asked.node.number} (node {asked.node.id}) of "
            f"'{self.name(asked.population)}' is left out ({rejected.reason}): {rejected}"
        )

    def counted(self) -> dict[str, int]:
        asked = sum(map(len, self.cohorts))
        return {"clients/asked": asked, "clients/accepted": 0, "clients/rejected": 0, **self.count}

    def bytes(self) -> tuple[float, float]:
        asked = sum(map(len, self.cohorts))
        return self.down / max(asked, 1), self.up / max(self.received, 1)

    def sums(self) -> list[Any]:
        found = []
        for j, got in enumerate(self.uploads):
            sums = self.programs.zeros[j]
            for place in sorted(got):
                rows = self.cohorts[j][place].rows
                sums = self.programs.add(sums, with_rows(got[place], rows, self.whole(j)))
            found.append(sums)
        return found

    def whole(self, j: int) -> dict[str, int]:
        return {name: t.rows for name, t in self.engine.nodes.tables[self.name(j)].items()}


def with_rows(upload: Upload, rows: Mapping[str, np.ndarray], whole: Mapping[str, int]) -> Upload:
    """The upload of a client with its rows of tables, padded to a power of two: each size is
    compiled."""
    if not rows:
        return upload
    size = {name: min(1 << (len(ids) - 1).bit_length(), whole[name]) for name, ids in rows.items()}
    ids = {
        n: np.concatenate([held, np.full(size[n] - len(held), whole[n], np.int32)])
        for n, held in rows.items()
    }
    pad = lambda a, k: np.concatenate([a, np.zeros((k - len(a), *a.shape[1:]), a.dtype)])  # noqa: E731
    return upload._replace(delta=on_named(pad, size, upload.delta), rows=ids)
