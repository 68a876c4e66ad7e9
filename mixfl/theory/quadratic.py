"""A problem near one model, as quadratics in a few directions.

In these directions a term is its gradient, its Hessian and the covariance of its noise. On such
a model the algorithms can be worked out exactly (predictions.py). mixfl/measure/quadratic_model.py
makes one from measurements.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class QuadraticTerm(NamedTuple):
    name: str
    federated: bool
    weight: float
    gradient: np.ndarray  # [r], at the origin
    hessian: np.ndarray  # [r, r]
    v: np.ndarray  # [r, r], covariance of one example's gradient
    between: np.ndarray  # [r, r], covariance of the differences between clients
    # For private runs, over all parameters:
    square: float = 0.0  # E ||a client's gradient||^2
    variance: float = 0.0  # of one example's gradient


class QuadraticModel(NamedTuple):
    terms: Sequence[QuadraticTerm]
    start: np.ndarray  # [r], where training begins; the measurements were made at the origin
    copies: np.ndarray | None = None  # [r], how many parameters a coordinate stands for; None: one

    @property
    def hessian(self) -> np.ndarray:
        return np.sum([t.hessian for t in self.terms], axis=0)

    @property
    def gradient(self) -> np.ndarray:
        return np.sum([t.gradient for t in self.terms], axis=0)


def positive(matrix: np.ndarray) -> np.ndarray:
    """The matrix with the absolute values of its eigenvalues: a step is as unsafe along negative
    curvature."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.abs(values)) @ vectors.T


def covariance(matrix: np.ndarray) -> np.ndarray:
    """An estimate without its negative eigenvalues. The others are scaled to keep the trace: they
    are too large by chance as much as the negative ones are too small."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    kept = np.maximum(values, 0)
    kept *= max(values.sum(), 0) / max(kept.sum(), 1e-300)
    return (vectors * kept) @ vectors.T
