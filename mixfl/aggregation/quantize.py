"""`upload = int16 | int8 | int4 | int2`: clients send their own part as whole numbers of b bits.

    code_i  = codes of u_i (codes.py), an integer in [-L, L] for each number, L = 2^(b-1) - 1
    sum     = sum p_i code_i, and sum code_i if the algorithm needs u_i too: integers
    decoded = rotation back of the sum, times range / L

**What adds up.** A client codes u_i, not p_i u_i: its weight p_i is a whole number (of examples or
steps, or 1) and multiplies the codes. A sum is an integer of at most S p_max L, so it is exact
modulo any 2^k with 2^(k-1) > S p_max L (`modulus_bits`): masks modulo 2^k can be added to
p_i code_i, and cancel. p_i, K_i, the steps' weights (`by_steps`) and the number of clients are
whole numbers that add up as they are. The loss is a float32 number, the only one.

**The range** of an array is the same for all clients: its codes mean multiples of range / L. The
server tells it (`told.ranges`, one per array of the model, then one per array of gradients if those
are sent too) and a client whose numbers exceed it shortens this array, and counts as
`clients/saturated`. Everybody else's code is unbiased. For the next round's ranges, each client
reports what range it would have needed with K steps, as one of 256 `levels` per array; levels are
counted over clients (`histogram`), so that they can be added up, too. A range is 5/4 of the largest
need of the last WINDOW rounds, but not above 3 times the upper quartile: a few clients with odd
numbers can't make it useless for all. Before anything is known, ranges are 0 and so are the codes:
the round is computed again with the ranges that its clients needed (base.py, `settled`). Under
differential privacy nothing is reported: ranges follow from the clip norm C, to which the client
shortens its own part first.

**Order.** Clients code what they have computed; the steps at the server (clipping.py, private.py)
and robust centers work on each decoded summand, because only that is bounded for sure. Rounding
adds to a norm, and what it adds is shortened, too: so C is the sensitivity whatever clients send.
Without such steps (`each = False`) summands stay integers until they are added up, and the server
decodes once.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.aggregation import codes
from mixfl.aggregation.base import Step, unweighted
from mixfl.aggregation.private import Hidden
from mixfl.algorithms.contract import Sums
from mixfl.errors import MixflError
from mixfl.forms.base import is_part, leaves_and_parts, map_parts, mapped, scaled, squares
from mixfl.settings import Settings

BITS = {"int16": 16, "int8": 8, "int4": 4, "int2": 2}
WINDOW = 4  # rounds
MARGIN, LIMIT = 1.25, 3.0  # of the largest need, and of the upper quartile
LEVELS, ORIGIN, PER_OCTAVE = 256, 160, 4  # level l means 2^((l - 160) / 4); 0: nothing but zeros
NOT_FINITE = LEVELS - 1
QUARTILE = 0.75
SPREAD = 16.0  # under differential privacy: the range is so many times C / sqrt(numbers)
LARGEST_SUM = 2**30  # of codes: above, each client is decoded (a factor of 2 for more clients)
STREAM = 0x63  # of the seed's


def choose(s: Settings) -> Step | None:
    if s.upload == "bfloat16":
        return Bfloat16(s)
    return Quantize(s) if s.upload in BITS else None


class State(NamedTuple):
    key: Any  # two words: of the next round's rotation
    needs: Any  # [WINDOW, 2, arrays]: the largest need and the upper quartile; 0: not known
    spread: Any  # [arrays]: the range for a norm of 1, under differential privacy


class Told(NamedTuple):
    key: Any
    ranges: Any  # [arrays]
    clip: Any  # [2]: C, and the factor of gradients in the norm; C is infinite without privacy


class Report(NamedTuple):
    levels: Any  # [arrays]
    saturated: Any  # 1 if an array was shortened


class Quantize(Step):
    elements = both = random = coder = True

    def __init__(self, s: Settings):
        self.bits = BITS[s.upload]
        self.most = codes.largest(self.bits)
        self.steps = s.most_steps or s.local_steps
        most = {"examples": s.client_batch * self.steps, "steps": self.steps, "uniform": 1}
        clients = s.cohort_size if isinstance(s.cohort_cap, str) else s.cohort_cap
        large = self.largest_sum(clients, most[s.weighting]) >= LARGEST_SUM
        self.each = s.clip != "off" or s.private or s.aggregation != "mean" or large
        self.clipped = s.private
        self._settings = Hidden(s)

    def init(self, x, population):
        seed = [self._settings.value.seed, population, STREAM]
        words = np.random.SeedSequence(seed).generate_state(2)
        sizes = np.array([math.prod(a.shape) for a in jax.tree.leaves(x)] * 2, np.float32)
        spread = np.minimum(SPREAD / np.sqrt(np.maximum(sizes, 1)), 1)
        needs = jnp.zeros((WINDOW, 2, len(sizes)), jnp.float32)
        return State(jnp.asarray(words), needs, jnp.asarray(spread))

    def told(self, state):
        largest, quartile = state.needs.max(0)
        ranges = jnp.minimum(MARGIN * largest, LIMIT * quartile)
        return Told(state.key, ranges, jnp.array([jnp.inf, 1.0], jnp.float32))

    def within(self, state, told, bound):
        clip, scale = bound
        each = jnp.where(jnp.arange(len(told.ranges)) < len(told.ranges) // 2, 1.0, 1 / scale)
        return told._replace(ranges=state.spread * each * clip, clip=jnp.stack([clip, scale]))

    # At the client

    def encode(self, told, summand: Sums, key):
        code, report = self.coded(told, summand, key)
        return self.taken(told, code, self.finite(report)), report

    def coded(self, told: Told, summand: Sums, key):
        """What is sent: the summand with codes of u_i in place of p_i u_i, and the report."""
        if summand.extra is not None:
            raise MixflError(
                f"upload = int{self.bits}: the clients of this algorithm send fields of its own "
                "too, for which there is no range. Use upload = float32, or another algorithm."
            )
        own = unweighted(summand) if summand.unweighted is None else summand.unweighted
        factor = _shortening(told.clip, own, summand.grads) if self.clipped else 1.0
        full = self.steps / jnp.maximum(summand.steps, 1)  # a need is that of a client with K steps
        signs, count = codes.signs(told.key), len(told.ranges) // 2
        levels, over = [], []

        def one(i: int, leaf):
            values, ids = (leaf.values, leaf.ids) if is_part(leaf) else (leaf, None)
            y = factor * codes.rotated(values, signs)
            need, most = jnp.max(jnp.abs(y), initial=0), self._range(told, i, leaf)
            levels.append(level(need * full))
            over.append((need > most) & (most > 0))
            short = jnp.where(need > most, most / jnp.where(need > 0, need, 1), 1.0)
            draws = codes.uniform(jax.random.fold_in(key, i), y.shape, ids)
            code = codes.rounded(short * y, most / self.most, self.most, draws)
            return leaf.mapped(lambda _: code) if is_part(leaf) else code

        def every(tree, first: int):
            if tree is None:
                levels.extend([jnp.int32(0)] * count)
                return None
            numbers = iter(range(first, first + count))
            return map_parts(lambda leaf: one(next(numbers), leaf), tree)

        weighted, grads = every(own, 0), every(summand.grads, count)
        report = Report(jnp.stack(levels), jnp.any(jnp.stack(over)).astype(jnp.int32))
        if self.clipped:  # all that may be told
            odd = jnp.where(report.levels == NOT_FINITE, NOT_FINITE, 0)
            report = Report(odd, jnp.zeros_like(report.saturated))
        return summand._replace(weighted=weighted, grads=grads), report

    # At the server, and in the simulator

    def taken(self, told: Told, code: Sums, finite: Any = True) -> Sums:
        """The summand that adds up, from the codes of a client. If it must be told apart later and
        is not finite, it is NaN."""
        if self.each:
            good = jnp.where(finite, 1.0, jnp.nan)
            own = self._decoded(told, code.weighted, 0, good)
            grads = self._decoded(told, code.grads, len(told.ranges) // 2, good)
            weight = code.weight
        else:
            own, grads = (_integers(tree) for tree in (code.weighted, code.grads))
            weight = code.weight.astype(jnp.int32)
        return code._replace(
            weighted=map_parts(lambda a: scaled(weight, a), own),
            unweighted=None if code.unweighted is None else own,
            grads=grads,
        )

    def decode(self, settled: Told, codes: Sums):
        if self.each:
            return codes
        first = len(settled.ranges) // 2
        return codes._replace(
            weighted=self._decoded(settled, codes.weighted, 0),
            unweighted=self._decoded(settled, codes.unweighted, 0),
            grads=self._decoded(settled, codes.grads, first),
        )

    def _decoded(self, told: Told, tree, first: int, factor: Any = 1.0):
        """From codes, of a client or their sums."""
        if tree is None:
            return None
        signs, numbers = codes.signs(told.key), iter(range(first, len(told.ranges)))

        def one(leaf):
            step = factor * self._range(told, next(numbers), leaf) / self.most

            def back(code):
                return codes.restored(code, signs) * step

            return mapped(back, leaf)

        return map_parts(one, tree)

    def _range(self, told: Told, i: int, leaf):
        """Under differential privacy, the norm may be that of a single row of a table."""
        if not (self.clipped and is_part(leaf)):
            return told.ranges[i]
        clip = told.clip[0] / jnp.where(i < len(told.ranges) // 2, 1.0, told.clip[1])
        return jnp.minimum(told.ranges[i] * math.sqrt(leaf.table), clip)

    def received(self, sent) -> Report:
        """The report in what was sent, [..., arrays + 1]."""
        sent = jnp.asarray(sent).astype(jnp.int32)
        return Report(sent[..., :-1], sent[..., -1])

    # From round to round

    def finite(self, report):
        return ~jnp.any(report.levels == NOT_FINITE)

    def settled(self, state, told, reports):
        if self.clipped:
            return told
        known = self.told(self.next(state, reports)).ranges
        return told._replace(ranges=jnp.where(told.ranges > 0, told.ranges, known))

    def changed(self, told, settled, reports):
        odd = jnp.any(reports.levels == NOT_FINITE)
        return odd | jnp.any((told.ranges == 0) & (settled.ranges > 0))

    def counted(self, settled, reports):
        return {"clients/saturated": jnp.sum(reports.saturated, dtype=jnp.int32)}

    def next(self, state, reports):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl="threefry2x32"), 1)
        state = state._replace(key=jax.random.key_data(key))
        if self.clipped:
            return state
        largest, quartile = needed(histogram(reports.levels))
        now = jnp.stack([largest, quartile])
        moved = jnp.concatenate([state.needs[1:], now[None]])
        return state._replace(needs=jnp.where(largest > 0, moved, state.needs))

    def largest_sum(self, clients: int, weight: int) -> int:
        """The largest absolute value of a sum of codes."""
        return clients * weight * self.most

    def modulus_bits(self, clients: int, weight: int) -> int:
        """k, so that sums modulo 2^k tell the sums themselves."""
        return (2 * self.largest_sum(clients, weight)).bit_length()


class Bfloat16(Step):
    """`upload = bfloat16`: rounded at random to one of the two nearest, so that the mean is right.
    There is no common range: such numbers add up only when they are float32 again."""

    elements = random = half = True

    def __init__(self, s: Settings):
        pass

    def encode(self, told, summand: Sums, key):
        if summand.extra is not None:
            raise MixflError(
                "upload = bfloat16: the clients of this algorithm send fields of its own too, for "
                "which there is no rule. Use upload = float32, or another algorithm."
            )
        trees = [summand.weighted, summand.grads]
        flat, tree = jax.tree.flatten(trees, is_leaf=is_part)
        done = [self._rounded(leaf, jax.random.fold_in(key, i)) for i, leaf in enumerate(flat)]
        weighted, grads = jax.tree.unflatten(tree, done)
        return summand._replace(weighted=weighted, grads=grads), ()

    @staticmethod
    def _rounded(leaf, key):
        values, ids = (leaf.values, leaf.ids) if is_part(leaf) else (leaf, None)
        draws = codes.uniform(key, values.shape, ids)
        return mapped(lambda a: codes.rounded_bfloat16(a, draws), leaf)


def level(need) -> jax.Array:
    """The level of a need: the next one above, so that a range of this level is enough."""
    exact = PER_OCTAVE * jnp.log2(jnp.where(need > 0, need, 1.0)) + ORIGIN
    known = jnp.clip(jnp.ceil(exact), 1, NOT_FINITE - 1).astype(jnp.int32)
    return jnp.where(jnp.isfinite(need), jnp.where(need > 0, known, 0), NOT_FINITE)


def needs(levels) -> jax.Array:
    value = jnp.exp2((levels.astype(jnp.float32) - ORIGIN) / PER_OCTAVE)
    return jnp.where(levels > 0, value, 0.0)


def histogram(levels) -> jax.Array:
    """From levels [clients, arrays]: how many clients have each, [arrays, LEVELS]."""
    return jnp.sum(levels[:, :, None] == jnp.arange(LEVELS), axis=0, dtype=jnp.int32)


def needed(counts) -> tuple[jax.Array, jax.Array]:
    """From counts of levels [arrays, LEVELS]: the largest need and the upper quartile, [arrays],
    of clients whose arrays are finite and not 0."""
    real = counts.at[:, 0].set(0).at[:, NOT_FINITE].set(0)
    clients = real.sum(1, keepdims=True)
    upto = jnp.cumsum(real, axis=1)
    largest = needs(jnp.argmax(upto >= clients, axis=1))
    quartile = needs(jnp.argmax(upto >= QUARTILE * clients, axis=1))
    some = clients[:, 0] > 0
    return jnp.where(some, largest, 0.0), jnp.where(some, quartile, 0.0)


def _shortening(clip, own, grads):
    norm = jnp.sqrt(_squared(own) + jnp.square(clip[1]) * _squared(grads))
    return jnp.where(norm > clip[0], clip[0] / jnp.where(norm > 0, norm, 1), 1.0)


def _squared(tree) -> Any:
    return sum(map(squares, leaves_and_parts(tree)), jnp.float32(0))


def _integers(tree):
    if tree is None:
        return None
    return map_parts(lambda a: mapped(lambda b: b.astype(jnp.int32), a), tree)
