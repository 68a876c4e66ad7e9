"""Models and losses in PyTorch (mixfl[torch]). docs/pytorch.md shows how to use them.

    model = mixfl.pytorch.Model(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    loss = model.loss(lambda module, batch: ...)      # one loss per example, a tensor
    problem = mixfl.Problem(model.init, [mixfl.Federated(loss, ...), mixfl.Central(loss, ...)])

The algorithms run in JAX. To them, such a loss is a JAX function: torchax turns PyTorch's operators
into JAX's, and the loss is compiled with the round (compiled.py). If it can't be, the compiled
program calls PyTorch for values and derivatives (callbacks.py). Before a loss is used, it is tried
on a few examples (trial.py). A deployed client takes its steps in PyTorch (deploy/pytorch.py).
"""

from mixfl.errors import MixflError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MixflError(f"PyTorch: {error}. Install it: pip install 'mixfl[torch]'") from None

from mixfl.pytorch.loss import Loss
from mixfl.pytorch.model import Model
from mixfl.pytorch.norms import with_group_norm
from mixfl.pytorch.tensors import tensor, to_numpy

__all__ = ["Loss", "Model", "tensor", "to_numpy", "with_group_norm"]
