"""Arrays as PyTorch's tensors, and back."""

from typing import Any

import numpy as np
import torch


def tensor(value: Any) -> torch.Tensor:
    """A copy, because arrays from JAX must not be written to. PyTorch indexes with int64.

    >>> mixfl.pytorch.tensor(jnp.arange(2))
    tensor([0, 1])
    """
    a = np.array(value)
    return torch.from_numpy(a.astype(np.int64) if a.dtype.kind in "iu" else a)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array, wherever it is and whether or not it has a gradient.

    >>> mixfl.pytorch.to_numpy(torch.ones(2, requires_grad=True))
    array([1., 1.], dtype=float32)
    """
    return tensor.detach().cpu().numpy()
