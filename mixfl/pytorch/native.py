"""Losses and their gradients by PyTorch itself, for several clients at once, each in a thread.
One forward and one backward pass; parameters are read where JAX has them.

A thread computes with its share of the cores. (Two clients with a core each are faster than one
client with two: PyTorch's threads wait for each other at every operator.)
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mixfl.pytorch.tensors import tensor


class Gradients:
    """Losses and gradients of one kind of batch, one after the other in one array.

    Called with the parameters, the weights of the losses in their sum, and the columns of a batch,
    in the order of `names` and `columns` (engine/host_calls.py)."""

    def __init__(
        self, model: Any, function: Callable, names: Sequence[str], columns: Sequence[str],
        parts: int,
    ):  # fmt: skip
        self.model, self.function = model, function
        self.names, self.columns = names, columns
        self.parts = parts  # of a batch, if there is only one client, or the server

    def __call__(self, given: Sequence[jax.Array], batched: Sequence[bool]) -> jax.Array:
        tensors = [torch.from_dlpack(a) for a in given[: len(self.names)]]
        data = [np.asarray(a) for a in given[len(self.names) :]]
        clients = [len(a) for a, own in zip(given, batched, strict=True) if own]
        if not clients:
            return jnp.asarray(self._in_parts(tensors, *data))
        size = data[0].shape[-1] + sum(
            math.prod(a.shape[several:]) for a, several in zip(tensors, batched, strict=False)
        )
        found = np.empty((clients[0], size), np.float32)

        def of_client(i: int) -> None:
            every: list[Any] = [*tensors, *data]
            own = [a[i] if several else a for a, several in zip(every, batched, strict=True)]
            results = self._one(own[: len(tensors)], *own[len(tensors) :])
            torch.cat(results, out=torch.from_numpy(found[i]))

        in_threads(of_client, clients[0])
        return jnp.asarray(found)

    def _in_parts(self, parameters: list[torch.Tensor], *data: np.ndarray) -> np.ndarray:
        """Each thread has some of the examples."""
        cuts = np.array_split(np.arange(len(data[0])), min(self.parts, len(data[0])))

        def of_part(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self._one(parameters, *(a[cuts[i]] for a in data))

        # By NumPy: in this thread, PyTorch's operators would use all cores.
        losses, slopes = zip(*in_threads(of_part, len(cuts)), strict=True)
        total = functools.reduce(np.add, [g.numpy() for g in slopes])
        return np.concatenate([*(a.numpy() for a in losses), total])

    def _one(
        self, parameters: list[torch.Tensor], weights: np.ndarray, *columns: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses, and the gradients in one vector."""
        if not weights.any():  # a padded step: its result is not used
            return torch.zeros(len(weights)), torch.zeros(sum(p.numel() for p in parameters))
        module = self.model.of_thread("native")
        named = dict(module.named_parameters())
        own = [named[name] for name in self.names]
        for parameter, value in zip(own, parameters, strict=True):
            parameter.data = value
        batch = {name: tensor(a) for name, a in zip(self.columns, columns, strict=True)}
        losses = self.function(module, batch).float()
        slopes = torch.autograd.grad(
            losses, own, tensor(weights), allow_unused=True, materialize_grads=True
        )
        return losses.detach(), torch.cat([g.flatten() for g in slopes])


def in_threads(function: Callable[[int], Any], count: int) -> list[Any]:
    """function(0), ..., function(count - 1), with the cores divided among them."""
    before, each = torch.get_num_threads(), max(1, (os.cpu_count() or 1) // count)

    def alone(i: int) -> Any:
        torch.set_num_threads(each)  # of this thread
        return function(i)

    try:
        return list(_threads(count).map(alone, range(count)))
    finally:
        torch.set_num_threads(before)  # some libraries have one number for all threads


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, f"mixfl-pytorch-{count}")
