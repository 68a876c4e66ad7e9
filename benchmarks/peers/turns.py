"""How a parameter's layout changes between JAX and PyTorch."""

from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    to_torch: object
    to_jax: object


def _same(a):
    return a


def _gates(a):
    """Update, reset, candidate (Keras) <-> reset, update, candidate (PyTorch)."""
    first, second, candidate = np.split(a, 3, axis=-1)
    return np.concatenate([second, first, candidate], axis=-1)


SAME = Turn(_same, _same)
TRANSPOSED = Turn(np.transpose, np.transpose)
KERNEL = Turn(lambda a: a.transpose(3, 2, 0, 1), lambda a: a.transpose(2, 3, 1, 0))
GATES = Turn(_gates, _gates)
GATES_TRANSPOSED = Turn(lambda a: _gates(a).T, lambda a: _gates(a.T))
