"""One compiled program per round: the sums over the clients of each population (summing.py), and
the work at the server.

The learning rates and the frozen arrays are arguments of the program: it builds the algorithm with
them (algorithms/origin.py). Runs that differ in rates share it (programs.py).

If there are several devices, each sums over its part of the cohort, and the sums are added up.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mixfl.aggregation import Chain
from mixfl.aggregation.download import Down, Download
from mixfl.algorithms.contract import AfterChunk, Algorithm, ClientFeed, Sums
from mixfl.algorithms.origin import OF_A_RUN, Origin, traced_settings
from mixfl.algorithms.steps import add
from mixfl.engine import processes
from mixfl.engine.ahead import Ahead
from mixfl.engine.auto import Forms
from mixfl.engine.dispatch import Dispatched
from mixfl.engine.ordered import after
from mixfl.engine.summing import Population, Summed, finite
from mixfl.errors import MixflError
from mixfl.forms.products import most_layers
from mixfl.forms.rewriting import with_fast_products
from mixfl.problem import Problem
from mixfl.settings import RATES, Settings

AXIS = "clients"
# Each convolution is computed in loops over blocks of a batch. XLA goes through all loops again and
# again, as long as it finds something to move out of one or to leave out. With many it takes a
# sixth of the time to compile a ResNet, and changes nothing that can be measured.
MANY_LAYERS = 8
SOONER = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion,simplify-while-loops"}
DRAWN, CLIENTS = P(None, None, AXIS), P(AXIS)  # the axis that is split over devices


class State(NamedTuple):
    """What the next round needs."""

    algorithm: Any
    aggregation: tuple = ()  # per population, the state of its aggregation
    download: tuple = ()  # per population, what its messages have lost (aggregation/download.py)

    @property
    def x(self):
        return self.algorithm.x


class Carry(NamedTuple):
    """What is summed over clients."""

    sums: tuple  # per population
    rejected: Any  # clients left out because their update was not finite
    counts: dict[str, Any]  # what the aggregation counted


def delayed(before: Summed, feeds: ClientFeed) -> ClientFeed:
    """Clients whose training begins after others have ended."""
    mask = after(before, feeds.batches.mask)
    return feeds._replace(batches=feeds.batches._replace(mask=mask))


def needs_number(error: Exception) -> MixflError:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return MixflError(
        "a learning rate is a schedule, so a round must be compiled for all rates, and that failed "
        f"({lines[0]}): an optimizer or the algorithm may need a rate's value. Pass the rate on to "
        "optax as it is, without float() or if."
    )


class Given(NamedTuple):
    """What a program takes besides the state and the data."""

    rates: dict[str, Any]
    frozen: list[Any]  # problem.frozen_arrays()


class Round:
    """The programs of one algorithm: `whole` for a round in one piece, and its three parts.

    Their last argument is a Given; without rates, those of `algorithm` are constants. `origin` is
    that of the run's algorithm, of which `algorithm` is the one at round `at`.

    `long`: `after_chunk` is called from the running program after each chunk of the batches drawn
    at the server. JAX's cache on disk does not keep such a program.

    `host`: the loops run on the host (dispatch.py). `native`: PyTorch computes the gradients, in
    as many threads as there are devices. `may_be_empty`: a cohort may have no clients.
    """

    def __init__(
        self, algorithm: Algorithm, problem: Problem, s: Settings, aggregation: Chain,
        forms: Forms, devices: int = 1, long: bool = False, origin: Origin | None = None,
        at: int = 0, host: bool = False, platform: str = "cpu", may_be_empty: bool = False,
        native: bool = False,
    ):  # fmt: skip
        self.may_be_empty = may_be_empty
        self.threads = devices if native else None
        self.algorithm, self.problem, self.settings = algorithm, problem, s
        self.aggregation, self.forms, self.platform = aggregation, forms, platform
        self.download = Download(s)
        self.origin, self.at, self.host = origin, at, host
        self.long = AfterChunk(lambda: self.after_chunk()) if long else None
        self.after_chunk: Callable[[], None] = lambda: None
        self.traces = 0
        self.traced: Any = None  # `whole`, if it was traced but not compiled yet
        self.ahead = Ahead()
        self.constant = origin is None  # the rates are constants
        self.works = False  # a round has run with rates as arguments
        self.noted: set[str] = set()  # keys of the run that it depends on
        self.shapes: Any = None  # of the sums
        shared = devices > 1 and not native
        self.mesh = Mesh(np.array(processes.devices(devices)), (AXIS,)) if shared else None
        self.whole = self._jit(self._whole, (None, DRAWN, CLIENTS, None), donate=0)
        self.begin = self._jit(self._begin, (None, DRAWN, None))
        self.accumulate = self._jit(self._accumulate, (None, None, CLIENTS, None, None), donate=0)
        self.finish = self._jit(self._finish, (None, DRAWN, None, None, None, None, None), donate=0)

    def _jit(self, function, specs, donate=None):
        products = self.settings.convolutions != "plain" and self.threads is None
        if self.platform == "cpu" and products:
            function = with_fast_products(function)
        if self.host:
            return Dispatched(function)
        shardings = {}
        if self.mesh is not None:
            shardings["in_shardings"] = tuple(NamedSharding(self.mesh, s or P()) for s in specs)
            shardings["out_shardings"] = NamedSharding(self.mesh, P())
        donated = () if donate is None else (donate,)
        many = self.platform == "cpu" and most_layers(self.problem) >= MANY_LAYERS
        options = SOONER if many else None
        return jax.jit(function, donate_argnums=donated, compiler_options=options, **shardings)

    def run(self, program: Callable, *arguments, given: Given):
        """Runs one of the programs. If the first one can't be traced because something needs a
        rate's value, the rates become constants."""
        self.ahead.wait()
        without = given._replace(rates={})
        if self.constant:
            return program(*arguments, without)
        try:
            result = program(*arguments, given)
        except (MixflError, TypeError, ValueError) as error:
            if self.works:
                raise
            if self.origin is not None and self.origin.at is not None:
                raise needs_number(error) from error
            self.constant = True
            self.noted.update(OF_A_RUN, RATES)
            return program(*arguments, without)
        self.works = self.works or program in (self.whole, self.finish)
        return result

    def _built(self, given: Given | None) -> tuple[Problem, Algorithm, Settings]:
        """The problem, the algorithm and the settings with these rates and frozen arrays."""
        if given is None or not any(given):
            return self.problem, self.algorithm, self.settings
        rates, problem = given.rates, self.problem.with_frozen(given.frozen)
        if self.origin is None:  # it keeps the arrays that it was built with
            return problem, self.algorithm, self.settings
        own = self.origin.problem
        own = problem if own is self.problem else own.with_frozen(given.frozen)
        settings = [
            traced_settings(s, rates, self.noted) if rates else s
            for s in (self.origin.settings, self.settings)
        ]
        return problem, self.origin.again(own, settings[0]).at(self.at), settings[1]

    def _whole(self, state, drawn, clients, given=None):
        self.traces += 1
        broadcasts, errors = self._begin(state, drawn, given)
        carry, reports, kept = self._sum(broadcasts, clients, state.aggregation, given)
        after, info = self._finish(state, drawn, broadcasts, errors, carry, [reports], given)
        return after, info, kept

    def jaxpr(self, state, piece: Any, given: Given):
        """The operations of a round, from a state's shapes and a piece of its data."""
        arguments = state, piece.drawn, piece.clients, given
        if not piece.last or self.host:  # `whole` is not a program
            before = self.traces
            jaxpr = jax.make_jaxpr(self._whole)(*arguments)
            self.traces = before
            return jaxpr
        if self.mesh is not None:  # as it will be called, so that nothing is traced again
            everywhere = NamedSharding(self.mesh, P())
            shape = jax.ShapeDtypeStruct
            state = jax.tree.map(lambda a: shape(a.shape, a.dtype, sharding=everywhere), state)
        self.traced = self.whole.trace(state, *arguments[1:])
        return self.traced.jaxpr

    def compile_ahead(self) -> None:
        """Begins to compile `whole`, if it was traced (`jaxpr`)."""
        if self.traced is not None and not self.works:
            self.ahead.start(self.traced)
        self.traced = None

    def _begin(self, state, drawn, given=None):
        """What clients get, and what that has lost."""
        with self._shared():
            messages = self._built(given)[1].broadcast(state.algorithm, self._told(drawn))
        if not self.algorithm.feed.clients:
            return messages, state.download
        down: Down = self.download.sent(state.download, messages)
        return down.broadcasts, down.errors

    def _accumulate(self, carry, broadcasts, clients, aggregation, given=None):
        """Adds a chunk of the cohort to the sums; also returns the reports of its clients, and what
        they keep."""
        self.traces += 1
        more, reports, kept = self._sum(broadcasts, clients, aggregation, given)
        return add(carry, more), reports, kept

    def _finish(self, state, drawn, broadcasts, errors, carry, reports, given=None):
        """`reports` has, per chunk and population, the reports of the clients."""
        _, algorithm, _ = self._built(given)
        with self._shared():
            central = algorithm.central(state.algorithm, self._told(self._later(drawn, carry)))
        clients = self.algorithm.feed.clients
        released = list(
            map(self.aggregation.release, state.aggregation if clients else (), carry.sums)
        )
        sums = tuple(sums for sums, _ in released)
        after, info = algorithm.update(state.algorithm, broadcasts, sums, central)
        info = {**info, **carry.counts, "clients/rejected": carry.rejected}
        info = {**self.aggregation.published(info, self.problem), "finite": finite(after)}
        if not clients:
            return state._replace(algorithm=after), info
        aggregation = [
            self.aggregation.next(before, jax.tree.map(lambda *a: jnp.concatenate(a), *chunks))
            for (_, before), *chunks in zip(released, *reports, strict=True)
        ]
        new = State(after, tuple(aggregation), errors)
        return self._unless_empty(state, new, carry.sums, info)

    def _unless_empty(self, before: State, after: State, sums, info):
        """The next state. A round in which a population's sums have no weight is skipped. Not if
        clients are private: that nobody came must not show, so the round has its noise alone."""
        if (
            self.aggregation.private
            or not self.may_be_empty
            or not all(isinstance(s, Sums) for s in sums)
        ):
            return after, info
        empty = jnp.any(jnp.stack([s.weight <= 0 for s in sums]))
        after = jax.tree.map(lambda old, new: jnp.where(empty, old, new), before, after)
        return after, {**info, "rounds/skipped": empty.astype(jnp.int32)}

    def _shared(self):
        """Here, the devices share batches: see forms/blocks.py."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def _later(self, drawn, carry: Carry):
        """The batches, but not before the sums over the clients are there."""
        if self.mesh is None or not self.algorithm.feed.clients:
            return drawn
        return [d and d._replace(mask=after(carry, d.mask)) for d in drawn]

    def _told(self, drawn):
        return [d and d._replace(after_chunk=self.long) for d in drawn]

    def empty(self, broadcasts, clients, aggregation, given=None) -> Carry:
        if self.shapes is None:
            self.shapes = self.of_sums(broadcasts, clients, aggregation, given)
        return self.place(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self.shapes))

    def of_sums(self, *arguments) -> Any:
        """The shapes of the sums. The arguments are those of `empty`, or their shapes."""
        return jax.eval_shape(self._sum, *arguments)[0]

    def place(self, tree):
        """Puts a tree where the programs leave their results, so JAX need not compile again."""
        if self.mesh is None:
            return tree
        if jax.process_count() > 1:
            return self._joined(P(), jax.tree.map(np.asarray, tree))
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def joined(self, drawn, clients):
        """Joins what each process has read into arrays that are split over the processes."""
        if jax.process_count() == 1:
            return drawn, clients
        return self._joined(DRAWN, drawn), self._joined(CLIENTS, clients)

    def _joined(self, spec, tree):
        sharding = NamedSharding(self.mesh, spec)  # type: ignore[arg-type]
        return jax.tree.map(
            lambda part: jax.make_array_from_process_local_data(sharding, part), tree
        )

    def _sum(self, broadcasts, clients, aggregation, given=None) -> tuple[Carry, tuple, tuple]:
        """Sums over the cohort (or a chunk of it) of every population, its clients' reports, and
        what they keep."""
        if self.mesh is not None and clients:

            def shard(broadcasts, clients, aggregation, given):
                carry, *rest = self._sum_all(broadcasts, clients, aggregation, given)
                return jax.lax.psum(carry, AXIS), *rest

            return jax.shard_map(
                shard, mesh=self.mesh, in_specs=(P(), P(AXIS), P(), P()), out_specs=P(),
                check_vma=False,
            )(broadcasts, clients, aggregation, given)  # fmt: skip
        return self._sum_all(broadcasts, clients, aggregation, given)

    def _sum_all(self, broadcasts, clients, aggregation, given) -> tuple[Carry, tuple, tuple]:
        if not clients:
            return Carry((), jnp.int32(0), {}), (), ()
        problem, algorithm, s = self._built(given)
        summed: list[Summed] = []
        for term, broadcast, sizes, state in zip(
            problem.populations, broadcasts, clients, aggregation, strict=True
        ):
            if self.mesh is not None and summed:
                sizes = [delayed(summed[-1], feeds) for feeds in sizes]
            summed.append(self._summed(algorithm, s, term, broadcast, sizes, state))
        rejected = sum(s.rejected for s in summed)
        counts = add(*(s.counts for s in summed))
        carry = Carry(tuple(s.sums for s in summed), rejected, counts)
        return carry, tuple(s.reports for s in summed), tuple(s.states for s in summed)

    def _summed(self, algorithm, s, term, broadcast, sizes, state) -> Summed:
        forms = self.forms.at(algorithm)
        population = Population(
            algorithm, s.of(term), self.aggregation,
            [forms.sized(term.name, feeds.batches.mask.shape[1:]) for feeds in sizes],
            AXIS if self.mesh is not None else None, self.platform, self.threads,
        )  # fmt: skip
        if s.aggregation != "mean":
            (feeds,) = sizes
            return population.compared(term, broadcast, feeds, state)
        return population.sum(term, broadcast, sizes, state)
