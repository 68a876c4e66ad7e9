"""Models and losses in PyTorch, for problems whose clients are written in it (mixfl[torch]).

    model = mixfl.pytorch.Model(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    loss = model.loss(lambda module, batch: ...)      # one loss per example, a tensor
    problem = mixfl.Problem(model.init, [mixfl.Federated(loss, ...), mixfl.Central(loss, ...)])

The algorithms run in JAX. They see a loss that calls PyTorch for its values and gradients. So a
central loss in PyTorch works with all of them. It also works in the simulator, where every call
leaves the compiled program. A deployed client takes its steps entirely in PyTorch
(deploy/pytorch.py).
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.errors import MixflError

try:
    import torch
except ImportError as error:
    raise MixflError(f"PyTorch: {error}. Install it: pip install 'mixfl[torch]'") from None

# Calls from a compiled program run in this thread: in XLA's own threads, PyTorch crashes with large
# arrays (seen with JAX 0.10.2 and PyTorch 2.13).
_thread = ThreadPoolExecutor(1, "mixfl-pytorch")


def called(function: Callable, like: Any, *args: Any) -> Any:
    """function(*args), called from a compiled program of JAX. `like` has the shapes of the
    result."""

    def call(*args):
        return _thread.submit(function, *jax.tree.map(np.array, args)).result()

    return jax.pure_callback(call, like, *args, vmap_method="sequential")


class Model:
    """A kind of nn.Module. Its parameters by name, such as 0.weight, are mixfl's model."""

    def __init__(self, make: Callable[[], torch.nn.Module]):
        self.make = make
        self.local = threading.local()
        module = make()
        if next(module.buffers(), None) is not None:
            raise MixflError(
                f"{type(module).__name__} has buffers ({next(module.named_buffers())[0]}), which "
                "are not trained: use layers without (GroupNorm instead of BatchNorm)."
            )
        self.shapes = {
            name: jax.ShapeDtypeStruct(tuple(p.shape), to_numpy(p).dtype)
            for name, p in module.named_parameters()
        }

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """The model that PyTorch makes from a seed."""

        def made(words):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(words[-1]))
                return {name: to_numpy(p) for name, p in self.make().named_parameters()}

        return called(made, self.shapes, jax.random.key_data(key))

    def loss(self, function: Callable) -> "Loss":
        """`function(module, batch)`: one loss per example; `function(module)`: a regularizer."""
        return Loss(self, function)

    def module(self, params: Mapping[str, Any]) -> torch.nn.Module:
        """The module with these parameters (or some rows of them). Each thread has its own."""
        if not hasattr(self.local, "module"):
            self.local.module = self.make()
        for name, value in params.items():
            place, _, own = name.rpartition(".")
            parameter = torch.nn.Parameter(tensor(value))
            setattr(self.local.module.get_submodule(place), own, parameter)
        return self.local.module


class Loss:
    """A loss in PyTorch, as a function that JAX can differentiate."""

    def __init__(self, model: Model, function: Callable):
        self.model, self.function = model, function

    def __call__(self, params, *batch):
        return _values(self, params, *batch)

    def at(self, module: torch.nn.Module, batch: Mapping[str, Any] | None) -> torch.Tensor:
        if batch is None:
            return self.function(module)
        return self.function(module, {name: tensor(column) for name, column in batch.items()})

    def values(self, params, *batch):
        with torch.no_grad():
            return to_numpy(self.at(self.model.module(params), *(batch or (None,))))

    def slopes(self, params, cotangent, *batch):
        """The gradient of the sum of the losses, weighted by `cotangent`."""
        module = self.model.module(params)
        slopes = torch.autograd.grad(
            self.at(module, *(batch or (None,))), list(module.parameters()), tensor(cotangent),
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        names = [name for name, _ in module.named_parameters()]
        return {name: to_numpy(g) for name, g in zip(names, slopes, strict=True)}


def _values(loss: Loss, params, *batch):
    shape = jax.tree.leaves(batch)[0].shape[:1] if batch else ()
    like = jax.ShapeDtypeStruct(shape, jnp.float32)

    @jax.custom_vjp
    def values(params, *batch):
        return called(loss.values, like, params, *batch)

    def forward(params, *batch):
        return values(params, *batch), (params, batch)

    def backward(kept, cotangent):
        params, batch = kept
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        slopes = called(loss.slopes, shapes, params, cotangent, *batch)
        return slopes, *(None for _ in batch)

    values.defvjp(forward, backward)
    return values(params, *batch)


def tensor(value: Any) -> torch.Tensor:
    """A copy, because arrays from JAX must not be written to."""
    a = np.array(value)
    return torch.from_numpy(a.astype(np.int64) if a.dtype.kind in "iu" else a)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
