"""The simulator: feeds the compiled round, keeps one round in flight."""

import copy
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mixfl.aggregation import Chain, chain
from mixfl.aggregation.download import Download
from mixfl.algorithms.contract import Algorithm
from mixfl.engine import native, processes
from mixfl.engine.auto import (
    Forms,
    choose_devices,
    choose_forms,
    in_fast_form,
    model_shapes,
    resolved,
)
from mixfl.engine.base import Progress, RoundBytes, RoundResult
from mixfl.engine.client_memory import ClientMemory
from mixfl.engine.counting import ByteCounter
from mixfl.engine.exactness import check_marks
from mixfl.engine.feeding import Feeder
from mixfl.engine.first_model import first_model, first_shapes
from mixfl.engine.long_round import LongRound
from mixfl.engine.loops import slow_in_loops, unknown_operators
from mixfl.engine.params import check_params
from mixfl.engine.prefetch import Prefetch
from mixfl.engine.programs import shared_round
from mixfl.engine.round import Given, Round, State
from mixfl.engine.sizes import cut_short
from mixfl.errors import MixflError
from mixfl.forms.half import algorithm_in_half
from mixfl.forms.products import products_in
from mixfl.problem import Params, Problem
from mixfl.process.collector import CollectorPaused
from mixfl.process.memory import return_freed_memory, return_large_blocks
from mixfl.settings import Settings
from mixfl.trees import tree_bytes

LONG_ROUND = 32  # a round with this many chunks of central batches reports its progress
LARGE_STATE = 32 << 20  # bytes, above which only one round at a time has memory
LARGE_CONSTANTS = 16 << 20  # bytes
PAUSE = 0.002  # seconds


class Simulator:
    """The engine that runs an algorithm on a problem in one place: see Engine in base.py."""

    @CollectorPaused()
    def __init__(
        self, problem: Problem, algorithm: Algorithm, s: Settings, platform: str | None = None
    ):
        x = model_shapes(problem)
        self.platform = platform or jax.default_backend()  # what the programs are made for
        problem, algorithm = algorithm_in_half(problem, algorithm, s)
        self.s, self.loops = s, "compiled"  # or: host, pytorch
        devices = self._threads()[-1]
        self.steps: list[native.Step] = []  # of clients in PyTorch, if they matter
        possible = self.platform == "cpu" and native.possible(problem, algorithm, s, devices)
        if possible and s.loops == "auto":
            self.steps = native.steps(problem, s)
        known = possible and s.loops == "pytorch" and s.devices != "auto"
        if known or native.at_once(self.steps):
            self.loops = "pytorch"
            problem, algorithm = _natively(problem, algorithm, devices)
            self.forms = Forms({term.name: () for term in problem.populations})
        else:
            problem, algorithm = in_fast_form(problem, x, algorithm, s, self.platform)
        self.problem, self.algorithm = problem, algorithm
        self.aggregation = chain(s) if algorithm.feed.clients else Chain([])
        if self.loops == "compiled":
            self.forms = choose_forms(problem, x, algorithm, s, self.aggregation, self.platform)
            devices = choose_devices(problem, x, algorithm, s, self.forms, self.platform)
        self.not_timed = ""  # why that was not found out
        self.constants = 0  # bytes of a round's constants, as far as known
        self._on_devices(devices)
        self.feeder.check_draws(self.at(0))
        check_marks(self.at(0), self.feeder, lambda: first_model(problem, s.seed))
        self.memory = ClientMemory(problem, algorithm, s)
        self.keep, self.flush, self.saved = self.memory.keep, self.memory.flush, self.memory.saved
        self.programs: dict[Algorithm, Round] = {}
        self.compiled: set[Round] = set()  # programs that have run
        self.traced_before = 0  # by other simulators that share a program
        self.waited = 0.0  # seconds that the loop waited for data
        self.on_progress: Callable[[Progress], None] = lambda _: None
        self.under_way: deque[LongRound] = deque()  # long rounds in flight

    def _on_devices(self, count: int) -> None:
        self.devices = count
        self.frozen: list[Any] | None = None  # the frozen arrays, on these devices
        own = (jax.process_index(), jax.process_count())
        self.feeder = Feeder(
            self.problem, self.s, count, self.forms, own, keys=self.aggregation.random
        )
        # How many table rows clients hold is theirs to know.
        forms = Forms({}) if self.aggregation.private else self.forms
        self.byte_counter = ByteCounter(self.problem, self.feeder, forms, self.aggregation)

    @functools.cached_property
    @CollectorPaused()
    def unknown(self) -> set[str]:
        """Decides where the loops run. Returns the operators for which that was timed."""
        unknown: set[str] = set()
        loops = self.s.loops
        if self.loops == "pytorch":
            return unknown
        if loops == "auto" and self.platform == "cpu" and jax.process_count() == 1:
            try:
                jaxpr = self._jaxpr()
            except Exception:  # the preflight or the run says what is wrong
                return unknown
            unknown = unknown_operators(jaxpr)
            self.constants = tree_bytes(jaxpr.consts)
            try:
                if unknown and slow_in_loops(jaxpr, self.devices):
                    self._on_host()
                self._choose_native(jaxpr)
            except Exception as error:
                self.not_timed = f"could not be timed ({type(error).__name__})"
        elif loops == "host":
            self._on_host()
        elif loops == "pytorch":
            if why := self._not_native():
                raise MixflError(f"loops = pytorch: {why}. Use loops = auto.")
            self._choose_native(None)
        return unknown

    def _on_host(self) -> None:
        self.loops, self.programs = "host", {}
        self._on_devices(1)

    def _threads(self) -> list[int]:
        """How many clients PyTorch may compute at once."""
        return sorted({1, processes.available()}) if self.s.devices == "auto" else [self.s.devices]

    def _not_native(self) -> str:
        if self.platform != "cpu":
            return "it is for CPUs only"
        rows = any(self.forms.tables.values())
        return native.refused(self.problem, self.algorithm, self.s, rows)

    def _choose_native(self, jaxpr) -> None:
        """Lets PyTorch compute the gradients, if it can and that is faster. Without a round to
        compare it with, or if that calls PyTorch anyway, it only chooses the threads."""
        if self._not_native():
            return
        ways = {n: self._natively(n) for n in self._threads()}
        if jaxpr is not None and not native.not_compiled(self.problem):
            ways[0] = self
        chosen = native.best(ways, jaxpr, self.steps)
        if chosen:
            vars(self).update(vars(ways[chosen]))

    def _natively(self, threads: int) -> "Simulator":
        other = copy.copy(self)
        other.problem, other.algorithm = _natively(self.problem, self.algorithm, threads)
        other.forms = Forms({term.name: () for term in other.problem.populations})
        other.loops, other.programs = "pytorch", {}
        other._on_devices(threads)
        return other

    def _jaxpr(self):
        piece = next(self.feeder.pieces(self.at(0), 0))
        program = self.program(self.at(0))
        return program.jaxpr(self.shapes(), piece, self.given(program))

    @CollectorPaused()
    def init(self) -> Any:
        """The state before the first round; the model comes from the seed. Meanwhile, the round is
        compiled."""
        self.unknown  # noqa: B018 (decides)
        for program in self.programs.values():
            program.compile_ahead()
        x = first_model(self.problem, self.s.seed)
        check_params(x)
        return self.state(x)

    def shapes(self) -> Any:
        return jax.eval_shape(self.state, first_shapes(self.problem))

    def state(self, x: Params) -> Any:
        """The state before the first round from the model x."""
        # Own copies: the round donates its input, and states may share arrays with each other.
        # With explicit types: jnp.full(3, 0.1) has a weak one, for which JAX would compile twice.
        inner = jax.tree.map(_own, self.algorithm.init(x))
        clients = self.problem.populations if self.algorithm.feed.clients else ()
        steps = tuple(self.aggregation.init(x, j) for j in range(len(clients)))
        return State(inner, steps, Download(self.s).init(x, len(clients)))

    def at(self, round: int) -> Algorithm:
        return self.algorithm.at(round)

    def resolved(self) -> Settings:
        self.unknown  # noqa: B018 (decides)
        return resolved(
            self.problem, self.s, self.feeder.chunk, self.devices, self.forms, self.loops
        )

    def notes(self) -> Iterator[str]:
        clients = zip(self.problem.populations, self.feeder.of, self.feeder.shapes, strict=True)
        for term, s, shapes in clients if self.algorithm.feed.clients else ():
            if shapes[-1].steps < s.local_steps:
                yield (
                    f"no client of '{term.name}' has more than {shapes[-1].steps} batches of "
                    f"{s.client_batch}: local_steps = {s.local_steps} is never reached"
                )
            if many := cut_short(term, s):
                yield (
                    f"local_steps = {s.local_steps} ends the epochs of {many} of the "
                    f"{len(term.clients)} clients of '{term.name}' early"
                )
            if len(shapes) > 1:
                sizes = ", ".join(f"{steps} x {batch}" for steps, batch in shapes)
                yield f"clients of '{term.name}' are padded to the smallest that fits of {sizes}"
        yield from map(str, self.forms.refused)
        if terms := products_in(self.problem):
            yield f"convolutions or recurrent layers as larger products: {', '.join(terms)}"
        if self.loops == "pytorch":
            yield f"PyTorch itself computes the gradients, of {self.devices} clients at once"
        if self.unknown and self.loops == "host":
            yield (
                f"{', '.join(sorted(self.unknown))}: slow in a compiled loop. The loops over "
                "clients and steps run on the host"
            )
        if self.unknown and self.not_timed:
            yield (
                f"{', '.join(sorted(self.unknown))}: {self.not_timed}. If rounds are slow, try "
                "loops = host"
            )
        if self.not_timed and not self.unknown:
            yield f"PyTorch's own gradients {self.not_timed}. Try loops = pytorch"
        if self.constants >= LARGE_CONSTANTS:
            yield (
                f"losses close over {self.constants >> 20} MB of arrays: as constants of the "
                "program, these are in memory several times. Give them as Problem(frozen=...)"
            )
        layers = {name for weights in self.forms.low_rank.values() for name in weights}
        if layers:
            yield f"low-rank steps at the clients, exact and faster: {', '.join(sorted(layers))}"

    def repeated(self) -> int:
        return 0  # a round that is repeated is the same

    def round_bytes(self, round: int) -> RoundBytes:
        return self.byte_counter.count(self.at(round), round, self.shapes)

    def program(self, algorithm: Algorithm, round: int = 0) -> Round:
        """The program of a round's algorithm."""
        if algorithm not in self.programs:
            new = Round(
                algorithm, self.problem, self.s, self.aggregation, self.forms, self.devices,
                long=self.long(algorithm) > 0, origin=self.algorithm.own_origin(),
                at=round if self.algorithm.phase else 0, host=self.loops != "compiled",
                platform=self.platform, native=self.loops == "pytorch",
                may_be_empty=not all(p.always_full for p in self.feeder.joining),
            )  # fmt: skip
            program = shared_round(new)
            self.traced_before += program.traces
            self.programs[algorithm] = program
        return self.programs[algorithm]

    def rates(self, round: int = 0) -> dict[str, float]:
        origin = self.algorithm.own_origin()
        if origin is None and self.s.schedules:
            raise MixflError(
                f"{', '.join(self.s.schedules)}: a schedule, but the algorithm's functions were "
                "replaced after it was built. Make an algorithm of it (@algorithm)."
            )
        return origin.rates(round) if origin else {}

    def given(self, program: Round, round: int = 0) -> Given:
        """What its programs take besides the state and the data."""
        if self.frozen is None:
            self.frozen = program.place(self.problem.frozen_arrays())
        rates = self.rates(round)  # refuses schedules that the algorithm can't follow
        return Given({} if program.constant else rates, self.frozen)

    def long(self, algorithm: Algorithm) -> int:
        """How many chunks the server computes in a round, if it is long; otherwise 0. Also 0
        if there are several processes: a program calls back in only one of them."""
        if jax.process_count() > 1:
            return 0
        chunks = [(draw.steps, self.feeder.chunks(draw)) for draw in algorithm.feed.draw if draw]
        count = sum(steps * parts for steps, parts in chunks if parts > 1)
        return count if count >= LONG_ROUND else 0

    def _chunk_done(self) -> None:
        if not self.under_way:  # a round of an earlier run that was stopped
            return
        long = self.under_way[0]
        long.chunks_done += 1
        self.on_progress(long.progress())
        if long.chunks_done == long.chunks:
            self.under_way.popleft()

    @property
    def traces(self) -> int:
        """Programs traced so far: one per phase of the algorithm, however many rounds."""
        return sum(p.traces for p in self.programs.values()) - self.traced_before

    def rounds(self, state: Any, start: int, stop: int) -> Iterator[RoundResult]:
        """Rounds start .. stop - 1 from `state`, which is consumed."""
        self.unknown  # noqa: B018 (decides)
        self.memory.begin(start)
        if self.aggregation.private:
            secret = self.aggregation.cohort_seed(state.aggregation[0])
            for joining in self.feeder.joining:
                joining.secret = secret

        def source():
            for t in range(start, stop):
                yield from self.feeder.pieces(self.at(t), t)

        state = self.program(self.at(start), start).place(state)
        feed = Prefetch(source)
        pending: Any = None
        large = tree_bytes(state) >= LARGE_STATE
        if large:
            return_large_blocks()
        try:
            pieces = iter(feed)
            for t in range(start, stop):
                if large:
                    _freed(pending)
                state, info = self._compiled_round(t, state, pieces)
                # Stay only one round ahead of the device, to bound memory and to react to Ctrl-C.
                jax.block_until_ready(pending)
                pending = info
                yield RoundResult(t + 1, state, info)
        finally:
            feed.close()

    def _compiled_round(self, t: int, state, pieces):
        """Starts a round. The first one of a program may trace and compile it."""
        program = self.program(self.at(t), t)
        if program in self.compiled:
            return self._round(t, state, pieces)
        with CollectorPaused():
            program.ahead.wait()
            return_freed_memory()  # of `init`, of tracing and compiling, and of what was timed
            result = self._round(t, state, pieces)
        return_freed_memory()
        self.compiled.add(program)
        return result

    def _round(self, t: int, state, pieces):
        algorithm = self.at(t)
        program = self.program(algorithm, t)
        run = functools.partial(program.run, given=self.given(program, t))
        piece = self._next(pieces, program)
        drawn = piece.drawn
        long = LongRound(piece.round, self.long(algorithm))
        if long.chunks:
            self.under_way.append(long)
            program.after_chunk = self._chunk_done
        if piece.last:
            state, info, kept = run(program.whole, state, drawn, piece.clients)
            self.memory.take(t + 1, piece, kept)
            return state, info | piece.lost
        long.clients = piece.cohort
        self.on_progress(long.progress())
        broadcasts, errors = run(program.begin, state, drawn)
        carry, reports = run(program.empty, broadcasts, piece.clients, state.aggregation), []
        while True:
            carry, more, kept = run(
                program.accumulate, carry, broadcasts, piece.clients, state.aggregation
            )
            reports.append(more)
            self.memory.take(t + 1, piece, kept)
            jax.block_until_ready(carry.rejected)  # only one chunk in memory
            long.clients_done = piece.fed
            self.on_progress(long.progress())
            if piece.last:
                state, info = run(program.finish, state, drawn, broadcasts, errors, carry, reports)
                return state, info | piece.lost
            piece = self._next(pieces, program)

    def _next(self, pieces, program: Round):
        begun = time.perf_counter()
        piece = next(pieces)
        self.waited += time.perf_counter() - begun
        self.byte_counter.read(piece)
        piece = self.memory.fed(piece)
        drawn, clients = program.joined(piece.drawn, piece.clients)
        return piece._replace(drawn=drawn, clients=clients)


def _natively(problem: Problem, algorithm: Algorithm, threads: int) -> tuple[Problem, Algorithm]:
    """With PyTorch's gradients."""
    origin = algorithm.own_origin()
    assert origin is not None  # native.refused
    problem = native.natively(problem, threads)
    return problem, origin.of(problem)


def _own(a) -> jax.Array:
    """An own copy, if it is more than a shape."""
    if not isinstance(a, jax.Array) or a.weak_type:
        return jax.numpy.array(a, jax.numpy.asarray(a).dtype, copy=True)
    return a if isinstance(a, jax.core.Tracer) else jax.device_put(a, may_alias=False)


def _freed(result) -> None:
    """Waits until a round is done and has freed its memory. The next one gets its own when it is
    dispatched, even if it has to wait; and JAX frees shortly after it returns a result."""
    if result is not None:
        jax.block_until_ready(result)
        time.sleep(PAUSE)
