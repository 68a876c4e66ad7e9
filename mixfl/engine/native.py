"""Rounds in which PyTorch itself computes the gradients of losses that are written in PyTorch.

The loops over clients and steps then run on the host (dispatch.py). In them, `steps.gradient` is a
call of PyTorch (host_calls.py), and everything else is as it always is: the steps, the algorithm,
the aggregation. So the two ways differ by rounding only, whatever the settings.

A loss that can't be compiled always takes this way. So does one of many layers that PyTorch
computes at a good part of the machine's rate, if XLA is known not to be faster (`at_once`): then
nothing else is compiled. Otherwise a part of a round is timed in both ways before the run, in
turns, and this one is taken if it is faster. The outcome is kept on disk, by program (loops.py).
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from mixfl.algorithms.contract import Algorithm
from mixfl.algorithms.steps import written_out
from mixfl.engine import loops, processes
from mixfl.forms.products import original
from mixfl.problem import Problem
from mixfl.randomness import trial_batch
from mixfl.settings import Settings

CLEARLY = 1.03  # the compiled round takes so many times as long
CLOSE = 1.15  # a smaller ratio is measured more often
SHORT = 0.001  # seconds of a step, of which starting PyTorch's operators would be a large part
LONG = 0.2  # seconds of a step, which one client with all cores may take faster
STEPS = 2  # of each client that is timed
TRIALS, MOST, SECONDS = 3, 9, 6.0  # at least, at most, and no new one after so many seconds
GOOD = 0.45  # share of the rate of a large product
LAYERS = 8  # of convolutions; fewer compile quickly


class Flops(NamedTuple):
    """Of the products of a step."""

    dense: float = 0.0  # and of attention
    convolutions: float = 0.0
    recurrent: float = 0.0


@dataclasses.dataclass
class Step:
    """A client's step in PyTorch, on one core."""

    operators: str  # a digest
    flops: Flops
    layers: int  # of convolutions
    measure: Callable[[], tuple[float, float]]  # its seconds; flops a second of a large product
    of_clients: Callable[[int], Callable[[], float]]  # seconds of steps of so many clients at once

    @functools.cached_property
    def measured(self) -> tuple[float, float]:
        return self.measure()


def good(flops: Flops, layers: int, seconds: float, rate: float) -> bool:
    """Is PyTorch's step as fast as what XLA makes of it, or faster? So it was for LSTMs and many
    layers of convolutions that have a good share of the rate (docs/benchmarks.md). Dense layers are
    often faster compiled, whatever their share: XLA computes what is between them in one pass. Few
    layers compile quickly, and are timed."""
    known = flops.recurrent + (flops.convolutions if layers >= LAYERS else 0.0)
    return known > sum(flops) / 2 and sum(flops) >= GOOD * seconds * rate


def refused(problem: Problem, algorithm: Algorithm, s: Settings, rows: bool) -> str:
    """Why PyTorch can't compute the gradients; empty if it can. `rows`: clients hold only some rows
    of tables."""
    losses: list[Any] = [original(t.loss) for t in problem.terms if t.examples is not None]
    if not losses or not all(hasattr(loss, "natively") for loss in losses):
        return "a loss is not written in PyTorch"
    if any(loss.takes_key for loss in losses):
        return "a loss draws random numbers"
    if algorithm.own_origin() is None:
        return "the algorithm's functions were replaced after it was built"
    if algorithm.client_state is not None:
        return "the algorithm's clients keep a state"
    if rows:
        return "clients hold only some rows of tables"
    for key, value in (("first_layer", "low-rank"), ("convolutions", "products")):
        if getattr(s, key) == value:
            return f"{key} = {value}"
    return "" if jax.process_count() == 1 else "there are several processes"


def possible(problem: Problem, algorithm: Algorithm, s: Settings, threads: int) -> bool:
    """Can PyTorch compute the gradients? Known before any loss is traced; if it is not, False."""
    rows = s.tables != "dense" and any(term.rows for term in problem.populations)
    plain = algorithm.feed.clients and s.aggregation == "mean" and threads <= processes.available()
    return bool(plain) and not refused(problem, algorithm, s, rows)


def steps(problem: Problem, s: Settings) -> list[Step]:
    """A client's step of each population. Empty if something fails: the preflight or the run then
    says what is wrong."""
    kept = problem.kept.setdefault("steps", {})

    def of(term: Any) -> Step:
        batch, loss = s.of(term).client_batch, original(term.loss)
        if (term.name, batch) not in kept:
            rows = np.arange(batch) % len(term.examples)
            kept[term.name, batch] = loss.step(trial_batch(term, rows))  # type: ignore[attr-defined]
        return kept[term.name, batch]

    try:
        return [of(term) for term in problem.populations]
    except Exception:
        return []


def at_once(found: Sequence[Step]) -> bool:
    """Should PyTorch compute the gradients, without a comparison?"""
    if not found:
        return False
    name = loops.digest((step.operators for step in found), ("a step", GOOD, LAYERS))
    kept = loops.read()
    if name not in kept:
        short = all(step.measured[0] < LONG for step in found)  # else, the threads are timed
        kept[name] = short and all(good(f.flops, f.layers, *f.measured) for f in found)
        loops.write(kept)
    return bool(kept[name])


def natively(problem: Problem, threads: int) -> Problem:
    """The problem with PyTorch's gradients, of so many clients at once."""

    def replaced(term):
        loss: Any = original(term.loss)
        return dataclasses.replace(term, loss=loss.natively(threads) if has_data(term) else loss)

    def has_data(term) -> bool:
        return term.examples is not None

    return problem.with_terms([replaced(term) for term in problem.terms])


def never_compiled(problem: Problem) -> Problem:
    """For checks of losses that no program will contain."""

    def replaced(term):
        loss: Any = original(term.loss)
        return dataclasses.replace(term, loss=getattr(loss, "in_pytorch", lambda: loss)())

    return problem.with_terms([replaced(term) for term in problem.terms])


def not_compiled(problem: Problem) -> bool:
    """Is there a loss that calls PyTorch from the compiled round? Known after a trace."""
    return any(getattr(original(term.loss), "notes", ()) for term in problem.terms)


def best(ways: dict[int, Any], jaxpr: Any, found: Sequence[Step] = ()) -> int:
    """How many clients at once PyTorch should compute; 0: none. `ways` has a simulator for each;
    `jaxpr` is the compiled round, by which the outcome is kept (None: there is none). `found` are
    PyTorch's steps."""
    if len(ways) == 1:
        return next(iter(ways))
    if jaxpr is None:
        jaxpr = ways[max(ways)]._jaxpr()
    name = loops.digest(_described(jaxpr.jaxpr), (sorted(ways), CLEARLY))
    kept = loops.read()
    if kept.get(name) not in ways:
        kept[name] = _fastest(ways, found)
        loops.write(kept)
    return kept[name]


def _described(jaxpr: Any) -> Iterator[str]:
    """Its operations and their shapes. (A large round takes seconds to print.)"""
    for eqn in jaxpr.eqns:
        yield f"{eqn.primitive.name} {[getattr(v.aval, 'shape', ()) for v in eqn.outvars]}"
        for inner in jaxprs_in_params(eqn.params):
            yield from _described(inner)


def _fastest(ways: dict[int, Any], found: Sequence[Step]) -> int:
    """The most threads are tried first. If the compiled round is as fast, no others are. If it is
    as fast as PyTorch's steps alone, nothing of PyTorch's way is compiled."""
    most, *fewer = sorted(ways.keys() - {0}, reverse=True)
    if 0 in ways:
        compiled = Trial(ways[0])
        if compiled.seconds() < SHORT * compiled.steps:
            return 0
        if len(found) == 1:
            steps, one = compiled.steps * ways[0].devices / most, found[0].of_clients(most)
            if slower(compiled.seconds, lambda: steps * one()) <= CLEARLY:
                return 0
        chosen = Trial(ways[most])
        if slower(compiled.seconds, chosen.seconds) <= CLEARLY:
            return 0
    else:
        chosen = Trial(ways[most])
    for threads in fewer:
        if chosen.seconds() < LONG * chosen.steps:
            break  # PyTorch's threads wait for each other at every operator
        other = Trial(ways[threads])
        if slower(chosen.seconds, other.seconds) > CLEARLY:
            most, chosen = threads, other
    return most


def slower(one: Callable[[], float], other: Callable[[], float]) -> float:
    """How many times as long `one` takes. Each call is a trial. They take turns, because what else
    runs on the cores changes with time, and the median counts."""
    ratios, total = list[float](), 0.0
    while len(ratios) < MOST:
        pair = one(), other()
        ratios.append(pair[0] / max(pair[1], 1e-9))
        total += sum(pair)
        middle = float(np.median(ratios))
        if total > SECONDS or (len(ratios) >= TRIALS and not 1 / CLOSE < middle < CLOSE):
            break
    return middle


class Trial:
    """A round of which only a part is computed, from which the time of all of it follows."""

    def __init__(self, simulator: Any):
        self.simulator = simulator
        self.algorithm = simulator.at(0)
        self.program = simulator.program(self.algorithm)
        self.piece = next(simulator.feeder.pieces(self.algorithm, 0))
        x = simulator.shapes().x
        first = [feeds[-1] for feeds in self.piece.clients]
        # Such steps are computed although they are padding.
        self.whole = simulator.loops == "compiled" and any(
            written_out(feed.batches.mask.shape[1], x) for feed in first
        )
        self.ratio = _steps(self.piece) / max(1, _steps(self._cut(1)))
        self.steps = _steps(self.piece) / simulator.devices  # one after the other
        self._seconds(self._cut(1))  # compiles

    def seconds(self) -> float:
        if self.whole:
            return self._seconds(self.piece)
        nobody = self._seconds(self._cut(0))
        return nobody + self.ratio * max(0.0, self._seconds(self._cut(1)) - nobody)

    def _cut(self, count: int) -> Any:
        """With the first steps of so many clients per device, or thread."""

        def of_size(feed):
            mask, devices = np.zeros_like(feed.batches.mask), self.simulator.devices
            apart = len(mask) // devices if self.simulator.loops == "compiled" else 1
            for i in range(devices):
                part = slice(i * apart, i * apart + count)
                mask[part, :STEPS] = feed.batches.mask[part, :STEPS]
            return feed._replace(batches=feed.batches._replace(mask=mask))

        clients = tuple(tuple(map(of_size, feeds)) for feeds in self.piece.clients)
        return self.piece._replace(clients=clients)

    def _seconds(self, piece: Any) -> float:
        program, given = self.program, self.simulator.given(self.program)
        state = program.place(jax.tree.map(lambda a: loops.filled(a.shape, a.dtype),
                                           self.simulator.shapes()))  # fmt: skip
        jax.block_until_ready(state)
        begin = time.perf_counter()
        if piece.last:
            jax.block_until_ready(
                program.run(program.whole, state, piece.drawn, piece.clients, given=given)
            )
            return time.perf_counter() - begin
        broadcasts, _ = program.run(program.begin, state, piece.drawn, given=given)
        arguments = broadcasts, piece.clients, state.aggregation
        carry = program.run(program.empty, *arguments, given=given)
        jax.block_until_ready(program.run(program.accumulate, carry, *arguments, given=given))
        return time.perf_counter() - begin


def _steps(piece: Any) -> int:
    """That its clients take."""
    masks = [feed.batches.mask for feeds in piece.clients for feed in feeds]
    return int(sum(np.any(mask > 0, axis=2).sum() for mask in masks))
