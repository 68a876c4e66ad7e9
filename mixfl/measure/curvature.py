"""The curvature of the terms' losses: Hessian-vector products on a fixed sample of the data.

Products use reverse-mode differentiation twice, because losses may have custom derivatives without
a forward mode. Vectors are flat.
"""

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mixfl.algorithms.contract import Batches
from mixfl.algorithms.steps import central_batches
from mixfl.engine import Simulator
from mixfl.problem import Params, Problem

EXAMPLES, CHUNK = 1024, 128  # examples of a term in a sample (about), and in one product
ITERATIONS, RESIDUAL = 20, 0.003


class Sample(NamedTuple):
    data: Any  # dict of arrays [chunks, chunk, ...]; None for a loss without data
    weights: Any  # [chunks, chunk], adding up to 1


def sample(batches: Batches) -> Sample:
    """A sample from batches [clients, steps, n, ...], with enough steps for EXAMPLES examples. Its
    weights give the mean over clients of the means over their examples."""
    if batches.data is None:
        return Sample(None, np.ones((1, 1), np.float32))
    clients, steps, n = batches.mask.shape
    used = int(np.clip(EXAMPLES // max(clients * n, 1), 1, steps))
    mask = np.asarray(batches.mask[:, :used], np.float64).reshape(clients, -1)
    counts = mask.sum(1, keepdims=True)
    weights = (mask / np.maximum(counts, 1) / max((counts > 0).sum(), 1)).reshape(-1)
    chunks = -(-len(weights) // CHUNK)
    missing = chunks * CHUNK - len(weights) if chunks > 1 else 0

    def cut(a):
        a = np.concatenate([a, np.repeat(a[:1], missing, 0)])
        return a.reshape(chunks, -1, *a.shape[1:])

    data = jax.tree.map(
        lambda a: cut(np.asarray(a[:, :used]).reshape(-1, *a.shape[3:])), batches.data
    )
    padded = np.concatenate([weights, np.zeros(missing)]).astype(np.float32)
    return Sample(data, padded.reshape(chunks, -1))


class Curvature:
    """The terms of a problem on a sample: the batches that `simulator` reads for a round."""

    def __init__(self, problem: Problem, simulator: Simulator, round: int):
        self.problem, self.simulator, self.frozen = problem, simulator, problem.frozen_arrays()
        shapes = jax.eval_shape(problem.init, jax.random.key(0))
        _, self.unravel = ravel_pytree(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes))
        self._loss = jax.jit(self._loss_in, static_argnums=0)
        self._product = jax.jit(self._product_in, static_argnums=0)
        self.samples = self._read(round)

    def of_round(self, round: int) -> "Curvature":
        """The same on another round's sample, without compiling again."""
        other = copy.copy(self)
        other.samples = self._read(round)
        return other

    def _read(self, round: int) -> list[Sample]:
        problem, feeder = self.problem, self.simulator.feeder.whole().of_one_size()
        pieces = list(feeder.pieces(self.simulator.at(round), round))
        joined = [
            jax.tree.map(
                lambda *parts: np.concatenate(parts), *(p.clients[j][0].batches for p in pieces)
            )
            for j in range(len(problem.populations))
        ]
        # A central term's batches, as those of one client: [1, steps, chunks x chunk, ...]
        server = [
            Batches(
                jax.tree.map(lambda a: a.reshape(1, len(a), -1, *a.shape[3:]), b.data),
                np.asarray(b.mask).reshape(1, len(b.mask), -1),
            )
            for b in central_batches(problem, pieces[0].drawn)
        ]
        of_clients, of_server = iter(joined), iter(server)
        return jax.device_put([
            sample(next(of_clients if t in problem.populations else of_server))
            for t in problem.terms
        ])  # fmt: skip

    def _loss_of(self, term, x, data, weights):
        x = self.unravel(x)
        if data is None:
            return term.weight * jnp.sum(weights) * term.loss(x)
        return term.weight * jnp.sum(weights * jnp.where(weights > 0, term.loss(x, data), 0))

    def _loss_in(self, j, i, x, sample, frozen):
        """Of chunk i of term j's sample."""
        term = self.problem.with_frozen(frozen).terms[j]
        return self._loss_of(term, x, *jax.tree.map(lambda a: a[i], sample))

    def _product_in(self, j, i, x, v, sample, frozen):
        """[parameters]: the gradient there if v is None, otherwise the product with v."""
        grad = jax.grad(lambda x: self._loss_in(j, i, x, sample, frozen))
        return grad(x) if v is None else jax.grad(lambda x: jnp.vdot(grad(x), v))(x)

    def _sum(self, compiled, j: int, *arguments):
        """Over the chunks of term j's sample. Not in a compiled loop: on CPUs, XLA's convolutions
        are several times slower in one."""
        sample = self.samples[j]
        chunks = range(len(sample.weights))
        return sum(compiled(j, i, *arguments, sample, self.frozen) for i in chunks)

    def flat(self, x: Params) -> jax.Array:
        return ravel_pytree(x)[0]

    def losses(self, x) -> np.ndarray:
        """[terms]"""
        every = [self._sum(self._loss, j, x) for j in range(len(self.problem.terms))]
        return np.asarray(every, np.float64)

    def gradients(self, x) -> jax.Array:
        return self.products(x, None)

    def products(self, x, v) -> jax.Array:
        """[terms, parameters]: H_j v, or the gradients if v is None."""
        return jnp.stack([self._one(j, x, v) for j in range(len(self.problem.terms))])

    def _one(self, j: int, x, v) -> jax.Array:
        return self._sum(self._product, j, x, v)

    def smoothness(self, x, seed: int = 0) -> np.ndarray:
        """The largest |eigenvalue| of each term's Hessian and, last, of their sum."""
        start = jax.random.normal(jax.random.key(seed), x.shape)
        each = [
            lanczos(lambda v, j=j: self._one(j, x, v), start)
            for j in range(len(self.problem.terms))
        ]
        return np.array([*each, lanczos(lambda v: self.products(x, v).sum(0), start)])


def lanczos(product, start, iterations: int = ITERATIONS, residual: float = RESIDUAL) -> float:
    """The largest |eigenvalue| of a symmetric matrix. Extreme eigenvalues converge first. Loss of
    orthogonality only duplicates some of them, so it is harmless here. Stops when the residual
    |H v - value v| is that small a part of the value: an eigenvalue is then no further off, and
    usually as near as the square of it."""
    iterations = min(iterations, start.size)
    q, before, beta = start / jnp.linalg.norm(start), jnp.zeros_like(start), 0.0
    alphas: list[float] = []
    betas: list[float] = []
    for _ in range(iterations):
        w = product(q) - beta * before
        alpha = float(jnp.vdot(q, w))
        w = w - alpha * q
        beta = float(jnp.linalg.norm(w))
        alphas.append(alpha)
        if beta <= 1e-6 * max(map(abs, alphas)) or not np.isfinite(beta):
            break
        value, last = ritz(alphas, betas)
        if beta * last <= residual * value:
            break
        betas.append(beta)
        before, q = q, w / beta
    return ritz(alphas, betas[: len(alphas) - 1])[0]


def ritz(alphas: list[float], betas: list[float]) -> tuple[float, float]:
    """The largest |eigenvalue| of a tridiagonal matrix, and the last |entry| of its vector."""
    values, vectors = np.linalg.eigh(np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1))
    at = int(np.abs(values).argmax())
    return float(abs(values[at])), float(abs(vectors[-1, at]))
