"""A problem in small: its terms near one model, as quadratics in a few well-chosen directions.

The directions are spanned by the terms' gradients and by what the terms' Hessians make of them,
again and again (a Krylov space of several matrices): how gradient descent goes on from here depends
on little else. In them, a term is its gradient, its Hessian, and the covariance of its noise. On
that, the algorithms can be worked out exactly (see predict.py).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.theory.curvature import Curvature
from mixfl.theory.gradients import Gradients

DIRECTIONS = 16


class SmallTerm(NamedTuple):
    name: str
    federated: bool
    weight: float
    gradient: np.ndarray  # [r], at the origin
    hessian: np.ndarray  # [r, r]
    v: np.ndarray  # [r, r], covariance of one example's gradient
    between: np.ndarray  # [r, r], covariance of what is special about a client


class Small(NamedTuple):
    terms: Sequence[SmallTerm]
    start: np.ndarray  # [r], where training begins; what was measured is at the origin

    @property
    def hessian(self) -> np.ndarray:
        return np.sum([t.hessian for t in self.terms], axis=0)

    @property
    def gradient(self) -> np.ndarray:
        return np.sum([t.gradient for t in self.terms], axis=0)


def directions(curvature: Curvature, x, start, count: int = DIRECTIONS):
    """An orthonormal basis [r, parameters], and each term's Hessian times it [terms, r, ...]."""
    basis: list = []
    images: list = []
    waiting = [start - x, *curvature.gradients(x)]

    def add(v) -> None:
        length = float(jnp.linalg.norm(v))
        for _ in range(2):  # once is not enough in float32
            for q in basis:
                v = v - jnp.vdot(q, v) * q
        left = float(jnp.linalg.norm(v))
        if left > 1e-4 * length and left > 0:
            basis.append(v / left)

    while waiting and len(basis) < count:
        add(waiting.pop(0))
        if len(images) < len(basis):
            images.append(curvature.products(x, basis[-1]))
            waiting += list(images[-1])
    return jnp.stack(basis), jnp.stack(images, axis=1)


def positive(matrix: np.ndarray) -> np.ndarray:
    """With its negative eigenvalues turned round: a step is as unsafe along them."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.abs(values)) @ vectors.T


def covariance(matrix: np.ndarray) -> np.ndarray:
    """An estimate without its negative eigenvalues, and the others scaled to keep the trace: what
    is above 0 by chance makes up for what is below."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    kept = np.maximum(values, 0)
    kept *= max(values.sum(), 0) / max(kept.sum(), 1e-300)
    return (vectors * kept) @ vectors.T


def small(
    curvature: Curvature, gradients: Gradients, x, start, rounds: Iterable[int],
    count: int = DIRECTIONS,
) -> Small:  # fmt: skip
    """At x, for training that begins at `start` (both flat); the noise is that of the cohorts of
    the given rounds."""
    basis, images = directions(curvature, x, start, count)
    means = np.asarray(curvature.gradients(x) @ basis.T, np.float64)
    hessians = np.asarray(jnp.einsum("sp,trp->tsr", basis, images), np.float64)
    unravel = curvature.unravel
    stacked = jax.vmap(unravel)(basis)
    measured = [gradients.at(unravel(x), t, stacked).terms for t in rounds]
    terms = [
        SmallTerm(
            t.name, t in gradients.problem.populations, t.weight, means[j], positive(hessians[j]),
            covariance(np.mean([m[j].v_matrix for m in measured], axis=0)),
            covariance(np.mean([m[j].between_matrix for m in measured], axis=0)),
        )
        for j, t in enumerate(gradients.problem.terms)
    ]  # fmt: skip
    return Small(terms, np.asarray(basis @ (start - x), np.float64))
