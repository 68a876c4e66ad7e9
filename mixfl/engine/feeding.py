"""Reads the data of rounds. (A thread does so ahead of time: prefetch.py.)

A round is fed in one piece, or in several if its cohort exceeds the chunk size: the chunk bounds
memory, not the cohort. All pieces have the same shapes: places for clients of one size or a few
(sizes.py). If there are several processes, each reads its own part of every piece.
Every piece is a new array: JAX may use a NumPy buffer in place while a round still runs, so a
buffer is never written to again.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mixfl.algorithms.contract import Algorithm, Batches, ClientFeed, Draw, Drawn
from mixfl.engine import cohort
from mixfl.engine.auto import GROUP, Forms
from mixfl.engine.first_states import first_state, with_first
from mixfl.engine.participation import Joined, Participation
from mixfl.engine.sizes import (
    Places,
    client_shapes,
    counted,
    local_steps,
    needed,
    needs_of,
    places,
    seat,
)
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.randomness import KEYS, takes_key
from mixfl.settings import Settings

CHUNK_BYTES = 256 << 20
DRAWN_BYTES = 8 << 30


class Piece(NamedTuple):
    round: int
    drawn: Any  # per term, Drawn or None; only in a round's first piece
    clients: tuple  # per population and size, ClientFeed with leaves [places, ...]
    last: bool  # the round ends with this piece
    fed: int = 0  # clients of the cohorts that this piece and those before it have
    cohort: int = 0  # clients of the cohorts
    lost: Mapping[str, int] = MappingProxyType({})  # clients that were drawn, and did not arrive
    who: tuple = ()  # per population and size, the clients [places] of algorithms with client state


def lost(joined: Sequence[Joined]) -> dict[str, int]:
    """Only what there is."""
    counts = {
        "clients/dropped": sum(each.dropped for each in joined),
        "clients/late": sum(each.late for each in joined),
    }
    return {name: count for name, count in counts.items() if count}


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
        data = term.examples.take(padded[:, :, mine])
        if takes_key(term.loss):
            words = cohort.drawn_example_keys(s.seed, round, what, j, draw.steps, len(place))
            data[KEYS] = words.reshape(*shape, 2)[:, :, mine]
        return Drawn(data, mask[:, :, mine])


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
        self.first: dict[Algorithm, Any] = {}  # what a client has kept before its first round
        self.starts = [np.asarray(t.clients.offsets) for t in problem.populations]
        self.of = [s.of(t) for t in problem.populations]  # each population's settings
        self.joining = [
            Participation(t, j, own)
            for j, (t, own) in enumerate(zip(problem.populations, self.of, strict=True))
        ]
        sizes = [own.cohort_size for own in self.of] or [s.cohort_size]
        self.capacity = max([*sizes, *(p.capacity for p in self.joining)])
        self.shapes = [
            client_shapes(t, own) for t, own in zip(problem.populations, self.of, strict=True)
        ]
        self.chunk = self._chunk()
        self.places = self._places(self.chunk)

    def _chunk(self) -> int:
        """Clients in a piece. Chunks have nearly equal size, with equal parts for the devices."""
        s = self.s

        def of(chunks: int) -> int:
            return -(-self.capacity // (chunks * self.devices)) * self.devices

        if s.aggregation != "mean":
            return of(1)  # compared with each other
        if s.cohort_chunk != "auto":
            return of(-(-self.capacity // s.cohort_chunk))
        chunks, most = 1, self.own[1] * CHUNK_BYTES
        while (size := self._bytes(of(chunks))) > most and of(chunks) > self.devices:
            chunks = max(-(-chunks * size // most), chunks + 1 + chunks // 10)
        return of(chunks)

    def _bytes(self, chunk: int) -> int:
        """Of the largest population's clients in a piece."""
        return max([0, *(
            term.examples.example_bytes * sum(size.shape.examples * size.number for size in sizes)
            for term, sizes in zip(self.problem.populations, self._places(chunk), strict=True)
        )])  # fmt: skip

    def _places(self, chunk: int) -> list[list[Places]]:
        return [
            places(
                counted(needs_of(p.term, p.s), shapes, p.weights), shapes,
                min(chunk, -(-p.capacity // self.devices) * self.devices), self.devices, GROUP,
            )
            for p, shapes in zip(self.joining, self.shapes, strict=True)
        ]  # fmt: skip

    def _first_state(self, algorithm: Algorithm) -> Any:
        if algorithm not in self.first:
            self.first[algorithm] = first_state(self.problem, algorithm)
        return self.first[algorithm]

    def pieces(self, algorithm: Algorithm, round: int) -> Iterator[Piece]:
        feed = algorithm.feed
        drawn: Any = self.drawn(algorithm, round)
        if not feed.clients or not self.problem.populations:
            yield Piece(round, drawn, (), True)
            return
        joined = [p.at(round) for p in self.joining]
        shares = self._deal(round) if feed.share else None
        forms, state = self.forms.at(algorithm), self._first_state(algorithm)
        sizes = [len(each.clients) for each in joined]
        waiting = [np.arange(0) for _ in joined]  # positions in the cohort
        fed, last = [0] * len(joined), False
        while not last:
            if not any(map(len, waiting)):
                waiting = [
                    np.arange(f, min(f + self.chunk, n)) for f, n in zip(fed, sizes, strict=True)
                ]
            clients, who = [], []
            for j, (chosen, *_) in enumerate(joined):
                feeds, sat, left = self._seated(round, j, chosen, waiting[j], shares, forms)
                fed[j] += len(waiting[j]) - len(left)
                waiting[j] = left
                clients.append(feeds if state is None else tuple(with_first(feeds, state)))
                who.append(sat)
            last = fed == sizes
            known = () if state is None else tuple(who)
            yield Piece(
                round, drawn, tuple(clients), last, sum(fed), sum(sizes), lost(joined), known
            )
            drawn = None

    def whole(self) -> "Feeder":
        """A Feeder that reads the parts of all processes."""
        every = copy.copy(self)
        every.own = (0, 1)
        return every

    def of_one_size(self) -> "Feeder":
        """A Feeder that pads all clients to the largest."""
        other = copy.copy(self)
        other.places = [[Places(shapes[-1], self.chunk)] for shapes in self.shapes]
        return other

    def _seated(self, round, population, chosen, waiting, shares, forms):
        """The feeds of a piece, one per size; who they are of, -1 where it is nobody; and the
        clients that it has no place for."""
        term = self.problem.populations[population]
        examples, steps = self._planned(round, population, chosen[waiting])
        needs = needed(examples, steps, self.of[population])
        seats, left = seat(needs, self.places[population], self.devices)
        feeds, sat = [], []
        for (shape, count, _), seated in zip(self.places[population], seats, strict=False):
            own = seated[self._own(count)]
            real = own >= 0
            first = own[real][0] if real.any() else 0
            at = waiting[np.where(real, own, first)] if len(waiting) else np.zeros_like(own)
            feed = self._clients(round, population, chosen, at, real, shape, shares)
            for form in forms.sized(term.name, shape):
                feed = form.read(feed)
            feeds.append(feed)
            sat.append(np.where(real, chosen[at] if len(chosen) else -1, -1))
        return tuple(feeds), tuple(sat), waiting[left]

    def _planned(self, round: int, population: int, who: np.ndarray) -> tuple:
        """How many examples these clients have, and how many steps each takes."""
        offsets = self.starts[population]
        examples = offsets[who + 1] - offsets[who]
        speeds = self.joining[population].speeds(round, who)
        return examples, local_steps(examples, self.of[population], speeds)

    def _clients(self, round, population, chosen, at, real, shape, shares) -> ClientFeed:
        """The feed of the clients at these positions of the cohort. If not `real`, masked."""
        s, term, offsets = self.s, self.problem.populations[population], self.starts[population]
        distinct, which = np.unique(at, return_inverse=True)
        who = chosen[distinct] if len(chosen) else distinct  # of nobody, all places are empty
        first = offsets[who]
        sizes, steps = self._planned(round, population, who)
        steps = np.minimum(steps, shape.steps)  # only of a client in an empty place
        rows, mask = cohort.cohort_rows(
            s.seed, round, population, who, first, sizes, shape.steps, shape.batch, steps
        )
        rows, mask = rows[which], mask[which]
        if not real.all():  # padding in place of clients: one row, masked
            rows[~real], mask[~real] = rows[0, 0, 0], 0

        def keys_of(what: int, batch: int) -> np.ndarray:
            return cohort.client_example_keys(
                s.seed, round, what, population, who, shape.steps, batch
            )[which]

        data, share = term.examples.take(rows), None
        if takes_key(term.loss):
            data[KEYS] = keys_of(cohort.ORDER, shape.batch)
        if shares is not None:
            (central,) = self.problem.central
            share = central.examples.take(shares[population][at, : shape.steps])  # type: ignore[union-attr]
            if takes_key(central.loss):
                share[KEYS] = keys_of(cohort.SHARE, s.client_batch)
        feed = ClientFeed(Batches(data, mask), share)
        if self.keys:
            keys = cohort.client_keys(s.seed, round, population, who)
            feed = feed._replace(key=keys[which])
        return feed

    def _deal(self, round: int) -> np.ndarray:
        """[populations, S, K, |B_i|] rows of the central term."""
        s = self.s
        shape = (len(self.starts), self.capacity, s.local_steps, s.client_batch)
        rng = cohort.generator(s.seed, round, cohort.SHARE)
        n = len(self.problem.central[0].examples)  # type: ignore[arg-type]
        return cohort.dealt_rows(rng, n, int(np.prod(shape))).reshape(shape)
