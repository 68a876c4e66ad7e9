"""The gradients of all terms at one model, and how much they scatter.

They are measured by an `Algorithm` that takes no step. The clients of a cohort compute the
gradients of their batches at x, the server computes those of its own, and only sums leave the
clients, as in training. So it runs wherever training does: in chunks, on several devices, from a
store.

For a population, the gradient of a batch of n examples on client i is taken as
grad f_f + (what is special about client i) + noise, with variances sigma_f^2 and v / n. The data of
a client counts as a sample: clients that draw from one distribution have sigma_f = 0, as in the
paper's Assumption 1, however few examples they hold.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms.contract import Algorithm, Batches, Draw, Feed
from mixfl.algorithms.origin import Origin
from mixfl.algorithms.steps import (
    add,
    central_batch,
    central_batches,
    chunked_gradient,
    gradient,
    scale,
    zeros,
)  # fmt: skip
from mixfl.engine import RoundResult, Simulator
from mixfl.engine.round import State as EngineState
from mixfl.errors import MixflError
from mixfl.measure.dissimilarity import dissimilarity, norm2
from mixfl.problem import Central, Params, Problem
from mixfl.settings import SENT_EXACTLY, Settings


class State(NamedTuple):
    x: Params
    basis: Any = None  # vectors [r, ...] that gradients are also projected on
    threshold: Any = None  # divides clients in two: those with more than this, and the others


class Probe(NamedTuple):
    """What clients get."""

    x: Params
    basis: Any
    threshold: Any


class Scatter(NamedTuple):
    """Sums over clients. For a central term, over its batches, as if they were one client's."""

    mean: Params  # of their mean gradients
    square: Any  # of ||mean gradient||^2
    within: Any  # of n ||gradient of a batch of n - the client's mean||^2
    spare: Any  # of batches - 1
    inverse: Any  # of 1 / (examples used)
    clients: Any
    point: Any  # as `mean`, in coordinates of the basis: [r]
    outer: Any  # as `square`: [r, r]
    outer_within: Any  # as `within`
    upper: Any = None  # as `mean` and `clients`, of the clients above the threshold


def scatter(gradients, x, batches: Batches, basis) -> Scatter:
    """One client's Scatter: of `gradients(batch)` over its batches."""

    def one(total, batch):
        n = jnp.sum(batch.mask)
        g = jax.tree.map(lambda a: jnp.where(n > 0, a, 0), gradients(batch))
        return add(total, scale(n, g)), (n, n * norm2(g), coordinates(basis, g))

    total, (n, squares, points) = jax.lax.scan(one, zeros(x), batches)
    examples, present = jnp.sum(n), jnp.any(n > 0).astype(jnp.float32)
    mean = scale(1 / jnp.maximum(examples, 1), total)
    center = coordinates(basis, mean)
    off = points - center
    return Scatter(
        mean, norm2(mean), jnp.sum(squares) - examples * norm2(mean),
        jnp.maximum(jnp.sum(n > 0) - 1.0, 0), present / jnp.maximum(examples, 1), present,
        center, jnp.outer(center, center), (off * n[:, None]).T @ off,
    )  # fmt: skip


def coordinates(basis, g):
    """[r], or empty without a basis."""
    if basis is None:
        return jnp.zeros(0)
    products = jax.tree.map(lambda v, a: v.reshape(len(v), -1) @ a.reshape(-1), basis, g)
    return sum(jax.tree.leaves(products))


def gradients(
    problem: Problem, s: Settings, batches: int, divided_by: str | None = None, step: float = 0.0
) -> Algorithm:
    """`info["terms"]` has a Scatter for each term. `divided_by` is a column. Then, with a `step`,
    goes that far along the mean gradients of all terms."""

    def client(term, probe, feed):
        x, basis, threshold = probe
        scattered = scatter(lambda b: gradient(term, x, b)[1], x, feed.batches, basis)
        if divided_by is None or divided_by not in feed.batches.data:
            return scattered
        more = (column_mean(feed.batches, divided_by) > threshold).astype(jnp.float32)
        return scattered._replace(upper=scale(more, (scattered.mean, scattered.clients)))

    def central(state, drawn):
        return [
            scatter(
                lambda b, term=term: chunked_gradient(term, state.x, b)[1], state.x, batches,
                state.basis,
            )
            for term, batches in zip(problem.central, central_batches(problem, drawn), strict=True)
        ]  # fmt: skip

    def update(state, broadcasts, sums, central):
        of_clients, of_server = iter(sums), iter(central)
        scatters = [
            next(of_server) if isinstance(t, Central) else next(of_clients) for t in problem.terms
        ]
        means = [scale(1 / jnp.maximum(p.clients, 1), p.mean) for p in scatters]
        g2, b2 = dissimilarity(means, [t.weight for t in problem.terms])
        if step:
            mixed = functools.reduce(add, means)
            state = state._replace(x=jax.tree.map(lambda x, g: x - step * g, state.x, mixed))
        return state, {"terms": scatters, "g2": g2, "b2": b2}

    return Algorithm(
        init=State,
        broadcast=lambda state, drawn: [
            Probe(state.x, state.basis, state.threshold) for _ in problem.populations
        ],
        client=client, summand=lambda scattered: scattered, central=central, update=update,
        feed=Feed(
            clients=bool(problem.populations),
            draw=tuple(
                Draw(batches, central_batch(t, s, s.cohort_size * s.client_batch))
                if isinstance(t, Central) else None
                for t in problem.terms
            ),
        ),
    )  # fmt: skip


def column_mean(batches: Batches, column: str):
    """The mean over a client's examples, for batches [..., steps, n, ...]: [...]."""
    values = jnp.asarray(batches.data[column], jnp.float32).reshape(*batches.mask.shape, -1)
    total = jnp.sum(values.mean(-1) * batches.mask, axis=(-2, -1))
    return total / jnp.maximum(jnp.sum(batches.mask, axis=(-2, -1)), 1)


class Term(NamedTuple):
    """A term, estimated from one cohort or one set of central batches. The estimates are unbiased,
    so small variances may come out below 0."""

    gradient: np.ndarray  # mean, flat
    v: float  # variance of one example's gradient (sigma^2 = v / |B_i|, sigma_c^2 = v / |B_c|)
    between: float  # sigma_f^2; 0 for a central term
    v_matrix: np.ndarray  # the two above in coordinates of the basis: [r, r]
    between_matrix: np.ndarray
    upper: np.ndarray | None = None  # mean gradient of the clients above the threshold
    share: float = 0.0  # of the clients


class Measured(NamedTuple):
    g2: float
    b2: float
    terms: list[Term]


class Gradients:
    """Measures a problem at any model and round. Each client, and each central term, computes the
    gradients of `batches` batches; variances need two."""

    def __init__(
        self, problem: Problem, s: Settings, batches: int = 1, divided_by=None, step: float = 0.0
    ):
        problem = self.problem = problem.with_equal_populations()
        if problem.state is not None:
            raise MixflError(
                "the gradients of a problem with a state are not measured: its losses depend on "
                "the batches before. Leave out measure, or the state."
            )
        s = dataclasses.replace(
            s.at(0),
            local_steps=batches,
            tables="dense",
            first_layer="plain",
            client_opt="sgd",
            compute="float32",
            clip="off",
            aggregation="mean",
            **SENT_EXACTLY,
            local_epochs=None,
            drop_rate=0,
            late_rate=0,
            min_speed=1,
        )
        make = functools.partial(gradients, batches=batches, divided_by=divided_by, step=step)
        self.algorithm = make(problem, s)
        if problem.all_frozen:  # they are arguments of programs that build the algorithm
            origin = Origin(make, problem, s, self.algorithm[:-1])
            self.algorithm = self.algorithm._replace(origin=origin)
        self.simulator = Simulator(problem, self.algorithm, s)
        self.aggregation = tuple(() for _ in problem.populations)  # none: only sums are formed

    def at(self, x: Params, round: int, basis=None, threshold=0.0) -> Measured:
        """Measures with the cohort and the batches of the given round."""
        info = self._result(State(x, basis, threshold), round).info
        terms = [
            self._estimates(j, jax.tree.map(lambda a: np.asarray(a, np.float64), sums))
            for j, sums in enumerate(info["terms"])
        ]
        return Measured(float(info["g2"]), float(info["b2"]), terms)

    def dissimilarity(self, x: Params, round: int) -> tuple[float, float]:
        """G~^2 and B~^2."""
        info = self._result(State(x), round).info
        return float(info["g2"]), float(info["b2"])

    def stepped(self, x: Params, round: int) -> tuple[float, float, Params]:
        """G~^2 and B~^2 at x, and the model after the step."""
        result = self._result(State(x), round)
        return float(result.info["g2"]), float(result.info["b2"]), result.state.x

    def _result(self, state: State, round: int) -> RoundResult:
        own = jax.tree.map(lambda a: jnp.array(a, copy=True), state)  # a round consumes its state
        (result,) = self.simulator.rounds(EngineState(own, self.aggregation), round, round + 1)
        return result

    def _estimates(self, j: int, sums: Scatter) -> Term:
        term, draw = self.problem.terms[j], self.algorithm.feed.draw[j]
        clients, spare = max(sums.clients, 1.0), max(sums.spare, 1.0)
        mean, point = flat(sums.mean) / clients, sums.point / clients
        v, v_matrix = sums.within / spare, sums.outer_within / spare
        if draw is not None:  # a central term
            # Batches are drawn without replacement: a batch of all examples has no noise.
            n = len(term.examples) if term.examples is not None else draw.batch
            left = 1 - draw.batch / n
            factor = 1 / left if left > 0 else 0.0
            return Term(mean, factor * v, 0.0, factor * v_matrix, 0 * v_matrix)
        others, noise = max(clients - 1, 1.0), sums.inverse / clients
        between = (sums.square - clients * (mean @ mean)) / others - v * noise
        matrix = (sums.outer - clients * np.outer(point, point)) / others - v_matrix * noise
        estimates = Term(mean, v, between if clients > 1 else 0.0, v_matrix, matrix)
        if sums.upper is None:
            return estimates
        upper, count = sums.upper
        return estimates._replace(upper=flat(upper) / max(count, 1.0), share=count / clients)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
