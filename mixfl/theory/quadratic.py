"""A problem in small: its terms near one model, as quadratics in a few well-chosen directions.

The directions are spanned by the terms' gradients and by what the terms' Hessians make of them,
again and again (a Krylov space of several matrices): how gradient descent goes on from here depends
on little else. In them, a term is its gradient, its Hessian, and the covariance of its noise. On
that, the algorithms can be worked out exactly (see predict.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mixfl.measure.curvature import Curvature
from mixfl.measure.gradients import Measured
from mixfl.problem import Problem

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


def krylov(products: Callable, vectors: Sequence, count: int):
    """From `vectors` and what the terms' Hessians make of them: an orthonormal basis
    [r, parameters], and each Hessian times it [terms, r, parameters]."""
    basis: list = []
    images: list = []
    waiting = list(vectors)

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
            images.append(products(basis[-1]))
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


class Directions(NamedTuple):
    """What is known in small before any noise is measured."""

    basis: Any  # [r, parameters]
    gradients: np.ndarray  # [terms, r], at the origin
    hessians: np.ndarray  # [terms, r, r]
    start: np.ndarray  # [r]


def directions(curvature: Curvature, x, start, count: int = DIRECTIONS) -> Directions:
    """At x, for training that begins at `start` (both flat)."""
    slopes = curvature.gradients(x)
    basis, images = krylov(lambda v: curvature.products(x, v), [start - x, *slopes], count)
    return Directions(
        basis,
        np.asarray(slopes @ basis.T, np.float64),
        np.asarray(jnp.einsum("sp,trp->tsr", basis, images), np.float64),
        np.asarray(basis @ (start - x), np.float64),
    )


def small(problem: Problem, found: Directions, measured: Sequence[Measured]) -> Small:
    """With the noise of cohorts whose gradients were measured on the basis."""
    terms = [
        SmallTerm(
            t.name, t in problem.populations, t.weight, found.gradients[j],
            positive(found.hessians[j]),
            covariance(np.mean([m.terms[j].v_matrix for m in measured], axis=0)),
            covariance(np.mean([m.terms[j].between_matrix for m in measured], axis=0)),
        )
        for j, t in enumerate(problem.terms)
    ]  # fmt: skip
    return Small(terms, found.start)
