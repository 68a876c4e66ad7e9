"""The sizes that clients are padded to, and how many places of each size a cohort gets.

A compiled program has fixed shapes. If all clients were padded to the largest, each would cost as
much as the largest. So a population whose clients are very unequal has a few sizes. A piece of a
cohort has places of every size, always equally many, so there is still one program. A client takes
a place of the smallest size that fits it. Places that stay empty are skipped (summing.py). The
largest size is left out if most pieces need none of it and this one does not: a second program.

All of this follows from the clients' sizes and the settings, never from earlier rounds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mixfl.problem import Federated
from mixfl.settings import Settings

MOST = 4  # sizes; each is compiled
SAVED = 0.3  # a size must save this share of the work
STEP = 8  # starting a step costs as much as this many examples
SPARE = 3  # standard deviations by which places exceed the expected number of clients


class Shape(NamedTuple):
    """What a client is padded to."""

    steps: int
    batch: int

    @property
    def examples(self) -> int:
        return self.steps * self.batch

    @property
    def cost(self) -> int:
        return self.steps * (self.batch + STEP)


class Places(NamedTuple):
    shape: Shape
    number: int  # in a piece
    rare: bool = False  # most pieces need none of them


def local_steps(examples: np.ndarray, s: Settings, speeds: np.ndarray | None = None) -> np.ndarray:
    """K_i of clients with so many examples. `speeds`: each makes only this share of its steps."""
    batches = examples + (s.client_batch - 1)
    batches //= s.client_batch  # in place: there may be many clients
    batches *= s.local_epochs or 1
    steps = np.minimum(batches, s.local_steps)
    if speeds is None:
        return steps
    return np.maximum(np.ceil(speeds * steps - 1e-9), 1).astype(np.int64)


def cut_short(term: Federated, s: Settings) -> int:
    """How many clients can't finish their epochs, because of local_steps."""
    if s.local_epochs is None:
        return 0
    batches = -(-term.clients.sizes() // s.client_batch)
    return int((batches * s.local_epochs > s.local_steps).sum())


def fewest_steps(s: Settings) -> int:
    """Of a client with a single batch, unless it is slow."""
    return min(s.local_epochs or 1, s.local_steps)


def needed(examples: np.ndarray, steps: np.ndarray, s: Settings) -> np.ndarray:
    """How many examples a shape must have to fit clients that take so many steps."""
    few = fewest_steps(s)
    rows, small = steps * s.client_batch, steps <= few
    rows[small] = few * np.minimum(examples[small], s.client_batch)
    return rows


def largest_shape(term: Federated, s: Settings) -> Shape:
    """What the largest client can fill."""
    if not term.here:
        return Shape(s.local_steps, s.client_batch)
    largest = term.clients.sizes().max()
    return Shape(int(local_steps(largest, s)), int(min(s.client_batch, largest)))


def client_shapes(term: Federated, s: Settings) -> list[Shape]:
    """The sizes of a population, smallest first. One unless more save work clearly."""
    shapes = [largest_shape(term, s)]
    # Other aggregations hold the summands of the cohort's clients, and no others.
    if not term.here or s.aggregation != "mean":
        return shapes
    others = halvings(shapes[0], fewest_steps(s))
    examples = needs_of(term, s)
    while others and len(shapes) < MOST:
        best = min(others, key=lambda shape: work(examples, [*shapes, shape]))
        if work(examples, [*shapes, best]) > (1 - SAVED) * work(examples, shapes):
            break
        shapes.append(best)
        others.remove(best)
    return sorted(shapes, key=lambda shape: shape.examples)


def needs_of(term: Federated, s: Settings) -> np.ndarray:
    """`needed` of all clients of a population, as if none was slow."""
    examples = term.clients.sizes()
    return needed(examples, local_steps(examples, s), s)


def halvings(shape: Shape, fewest: int = 1) -> list[Shape]:
    """Half the steps, again and again, down to the fewest; then half the batch. A client with more
    steps has full batches, so a shape fits all clients that need no more examples than it has."""
    found = []
    while shape.steps > fewest or shape.batch > 1:
        steps, batch = shape
        more = steps > fewest
        shape = Shape(max(-(-steps // 2), fewest), batch) if more else Shape(steps, -(-batch // 2))
        found.append(shape)
    return found


def smallest_fit(examples: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """[clients] positions in `shapes`, which are in ascending order. The largest fits all."""
    fit = np.searchsorted([shape.examples for shape in shapes], examples)
    return np.minimum(fit, len(shapes) - 1)


def work(examples: np.ndarray, shapes: Sequence[Shape]) -> int:
    """What all clients cost, each with a place of the smallest size that fits."""
    ascending = sorted(shapes, key=lambda shape: shape.examples)
    return int(counted(examples, ascending) @ np.array([shape.cost for shape in ascending]))


def counted(
    examples: np.ndarray, shapes: Sequence[Shape], weights: np.ndarray | None = None
) -> np.ndarray:
    """How many clients each shape is the smallest fit of. With `weights`, by which clients are
    drawn, as many as clients drawn with equal chances would have to be."""
    fit = smallest_fit(examples, shapes)
    if weights is None or len(shapes) == 1:
        return np.bincount(fit, minlength=len(shapes))
    share = np.bincount(fit, weights / weights.sum(), len(shapes))
    return np.ceil(share * len(examples) - 1e-9).astype(np.int64)


def places(
    clients: np.ndarray, shapes: Sequence[Shape], chunk: int, devices: int, group: int
) -> list[Places]:
    """The places for `chunk` clients, drawn from as many of each size as `clients` says. More than
    the expected number: if a cohort has still more clients of one size, they take places of a
    larger one, or the round has another piece. Small models train in groups, and need multiples."""
    if len(shapes) == 1:
        return [Places(shapes[0], -(-chunk // devices) * devices)]
    total = clients.sum()
    share = clients / total
    left = max(total - chunk, 0) / max(total - 1, 1)  # nothing varies if all take part
    spare = SPARE * np.sqrt(chunk * share * (1 - share) * left)
    expected = np.ceil(chunk * share + spare - 1e-9).astype(int)
    found = []
    for shape, count in zip(shapes, np.minimum(expected, np.minimum(clients, chunk)), strict=True):
        unit = devices * (group if count > group * devices else 1)
        found.append(Places(shape, int(-(-count // unit) * unit)))
    return [*found[:-1], found[-1]._replace(rare=bool(chunk * share[-1] < 0.5))]


def seat(
    examples: np.ndarray, available: Sequence[Places], devices: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Gives clients their places: per size, [places] positions in `examples`, or -1 where a place
    stays empty; and the clients for whom there was none, in their order. The largest size is left
    out if it is rare and stays empty."""
    fit = smallest_fit(examples, [size.shape for size in available])
    seats, over = [], np.arange(0)
    for i, (_, count, rare) in enumerate(available):
        waiting = np.concatenate([np.flatnonzero(fit == i), over])
        if rare and not len(waiting):
            break
        taken, over = waiting[:count], waiting[count:]
        order = np.arange(count)
        if len(available) > 1:  # equally many for each device
            order = order.reshape(devices, -1).T.ravel()
        seated = np.full(count, -1)
        seated[order[: len(taken)]] = taken
        seats.append(seated)
    return seats, np.sort(over)
