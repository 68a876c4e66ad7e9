"""What a round holds in memory: predicted from shapes, before anything runs.

A device holds the state, which a round overwrites in place, frozen arrays, and the largest of three
phases:

    broadcast   what the server computes for it (1wgt: a gradient), and the activations of a chunk
    clients     the broadcast, the sums; a client's model, optimizer state, gradient, activations
    server      the sums, what the central steps return, a gradient and the activations of a chunk

A client whose steps are written out in the program holds one model more: that of the step before.
So does the server if it takes several.

Activations are what XLA needs for a gradient beside its result: the gradient alone is compiled for
it. Forms (rows, low-rank) hold less, and so do adaptive client optimizers with few steps: then this
is an upper bound. docs/scaling.md compares it with measurements.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from mixfl.algorithms.contract import Batches
from mixfl.algorithms.loops import once_traced
from mixfl.algorithms.steps import gradient, with_drift, written_out
from mixfl.engine.auto import clients_at_once, native_group
from mixfl.engine.simulator import Simulator
from mixfl.frozen import frozen_arrays, with_arrays
from mixfl.optimizers import make
from mixfl.problem import Term
from mixfl.trees import tree_bytes

PIECES = 4  # of data: in use, two read ahead, one being read


class Memory(NamedTuple):
    """In bytes. All but `data` is per device."""

    model: int
    state: int
    broadcast: int
    clients: int
    server: int
    data: int
    devices: int  # of this process
    frozen: int = 0

    @property
    def device(self) -> int:
        return self.state + self.frozen + max(self.broadcast, self.clients, self.server)

    @property
    def total(self) -> int:
        return self.devices * self.device + self.data


def predicted_bytes(simulator: Simulator) -> Memory:
    """The memory of a round, the first one."""
    problem, algorithm, state = simulator.problem, simulator.at(0), simulator.shapes()
    piece = next(simulator.feeder.pieces(algorithm, 0))
    broadcasts = jax.eval_shape(algorithm.broadcast, state.algorithm, piece.drawn)
    sent = new_bytes(algorithm.broadcast, state.algorithm, piece.drawn)
    central = tree_bytes(jax.eval_shape(algorithm.central, state.algorithm, piece.drawn))
    devices = simulator.devices // jax.process_count()
    batches = [
        server_step(term, state.x, drawn, devices)
        for term, drawn in zip(problem.terms, piece.drawn, strict=True)
        if drawn is not None
    ]
    step = max(batches, default=0)
    sums, clients = 0, 0
    if piece.clients:
        program = simulator.program(algorithm)
        given = simulator.given(program)
        sums = tree_bytes(program.of_sums(broadcasts, piece.clients, state.aggregation, given))
        clients = sums + sent + max(
            client(simulator, devices, term, broadcast, feeds)
            for term, broadcast, sizes in zip(
                problem.populations, broadcasts, piece.clients, strict=True
            )
            for feeds in sizes
        )  # fmt: skip
    return Memory(
        model=tree_bytes(state.x),
        state=tree_bytes(state),
        broadcast=0 if central else step,
        clients=clients,
        server=sent + sums + central + step if central else 0,
        data=PIECES * tree_bytes((piece.drawn, piece.clients)),
        devices=devices,
        frozen=tree_bytes(problem.frozen_arrays()),
    )


def client(simulator: Simulator, devices: int, term: Term, broadcast: Any, feeds: Any) -> int:
    """Of the clients of one size that train at once on a device."""
    s, x = simulator.s.of(term).at(0), broadcast.x
    count, steps, _ = feeds.batches.mask.shape
    forms = simulator.forms.at(simulator.at(0)).sized(term.name, feeds.batches.mask.shape[1:])
    if simulator.loops == "pytorch":
        at_once = -(-native_group(devices, count, x) // devices)
    else:
        at_once = clients_at_once(simulator.platform, count // devices, x, forms)
    opt = tree_bytes(jax.eval_shape(make(s.client_opt, s.client_lr).init, x))
    drift = tree_bytes(jax.eval_shape(lambda b: with_drift(s, b).drift, broadcast))
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), feeds.batches)
    of_step = once_traced(lambda x, batch: gradient(term, x, batch), x, one).operations
    out = written_out(steps, x, of_step)
    # Rewritten products (forms/rewriting.py) form gradients that would be fused with the step; not
    # in a loop of plain steps on the client's own loss, which has one gradient only.
    formed = out or opt or broadcast.aug is not None
    rewritten = simulator.platform == "cpu" and s.convolutions != "plain"
    models = (1 + (steps > 1 and out) + bool(rewritten and formed)) * tree_bytes(x)
    return drift + at_once * (models + opt + gradient_bytes(term, x, one))


def server_step(term: Term, x: Any, drawn: Any, devices: int) -> int:
    """Of the gradient of a chunk, of which each device has its part."""
    if drawn.data is None:
        return gradient_bytes(term, x, Batches(None, jax.ShapeDtypeStruct((1,), jnp.float32)))
    steps, chunks, chunk = drawn.mask.shape
    part = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((chunk // devices, *a.shape[3:]), a.dtype),
        Batches(drawn.data, drawn.mask),
    )
    more = (steps > 1) + (chunks > 1)  # the model before, the sum of the chunks' gradients
    return more * tree_bytes(x) + gradient_bytes(term, x, part)


def gradient_bytes(term: Term, x: Any, batch: Batches) -> int:
    """A gradient and its activations, as XLA counts them."""
    frozen = frozen_arrays(term)
    of = jax.jit(lambda f, x, b: gradient(with_arrays(term, f), x, b))
    compiled = of.lower(frozen, x, batch).compile()
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def new_bytes(function, *shapes) -> int:
    """Of what the function returns, without arrays that it was given."""
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    given = set(jaxpr.invars)
    made = {v for v in jaxpr.outvars if not isinstance(v, Literal)} - given
    return sum(tree_bytes(v.aval) for v in made)
