"""The loop over rounds: feeds the compiled round, keeps one round in flight."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from mixfl.aggregation.clipping import histories
from mixfl.algorithms.contract import Algorithm
from mixfl.engine.auto import (
    choose_devices,
    low_rank_layers,
    model_shapes,
    row_sparse_tables,
)  # fmt: skip
from mixfl.engine.feeding import Feeder, Prefetch
from mixfl.engine.round import Round, State
from mixfl.errors import MixflError
from mixfl.forms.rows import restrict, row_sparse
from mixfl.problem import Params, Problem
from mixfl.settings import Settings

LONG_ROUND = 32  # chunks of central batches in a round from which on it tells its progress


class RoundResult(NamedTuple):
    round: int  # rounds done so far
    state: Any  # has the model as .x
    info: dict[str, Any]  # numbers of this round, still on the device


@dataclass
class Progress:
    """How far a long round is."""

    round: int
    chunks: int = 0  # of batches at the server
    clients: int = 0
    chunks_done: int = 0
    clients_done: int = 0

    def tell(self) -> tuple[int, float, str]:
        parts, words = [], []
        if self.clients:
            parts.append(self.clients_done / self.clients)
            words.append(f"{self.clients_done} of {self.clients} clients")
        if self.chunks:
            parts.append(self.chunks_done / self.chunks)
            words.append(f"{self.chunks_done} of {self.chunks} batches at the server")
        return self.round, sum(parts) / len(parts), ", ".join(words)


class Simulator:
    """Runs an algorithm on a problem. `devices` share a cohort (see `choose_devices`)."""

    def __init__(self, problem: Problem, algorithm: Algorithm, s: Settings):
        self.problem, self.s = problem, s
        x = model_shapes(problem)
        self.tables = row_sparse_tables(problem, x, algorithm, s)
        self.algorithm = row_sparse(algorithm, problem, s, self.tables)
        own = (jax.process_index(), jax.process_count())
        feeder = Feeder(problem, s, own[1], self.tables, own)  # for as few devices as there can be
        self.low_rank = low_rank_layers(problem, x, algorithm, s, feeder)
        self.devices = choose_devices(problem, x, algorithm, s, self.low_rank, feeder)
        self.feeder = Feeder(problem, s, self.devices, self.tables, own)
        self.feeder.check_draws(self.at(0))
        self.programs: dict[Algorithm, Round] = {}
        self.bytes: dict[Algorithm, list[tuple]] = {}
        self.waited = 0.0  # seconds that the loop waited for data
        self.fed: tuple[int, list] = (-1, [])  # the last round fed, and the rows of its pieces
        # Called as (round, part done, how far it is in words) within long rounds.
        self.within: Callable[[int, float, str], None] = lambda *_: None
        self.under_way: deque[Progress] = deque()  # long rounds that were begun

    def init(self) -> Any:
        """The state before the first round; the model comes from the seed."""
        x = self.problem.init(jax.random.key(self.s.seed))
        check_params(x)
        return self.state(x)

    def shapes(self) -> Any:
        """The state's shapes, without its values."""
        return jax.eval_shape(lambda: self.state(self.problem.init(jax.random.key(self.s.seed))))

    def state(self, x: Params) -> Any:
        """The state before the first round from the model x."""
        # Own copies: the round donates its input, and states may share arrays with each other.
        inner = jax.tree.map(lambda a: jax.numpy.array(a, copy=True), self.algorithm.init(x))
        return State(inner, histories(self.problem, self.algorithm, self.s))

    def at(self, round: int) -> Algorithm:
        return self.algorithm.phase(round) if self.algorithm.phase else self.algorithm

    def program(self, algorithm: Algorithm) -> Round:
        if algorithm not in self.programs:
            tell = self._chunk_done if self.long(algorithm) else None
            self.programs[algorithm] = Round(
                algorithm, self.problem, self.devices, tell, self.low_rank, self.tables,
                self.s,
            )  # fmt: skip
        return self.programs[algorithm]

    def long(self, algorithm: Algorithm) -> int:
        """The chunks that the server computes in a round, if they are many; otherwise 0. Several
        processes don't count them: a program calls back in one of them only."""
        if jax.process_count() > 1:
            return 0
        chunks = [(draw.steps, self.feeder.chunks(draw)) for draw in algorithm.feed.draw if draw]
        count = sum(steps * parts for steps, parts in chunks if parts > 1)
        return count if count >= LONG_ROUND else 0

    def _chunk_done(self) -> None:
        progress = self.under_way[0]
        progress.chunks_done += 1
        self.within(*progress.tell())
        if progress.chunks_done == progress.chunks:
            self.under_way.popleft()

    @property
    def traces(self) -> int:
        """Programs traced so far: one per phase of the algorithm, whatever the rounds."""
        return sum(p.traces for p in self.programs.values())

    def rounds(self, state: Any, start: int, stop: int) -> Iterator[RoundResult]:
        """Rounds start .. stop - 1 from `state`, which is used up."""

        def source():
            for t in range(start, stop):
                yield from self.feeder.pieces(self.at(t), t)

        state = self.program(self.at(start)).place(state)
        feed = Prefetch(source)
        pending: Any = None
        try:
            pieces = iter(feed)
            for t in range(start, stop):
                state, info = self._round(self.at(t), state, pieces)
                # Stay one round ahead of the device, no more: memory and Ctrl-C want that.
                if pending is not None:
                    jax.block_until_ready(pending)
                pending = info
                yield RoundResult(t + 1, state, info)
        finally:
            feed.close()

    def _round(self, algorithm: Algorithm, state, pieces):
        program = self.program(algorithm)
        piece = self._next(pieces, program)
        drawn = piece.drawn
        progress = Progress(piece.round, self.long(algorithm))
        if progress.chunks:
            self.under_way.append(progress)
        if piece.last:
            return program.whole(state, drawn, piece.clients)
        progress.clients = self.s.cohort_size
        self.within(*progress.tell())
        messages = program.begin(state, drawn)
        carry, norms = program.empty(messages, piece.clients, state.norms), []
        while True:
            carry, more = program.accumulate(carry, messages, piece.clients, state.norms)
            norms.append(more)
            jax.block_until_ready(carry.rejected)  # a chunk's memory at a time
            progress.clients_done = min(progress.clients_done + self.feeder.chunk, progress.clients)
            self.within(*progress.tell())
            if piece.last:
                return program.finish(state, drawn, messages, carry, norms)
            piece = self._next(pieces, program)

    def _next(self, pieces, program: Round):
        begun = time.perf_counter()
        piece = next(pieces)
        self.waited += time.perf_counter() - begun
        if piece.round != self.fed[0]:
            self.fed = (piece.round, [])
        self.fed[1].append([feed.rows for feed in piece.clients])
        drawn, clients = program.joined(piece.drawn, piece.clients)
        return piece._replace(drawn=drawn, clients=clients)

    def held_rows(self, round: int, population: int) -> dict[str, np.ndarray]:
        """Per table, how many rows each client of a round's cohort holds: [clients].

        Of the last round they are known, if all of it was read here; others are read."""
        fed = self.fed[1]
        if round != self.fed[0] or jax.process_count() > 1:
            pieces = self.feeder.whole().pieces(self.at(round), round)
            fed = [[feed.rows for feed in piece.clients] for piece in pieces]
        tables = self.tables[self.problem.populations[population].name]
        counts = {
            name: np.concatenate([(rows[population][name] < table.rows).sum(1) for rows in fed])
            for name, table in tables.items()
        }
        return {name: held[: self.s.cohort_size] for name, held in counts.items()}

    def message_bytes(self, round: int) -> tuple[float, float]:
        """Bytes that a client downloads and uploads in the given round, on average, counted from
        the arrays that would be sent."""
        algorithm = self.at(round)
        if not algorithm.feed.clients:
            return 0.0, 0.0
        if algorithm not in self.bytes:
            self.bytes[algorithm] = self._message_bytes(algorithm, round)
        total = np.zeros(2)
        for j, counted in enumerate(self.bytes[algorithm]):
            base, per_row = counted
            total += base
            if per_row:
                for table, held in self.held_rows(round, j).items():
                    total += held.mean() * per_row[table]
        down, up = total / len(self.problem.populations)
        return float(down), float(up)

    def _message_bytes(self, algorithm: Algorithm, round: int) -> list[tuple]:
        """Per population, bytes down and up: without rows of tables, and by table, per row."""
        piece = next(iter(self.feeder.pieces(algorithm, round)))
        messages = jax.eval_shape(algorithm.broadcast, self.shapes().algorithm, piece.drawn)
        found = []
        for term, message, feed in zip(
            self.problem.populations, messages, piece.clients, strict=True
        ):
            one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), feed)

            def count(rows: dict[str, int], term=term, message=message, one=one) -> np.ndarray:
                ids = {n: jax.ShapeDtypeStruct((k,), np.int32) for n, k in rows.items()}
                feed = one._replace(rows=ids or None)
                client = lambda m, f: algorithm.client(term, m, f)  # noqa: E731
                upload = jax.eval_shape(client, message, feed)
                sent = jax.eval_shape(restrict, message, ids) if ids else message
                return np.array(
                    [_bytes(sent) + _bytes(one.share), _bytes(upload._replace(loss=None))], float
                )

            # Affine in the number of rows: the arrays with one row and with two tell it all.
            single = {table: 1 for table in self.tables.get(term.name, ())}
            base = count(single)
            per_row = {t: count(single | {t: 2}) - base for t in single}
            found.append((base - sum(per_row.values(), np.zeros(2)), per_row))
        return found


def _bytes(tree) -> int:
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def check_params(x: Params) -> None:
    """Parameters are floating-point arrays, and finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        name = jax.tree_util.keystr(path) or "the parameter"
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jax.numpy.issubdtype(dtype, jax.numpy.floating):
            raise MixflError(
                f"init returned {name} of type {dtype or type(leaf).__name__}: parameters must be "
                "floating-point arrays. Keep everything else out of them (see docs/models.md)."
            )
        known = isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.core.Tracer)
        if known and not np.isfinite(np.asarray(leaf)).all():
            raise MixflError(f"init returned {name} with NaN or infinite values.")
    if not jax.tree.leaves(x):
        raise MixflError("init returned no parameters.")
