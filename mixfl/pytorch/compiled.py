"""A loss as a JAX function, by torchax: what PyTorch would compute, in JAX's operators."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from mixfl.pytorch.torchax_bridge import constant, lowering
from mixfl.randomness import KEYS, separated


def compiled(model, function: Callable, keyed: bool = False, drawing: bool = True) -> Callable:
    """A function of the trained parameters, the module's other tensors, and the batch. `keyed`: the
    loss takes a key, which is what PyTorch's random operators draw from; not `drawing`: the module
    is in evaluation mode."""

    def loss(params, frozen, *batch, key=None):
        module = model.of_thread("compiled" if drawing else "compiled without draws")
        call = _Call(module if drawing else module.eval(), function)
        with lowering() as env, env.override_property(**({} if key is None else {"prng": key})):
            given = {f"module.{name}": a for name, a in {**params, **frozen}.items()}
            tensors, columns = env.j2t_iso((given, tuple(map(_columns, batch))))
            losses = torch.func.functional_call(call, tensors, columns)
            return env.t2j_iso(losses).astype(jnp.float32)

    def one_by_one(params, frozen, data):
        """Each example draws from its own key."""
        batch, keys = separated(data)
        words = jax.lax.bitcast_convert_type(jnp.asarray(data[KEYS]), jnp.int32)

        def one(example, words, key):
            alone = {name: a[None] for name, a in example.items()}
            return loss(params, frozen, alone, words[None], key=key)[0]

        return jax.vmap(one)(batch, words, keys)

    if keyed:
        return jax.jit(one_by_one)
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


def _columns(batch):
    """All whole numbers are of one type, as they are in PyTorch (tensors.tensor)."""
    if not isinstance(batch, dict):
        return batch
    columns = {name: jnp.asarray(a) for name, a in batch.items()}
    return {
        n: a.astype(jnp.int32) if jnp.issubdtype(a.dtype, jnp.integer) else a
        for n, a in columns.items()
    }
