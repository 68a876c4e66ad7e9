"""Makes the quadratic model of a problem (mixfl/theory/quadratic.py) from measurements.

Its directions are spanned by the terms' gradients and their repeated products with the terms'
Hessians (a Krylov space of several matrices). The further path of gradient descent depends on
little else.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mixfl.measure.curvature import Curvature
from mixfl.measure.gradients import Measured
from mixfl.problem import Problem
from mixfl.theory.quadratic import QuadraticModel, QuadraticTerm, covariance, positive

DIRECTIONS = 16


def krylov(products: Callable, vectors: Sequence, count: int):
    """An orthonormal basis [r, parameters] of `vectors` and their repeated products with the terms'
    Hessians, and each Hessian times the basis [terms, r, parameters]."""
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


class Directions(NamedTuple):
    """What is known in these directions, before noise is measured."""

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


def quadratic_model(
    problem: Problem, directions: Directions, measured: Sequence[Measured]
) -> QuadraticModel:
    """Adds the noise of cohorts whose gradients were measured on the basis."""
    terms = [
        QuadraticTerm(
            t.name, t in problem.populations, t.weight, directions.gradients[j],
            positive(directions.hessians[j]),
            covariance(np.mean([m.terms[j].v_matrix for m in measured], axis=0)),
            covariance(np.mean([m.terms[j].between_matrix for m in measured], axis=0)),
        )
        for j, t in enumerate(problem.terms)
    ]  # fmt: skip
    return QuadraticModel(terms, directions.start)
