"""Under secure aggregation: a client's summand as a vector of whole numbers, and sums from one.

    numbers  p_i u_i (and u_i, and gradients, if the algorithm needs them): `bits` bits each
    heads    1, p_i, K_i, loss, whether it was shortened, p_i by K_i: 64 bits each
    levels   per array, which of 256 ranges it would have needed: a count for each

**Codes.** With b bits and a roster of S clients, codes are in [-L, L], L = (2^(b-1) - 1) / S: their
sum fits b bits, so a masked number is no longer than a plain one. A code is a multiple of
range / L, rounded at random; below 32 bits, arrays are rotated first (aggregation/codes.py).

**Ranges** are the same for all clients. They follow from the levels of the last rounds, which the
server gets as sums, too (aggregation/quantize.py); with 32 bits they are wide. The first round has
none: it has 32 bits, and ranges that are wide enough for any sane change. A client whose numbers
exceed the range shortens the array, and counts as `clients/saturated`. An array that no client has
changed yet has the range 0: it is sent as zeros, and its first change only makes the next range.

**Privacy.** With differential privacy, a client shortens its whole change to the norm C, rounds it
to a grid, and adds noise (secure_noise.py). Its only head is the 1; it tells no levels.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.aggregation import codes
from mixfl.aggregation.base import Chain, Step
from mixfl.aggregation.clipping import Clipping
from mixfl.aggregation.quantize import (
    LEVELS,
    LIMIT,
    MARGIN,
    WINDOW,
    level,
    needed,
)
from mixfl.aggregation.wire import Sent
from mixfl.algorithms.contract import Sums
from mixfl.deploy.flower.messages import Rejected
from mixfl.deploy.flower.secure_noise import Grid, discrete_gaussian
from mixfl.deploy.secure.ring import Layout, Segment, Vector
from mixfl.settings import Settings

BITS = {"float32": 32, "int16": 16, "int8": 8, "int4": 4}
FIRST_RANGE = 16.0  # of a number of u_i, before anything is known
WIDE = 16.0  # times the largest need: 32 bits have room for clients not seen before
LOSS = 2**20  # losses are counted in units of 1/LOSS
LARGEST_LOSS = 2**31
HEADS = 5  # before p_i by K_i
GROUPS = 3  # p_i u_i, u_i, gradients


class State(NamedTuple):
    key: Any  # two words: of the next round's rotation
    needs: Any  # [WINDOW, 2, arrays]: the largest need and the upper quartile; 0: not known


class Told(NamedTuple):
    key: Any
    ranges: Any  # [arrays]; 0: not known
    wide: Any  # [arrays]: the same, for codes with bits to spare
    noise: Any  # the noise multiplier, with differential privacy


class Ranges(Step):
    """Agrees on ranges from round to round. The coding itself is below."""

    def __init__(self, s: Settings, population_seed: int = 0x73):
        self.seed, self.stream = s.seed, population_seed
        self.private = s.private
        self.noise = s.dp_noise_multiplier if s.private else None

    def init(self, x, population):
        words = np.random.SeedSequence([self.seed, population, self.stream]).generate_state(2)
        arrays = GROUPS * len(jax.tree.leaves(x))
        return State(jnp.asarray(words), jnp.zeros((WINDOW, 2, arrays), jnp.float32))

    def told(self, state):
        largest, quartile = state.needs.max(0)
        ranges = jnp.minimum(MARGIN * largest, LIMIT * quartile)
        return Told(state.key, ranges, WIDE * largest, jnp.float32(self.noise or 0.0))

    def after(self, state: State, counts) -> State:
        """`counts` [arrays, LEVELS], of how many clients; None if nothing is told."""
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl="threefry2x32"), 1)
        state = state._replace(key=jax.random.key_data(key))
        if counts is None:
            return state
        largest, quartile = needed(jnp.asarray(counts))
        moved = jnp.concatenate([state.needs[1:], jnp.stack([largest, quartile])[None]])
        return state._replace(needs=jnp.where(largest > 0, moved, state.needs))


class Asked(NamedTuple):
    """What the server asks for, beside the broadcast."""

    bits: int  # of a number
    both: bool  # u_i beside p_i u_i
    steps: int  # the most that a client can take


class ClippedAtClient(Clipping):
    """Nobody else sees a change that could be clipped."""

    at_client = True


def secure_chain(s: Settings) -> Chain:
    """The steps at a client before its summand is coded."""
    return Chain([*([] if s.clip == "off" else [ClippedAtClient(s)]), Ranges(s)])


class Coding:
    """Of one round and population: the same at the server and at its clients. `like` has the shapes
    of what a client sends."""

    def __init__(self, s: Settings, like: Sent, told: Told, clients: int, asked: Asked) -> None:
        self.s, self.told, self.clients, self.k = s, told, clients, asked.steps
        self.asked, both, bits = asked, asked.both, asked.bits
        groups = [like.weighted, like.weighted if both else None, like.grads]
        self.trees = [None if tree is None else jax.tree.structure(tree) for tree in groups]
        count = len(jax.tree.leaves(like.weighted))
        self.arrays = [  # place among the ranges, shape
            (group * count + i, tuple(leaf.shape))
            for group, tree in enumerate(groups)
            for i, leaf in enumerate(jax.tree.leaves(tree))
        ]
        self.count, self.both = count, both
        self.sizes = [math.prod(shape) for _, shape in self.arrays]
        self.grid = Grid(s, float(told.noise), sum(self.sizes), clients) if s.private else None
        room = 2 ** (bits - 1) - 1 >= clients  # a roster may be larger than a cohort
        self.bits = bits if self._known() and room and not s.private else 32
        self.most = (2 ** (self.bits - 1) - 1) // clients
        self.ranges = self._ranges()

    def _known(self) -> bool:
        """Has each kind of array been seen with a change? Single arrays may never have one."""
        ranges = np.asarray(self.told.ranges)
        kinds = {i // self.count for i, _ in self.arrays}
        return all(ranges[k * self.count : (k + 1) * self.count].any() for k in kinds)

    def _ranges(self) -> list[float]:
        weight = {"examples": self.s.client_batch * self.k,
                  "steps": self.k, "uniform": 1}[self.s.weighting]  # fmt: skip
        first = FIRST_RANGE * np.repeat([weight, 1.0, self.k], self.count)
        wide = np.asarray(self.told.wide, np.float64)
        ranges = np.where(wide > 0, wide, first)
        if self.bits < 32:
            ranges = np.asarray(self.told.ranges, np.float64)
        return [float(ranges[i]) for i, _ in self.arrays]

    @property
    def layout(self) -> Layout:
        numbers = Segment(self.bits, sum(self.sizes))
        if self.s.private:
            return numbers, Segment(64, 1)
        levels = Segment(self.clients.bit_length(), len(self.arrays) * LEVELS)
        return numbers, Segment(64, HEADS + self.k), levels

    # At the client

    def vector(self, sent: Sent) -> Vector:
        """Raises Rejected if there is nothing that could be sent."""
        own = [np.asarray(a, np.float64) for a in jax.tree.leaves(sent.weighted)]
        every = own + ([a / float(sent.weight) for a in own] if self.both else [])
        every += [np.asarray(a, np.float64) for a in jax.tree.leaves(sent.grads)]
        if self.grid is not None:  # nobody is told what is wrong with a private change
            return self._private(every)
        if not all(np.isfinite(a).all() for a in every) or not np.isfinite(sent.loss):
            raise Rejected("nonfinite", "its change of the model is not finite")
        generator = np.random.default_rng()
        shortened, found, levels = False, [], []
        for a, most in zip(every, self.ranges, strict=True):
            y = self._turned(a)
            need = float(np.abs(y).max(initial=0.0))
            levels.append(int(level(jnp.float32(need))))
            if need > most:
                y, shortened = y * (most / need), True
            scale = self.most / most if most else 0.0
            code = np.floor(y * scale + generator.random(y.shape))
            found.append(np.clip(code, -self.most, self.most).astype(np.int64).ravel())
        numbers = _wrapped(np.concatenate(found), self.layout[0])
        counts = np.zeros((len(levels), LEVELS), self.layout[2].dtype)
        counts[np.arange(len(levels)), levels] = 1
        return [numbers, self._heads(sent, shortened), counts.ravel()]

    def _heads(self, sent: Sent, shortened: bool) -> np.ndarray:
        weight, steps = int(sent.weight), int(sent.steps)
        loss = round(float(np.clip(sent.loss, -LARGEST_LOSS, LARGEST_LOSS)) * LOSS)
        heads = np.zeros(HEADS + self.k, np.int64)
        heads[:HEADS] = 1, weight, steps, loss, shortened
        heads[HEADS + steps - 1] = weight
        return heads.view("<u8")

    def _private(self, every: list[np.ndarray]) -> Vector:
        assert self.grid is not None
        flat = np.concatenate([a.ravel() for a in every])
        whole = self.grid.coded(flat, self._split())
        noise = discrete_gaussian(self.grid.sigma, len(whole))
        return [_wrapped(whole + noise, self.layout[0]), np.ones(1, "<u8")]

    def _split(self) -> int:
        """How many of the numbers are of changes. The rest is of gradients."""
        return sum(n for n, (i, _) in zip(self.sizes, self.arrays, strict=True) if i < self.count)

    # At the server

    def sums(self, total: Vector, clients: int) -> tuple[Sums, np.ndarray | None, int]:
        """The sums, the counts of levels, and how many clients were shortened. Raises Rejected if
        this can't be the sum of so many clients: then masks have not cancelled."""
        heads = total[1].astype(np.uint64).view(np.int64)
        if heads[0] != clients:
            raise Rejected("masks", "the sum is not that of the survivors")
        numbers = _signed(total[0], self.layout[0])
        parts = np.split(numbers, np.cumsum(self.sizes)[:-1])
        if self.grid is not None:
            flat = self.grid.decoded(numbers, self._split())
            parts = np.split(flat, np.cumsum(self.sizes)[:-1])
            arrays = [
                part.reshape(shape) for part, (_, shape) in zip(parts, self.arrays, strict=True)
            ]
            return self._constant(arrays), None, 0
        if not clients <= heads[2] <= clients * self.k or heads[HEADS:].sum() != heads[1]:
            raise Rejected("masks", "the sum's heads are not possible")
        arrays = [
            self._back(part.reshape(shape)) * (most / self.most)
            for part, most, (_, shape) in zip(parts, self.ranges, self.arrays, strict=True)
        ]
        counts = np.zeros((GROUPS * self.count, LEVELS), np.int32)
        counts[[i for i, _ in self.arrays]] = total[2].reshape(-1, LEVELS)
        weighted, unweighted, grads = self._trees(arrays)
        summed = Sums(
            weighted, np.float32(heads[1]), unweighted, grads, np.float32(heads[2]),
            heads[HEADS:].astype(np.float32), np.float32(heads[3] / LOSS), np.float32(clients),
        )  # fmt: skip
        return summed, counts, int(heads[4])

    def _constant(self, arrays) -> Sums:
        """What the algorithm gets with differential privacy, as from aggregation/private.py."""
        weighted, _, grads = self._trees(arrays)
        clients, k = np.float32(self.s.cohort_size), self.k
        by_steps = np.zeros(k, np.float32)
        by_steps[-1] = clients
        zero = np.float32(0)
        return Sums(weighted, clients, None, grads, clients * k, by_steps, zero, clients)

    def _trees(self, arrays) -> list[Any]:
        found: list[Any] = []
        for group, tree in enumerate(self.trees):
            own = [
                a.astype(np.float32)
                for a, (i, _) in zip(arrays, self.arrays, strict=True)
                if i // self.count == group
            ]
            found.append(None if tree is None else jax.tree.unflatten(tree, own))
        return found

    def _turned(self, a: np.ndarray) -> np.ndarray:
        if self.bits == 32 or a.size == 0:
            return a
        return np.asarray(_rotated(jnp.asarray(a, jnp.float32), self.told.key), np.float64)

    def _back(self, code: np.ndarray) -> np.ndarray:
        if self.bits == 32 or code.size == 0:
            return code.astype(np.float64)
        return np.asarray(_restored(jnp.asarray(code, jnp.int32), self.told.key), np.float64)


@jax.jit
def _rotated(a, key):
    return codes.rotated(a, codes.signs(key))


@jax.jit
def _restored(code, key):
    return codes.restored(code, codes.signs(key))


def _wrapped(whole: np.ndarray, segment: Segment) -> np.ndarray:
    """mod 2^bits."""
    return (whole & ((1 << segment.bits) - 1)).astype(segment.dtype)


def _signed(values: np.ndarray, segment: Segment) -> np.ndarray:
    whole = values.astype(np.int64)
    return np.where(whole >> (segment.bits - 1), whole - (1 << segment.bits), whole)
