"""Reads the data of the coming rounds in a thread, while the current round computes.

A round is fed in one piece, or in several if its cohort exceeds the chunk size: the chunk bounds
memory, not the cohort. If there are several processes, each reads its own part of every piece.
Every piece is a new array: JAX may use a NumPy buffer in place while a round still runs, so a
buffer is never written to again.
"""

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mixfl.algorithms.contract import Algorithm, Batches, ClientFeed, Draw, Drawn
from mixfl.engine import cohort
from mixfl.engine.auto import Forms, client_batches
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.settings import Settings

CHUNK_BYTES = 256 << 20
DRAWN_BYTES = 8 << 30


class Piece(NamedTuple):
    round: int
    drawn: Any  # per term, Drawn or None; only in a round's first piece
    clients: tuple  # per population, ClientFeed with leaves [clients of the chunk, ...]
    last: bool  # the round ends with this piece


class Draws:
    """The batches drawn at the server. They need no client data."""

    def __init__(
        self, problem: Problem, s: Settings, devices: int = 1, own: tuple[int, int] = (0, 1)
    ):
        self.problem, self.s, self.devices = problem, s, devices
        self.own = own  # (i, n): reads the i-th of n parts

    def drawn(self, algorithm: Algorithm, round: int) -> tuple:
        return tuple(self._draw(round, j, draw) for j, draw in enumerate(algorithm.feed.draw))

    def chunks(self, draw: Draw) -> int:
        """The number of chunks that each batch is cut into."""
        return -(-draw.batch // self.s.central_chunk)

    def check_draws(self, algorithm: Algorithm) -> None:
        """A round's central batches are read all at once. More than memory holds is an error."""
        for term, draw in zip(self.problem.terms, algorithm.feed.draw, strict=True):
            if draw is None:
                continue
            size = draw.steps * draw.batch * (term.examples.example_bytes if term.examples else 4)
            if size > DRAWN_BYTES:
                raise MixflError(
                    f"{draw.steps} central steps of {draw.batch} examples of '{term.name}' are "
                    f"{size / 2**30:.3g} GB a round: lower central_steps (or local_steps) or "
                    "central_batch."
                )

    def _own(self, n: int) -> slice:
        """The slice of n places that this process fills."""
        process, processes = self.own
        return slice(n // processes * process, n // processes * (process + 1))

    def _draw(self, round: int, j: int, draw: Draw | None) -> Drawn | None:
        if draw is None:
            return None
        term, s = self.problem.terms[j], self.s
        if term.examples is None:
            own = self.devices // self.own[1]
            return Drawn(None, np.ones((draw.steps, 1, own), np.float32))
        what = cohort.POOLED if term in self.problem.populations else cohort.CENTRAL
        rng = cohort.generator(s.seed, round, what, j)
        rows = cohort.drawn_rows(rng, len(term.examples), draw.steps, draw.batch)
        # Cut into chunks of nearly equal size, each padded to equal parts for the devices.
        chunks = self.chunks(draw)
        chunk = -(-draw.batch // (chunks * self.devices)) * self.devices
        place = np.arange(chunks * chunk)
        shape = (draw.steps, chunks, chunk)
        padded = rows[:, place % draw.batch].reshape(shape)
        mask = np.broadcast_to((place < draw.batch).reshape(shape[1:]), shape).astype(np.float32)
        mine = self._own(chunk)
        return Drawn(term.examples.take(padded[:, :, mine]), mask[:, :, mine])


class Feeder(Draws):
    """Draws, and the batches of the clients."""

    def __init__(
        self, problem: Problem, s: Settings, devices: int = 1,
        forms: Forms | None = None, own: tuple[int, int] = (0, 1),
        keys: bool = False,
    ):  # fmt: skip
        super().__init__(problem, s, devices, own)
        self.forms = forms or Forms({})
        self.keys = keys  # clients draw at random
        self.starts = [np.asarray(t.clients.offsets) for t in problem.populations]
        for term in problem.populations:
            if s.cohort_size > len(term.clients):
                raise MixflError(
                    f"cohort_size = {s.cohort_size}, but the population '{term.name}' has "
                    f"{len(term.clients)} clients: lower it to at most {len(term.clients)}."
                )
        shapes = [client_batches(t, s) for t in problem.populations]
        self.steps, self.batch = [k for k, _ in shapes], [b for _, b in shapes]
        per_client = max(
            [1, *(t.examples.example_bytes * k * b for t, k, b in
                  zip(problem.populations, self.steps, self.batch, strict=True))]
        )  # fmt: skip
        most = own[1] * max(1, CHUNK_BYTES // per_client)
        most = most if s.cohort_chunk == "auto" else s.cohort_chunk
        most = most if s.aggregation == "mean" else s.cohort_size  # compared with each other
        # Chunks of nearly equal size, each with equal parts for the devices.
        chunks = -(-s.cohort_size // most)
        self.chunk = -(-s.cohort_size // (chunks * devices)) * devices

    def pieces(self, algorithm: Algorithm, round: int) -> Iterator[Piece]:
        feed, s = algorithm.feed, self.s
        drawn = self.drawn(algorithm, round)
        if not feed.clients:
            yield Piece(round, drawn, (), True)
            return
        cohorts = [
            cohort.cohort(s.seed, round, j, len(t.clients), s.cohort_size)
            for j, t in enumerate(self.problem.populations)
        ]
        shares = self._deal(round) if feed.share else None
        forms = self.forms.at(algorithm).of
        for start in range(0, s.cohort_size, self.chunk):
            clients = tuple(
                self._own_clients(round, j, chosen, start, shares, forms)
                for j, chosen in enumerate(cohorts)
            )
            last = start + self.chunk >= s.cohort_size
            yield Piece(round, drawn if start == 0 else None, clients, last)

    def whole(self) -> "Feeder":
        """A Feeder that reads the parts of all processes."""
        every = copy.copy(self)
        every.own = (0, 1)
        return every

    def _own_clients(self, round, population, chosen, start, shares, forms) -> ClientFeed:
        part = self._own(self.chunk)
        own = chosen[start : start + self.chunk][part]
        if len(own):
            return self._clients(round, population, own, start + part.start, shares, forms)
        feed = self._clients(round, population, chosen[:1], 0, shares, forms)
        return feed._replace(batches=feed.batches._replace(mask=0 * feed.batches.mask))

    def _clients(self, round, population, chosen, start, shares, forms) -> ClientFeed:
        s, term = self.s, self.problem.populations[population]
        steps, batch = self.steps[population], self.batch[population]
        count = self.chunk // self.own[1]
        offsets = self.starts[population]
        first, sizes = offsets[chosen], offsets[chosen + 1] - offsets[chosen]
        rows, mask = cohort.cohort_rows(
            s.seed, round, population, chosen, first, sizes, steps, batch
        )
        missing = count - len(chosen)
        if missing:  # padding in place of clients, masked
            rows = np.concatenate([rows, np.repeat(rows[:1], missing, 0)])
            mask = np.concatenate([mask, np.zeros_like(mask, shape=(missing, steps, batch))])
        share = None
        if shares is not None:
            dealt = shares[population][start : start + count, :steps]
            dealt = dealt[np.minimum(np.arange(count), len(dealt) - 1)]
            share = self.problem.central[0].examples.take(dealt)  # type: ignore[union-attr]
        feed = ClientFeed(Batches(term.examples.take(rows), mask), share)
        if self.keys:
            keys = cohort.client_keys(s.seed, round, population, chosen)
            feed = feed._replace(key=np.concatenate([keys, np.repeat(keys[:1], missing, 0)]))
        for form in forms.get(term.name, ()):
            feed = form.read(feed)
        return feed

    def _deal(self, round: int) -> np.ndarray:
        """[populations, S, K, |B_i|] rows of the central term."""
        s = self.s
        shape = (len(self.starts), s.cohort_size, s.local_steps, s.client_batch)
        rng = cohort.generator(s.seed, round, cohort.SHARE)
        n = len(self.problem.central[0].examples)  # type: ignore[arg-type]
        return cohort.dealt_rows(rng, n, int(np.prod(shape))).reshape(shape)


class Prefetch:
    """Iterates over `source` in a thread, at most `ahead` items ahead."""

    def __init__(self, source: Callable[[], Iterator], ahead: int = 2):
        self.items: queue.Queue = queue.Queue(ahead)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(source,), daemon=True)
        self.thread.start()

    def _run(self, source):
        try:
            for item in source():
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # handed to the consumer
            self._put((None, error))

    def _put(self, item) -> bool:
        while not self.stopped.is_set():
            try:
                self.items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self):
        while True:
            item, error = self.items.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    def close(self):
        self.stopped.set()
        self.thread.join()
