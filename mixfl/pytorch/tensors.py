"""Arrays as PyTorch's tensors, and back."""

from typing import Any

import numpy as np
import torch


def tensor(value: Any) -> torch.Tensor:
    """A copy, because arrays from JAX must not be written to. PyTorch indexes with int64."""
    a = np.array(value)
    return torch.from_numpy(a.astype(np.int64) if a.dtype.kind in "iu" else a)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
