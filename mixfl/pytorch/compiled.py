"""A loss as a JAX function, by torchax: what PyTorch would compute, in JAX's operators."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from mixfl.pytorch.torchax_bridge import constant, lowering


def compiled(model, function: Callable) -> Callable:
    """A function of the trained parameters, the module's other tensors, and the batch."""

    def loss(params, frozen, *batch):
        call = _Call(model.of_thread("compiled"), function)
        with lowering() as env:
            given = {f"module.{name}": a for name, a in {**params, **frozen}.items()}
            tensors, columns = env.j2t_iso((given, tuple(map(_columns, batch))))
            losses = torch.func.functional_call(call, tensors, columns)
            return env.t2j_iso(losses).astype(jnp.float32)

    loss.__name__ = getattr(function, "__name__", "loss")
    return jax.jit(loss)  # it is traced once, however often a program uses it


def frozen_arrays(model) -> dict[str, jax.Array]:
    """What the compiled loss takes besides the trained parameters."""
    return {name: constant(t) for name, t in model.frozen.items()}


class _Call(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, function: Callable):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *batch):
        return self.function(self.module, *batch)


def _columns(batch) -> dict[str, jax.Array]:
    """All whole numbers are of one type, as they are in PyTorch (tensors.tensor)."""
    columns = {name: jnp.asarray(a) for name, a in batch.items()}
    return {
        n: a.astype(jnp.int32) if jnp.issubdtype(a.dtype, jnp.integer) else a
        for n, a in columns.items()
    }
