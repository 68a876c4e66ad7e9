"""The bytes of a round, counted from the arrays that would be sent."""

from typing import Any

import jax
import numpy as np

from mixfl.aggregation import Chain
from mixfl.aggregation.download import Download
from mixfl.aggregation.packing import row_bytes
from mixfl.aggregation.wire import encoded, sent_bytes
from mixfl.algorithms.contract import Algorithm
from mixfl.engine.auto import Forms
from mixfl.engine.base import RoundBytes
from mixfl.engine.feeding import Feeder, Piece
from mixfl.forms.rows import RowForm, distinct, restrict
from mixfl.problem import Problem
from mixfl.randomness import KEYS
from mixfl.trees import tree_bytes


class ByteCounter:
    """Without row-sparse tables, a round's bytes follow from the shapes. With them, the bytes also
    depend on how many rows each client holds, which is counted for every cohort."""

    def __init__(self, problem: Problem, feeder: Feeder, forms: Forms, aggregation: Chain):
        self.problem, self.feeder, self.forms = problem, feeder, forms
        self.aggregation = aggregation.at(client=True)
        self.download = Download(feeder.s)
        self.fixed: dict[Algorithm, list[tuple]] = {}
        self.fed: tuple[int, list] = (-1, [])  # the last round read, and its clients' rows

    def read(self, piece: Piece) -> None:
        if piece.round != self.fed[0]:
            self.fed = (piece.round, [])
        self.fed[1].append(_rows(piece))

    def count(self, algorithm: Algorithm, round: int, shapes) -> RoundBytes:
        """`shapes()` returns the shapes of the engine's state."""
        if not algorithm.feed.clients:
            return RoundBytes(0.0, 0.0)
        if algorithm not in self.fixed:
            self.fixed[algorithm] = self._fixed(algorithm, round, shapes())
        total = np.zeros(2)
        for j, (base, per_row, first) in enumerate(self.fixed[algorithm]):
            each = base.copy()
            if per_row:
                for table, held in self.held_rows(algorithm, round, j).items():
                    each += (held.mean() if len(held) else 0) * per_row[table]
                each[1] += self._row_bytes(algorithm, round, j)
            if first is not None and round == 0:  # the ranges of codes are found out first
                each += (each[0], first)
            total += each
        down, up = total / len(self.problem.populations)
        return RoundBytes(float(down), float(up))

    def held_rows(self, algorithm: Algorithm, round: int, population: int) -> dict[str, np.ndarray]:
        """Per table, how many rows each client of a round's cohort holds: [clients]."""
        tables, named = self._named(algorithm, round, population)
        return {
            name: np.concatenate([(rows[name] < table.rows).sum(1) for rows in named])
            for name, table in tables.items()
        }

    def _row_bytes(self, algorithm: Algorithm, round: int, population: int) -> float:
        """Of the numbers of its rows, as a client sends them."""
        tables, named = self._named(algorithm, round, population)
        return sum(
            float(np.concatenate([row_bytes(rows[n], tables[n].rows) for rows in named]).mean())
            for n in distinct(tables)
            if any(len(rows[n]) for rows in named)
        )

    def _named(self, algorithm: Algorithm, round: int, population: int) -> tuple[Any, list]:
        """The tables, and their rows that the clients of a round's cohort hold, [clients, most].

        They are known for the last round, if this process read all of it. Other rounds are read."""
        fed = self.fed[1]
        if round != self.fed[0] or jax.process_count() > 1:
            fed = [_rows(piece) for piece in self.feeder.whole().pieces(algorithm, round)]
        tables = self.forms.at(algorithm).tables[self.problem.populations[population].name]
        return tables, [rows for piece in fed for rows in piece[population]]

    def _fixed(self, algorithm: Algorithm, round: int, shapes: Any) -> list[tuple]:
        """Per population, bytes down and up: without table rows, and for each row of a table. Then
        the bytes by which ranges are found out before the first round, if they are."""
        piece = next(iter(self.feeder.pieces(algorithm, round)))
        broadcasts = jax.eval_shape(algorithm.broadcast, shapes.algorithm, piece.drawn)
        counted = []
        for term, broadcast, (feeds, *_), shapes in zip(
            self.problem.populations, broadcasts, piece.clients, self.feeder.shapes, strict=True
        ):
            one = jax.tree.map(
                lambda a, steps=shapes[-1].steps: jax.ShapeDtypeStruct(
                    (steps, *a.shape[2:]), a.dtype
                ),
                feeds._replace(notes=None, key=None, state=None),
            )
            own_state = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), feeds.state
            )
            one = one._replace(state=own_state)
            dealt = {name: a for name, a in (one.share or {}).items() if name != KEYS}

            def count(
                rows: dict[str, int], term=term, broadcast=broadcast, one=one, share=dealt
            ) -> np.ndarray:
                ids = {n: jax.ShapeDtypeStruct((k,), np.int32) for n, k in rows.items()}
                own = jax.eval_shape(restrict, broadcast, ids) if ids else broadcast
                up = jax.eval_shape(lambda b, f: self._sent(algorithm, term, b, f), own, one)
                down = tree_bytes((self._coded(own), share, self._told(own)))
                return np.array([down, sent_bytes(up, self.bits)], float)

            # Affine in the number of rows, so counting with one row and with two is enough.
            single = {table: 1 for table in self.forms.at(algorithm).tables.get(term.name, ())}
            base = count(single)
            per_row = {t: count(single | {t: 2}) - base for t in single}
            base = base - sum(per_row.values(), np.zeros(2))
            counted.append((base if single else np.ceil(base), per_row, self._first(broadcast)))
        return counted

    @property
    def bits(self) -> int | None:
        return None if self.aggregation.coder is None else self.aggregation.coder.bits

    def _coded(self, broadcast):
        errors = jax.eval_shape(lambda b: self.download.init(b.x, 1), broadcast)
        return jax.eval_shape(lambda e, b: self.download.sent(e, [b]).codes, errors, broadcast)

    def _told(self, broadcast):
        chain = self.aggregation
        return jax.eval_shape(lambda x: chain.told(chain.init(x, 0)), broadcast.x)

    def _first(self, broadcast) -> float | None:
        coder = self.aggregation.coder
        if coder is None or coder.clipped:
            return None
        return 2 * len(jax.tree.leaves(broadcast.x)) + 1 + 8  # its report, its weight and steps

    def _sent(self, algorithm: Algorithm, term, broadcast, feed):
        summand = algorithm.summand(algorithm.client(term, broadcast, feed))
        told = self.aggregation.told(self.aggregation.init(broadcast.x, 0))
        return encoded(self.aggregation, told, summand, np.zeros(2, np.uint32), broadcast.x)


def _rows(piece: Piece) -> list:
    """Per population and size, the table rows of its clients."""

    def of(feed):
        real = feed.batches.mask.any((1, 2))
        return {n: ids[real] for n, ids in (feed.notes or {}).get(RowForm.name, {}).items()}

    return [[of(feed) for feed in feeds] for feeds in piece.clients]
