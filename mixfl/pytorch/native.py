"""Losses and gradients by PyTorch itself, and steps, for several clients at once, each in a thread.

One call is one gradient (`Gradients`), or all plain steps of a client (`Steps`). The parameters are
read where JAX has them, and JAX reads the result where PyTorch has left it.

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


class Work:
    """Work for one kind of batch (engine/host_calls.py). Called with the parameters, what else
    it needs, the weights of the losses in their sum, and the columns of a batch, in the order of
    `names` and `columns`. The result has what takes the place of the parameters, and the losses."""

    def __init__(
        self, model: Any, function: Callable, names: Sequence[str], columns: Sequence[str],
        parts: int,
    ):  # fmt: skip
        self.model, self.function = model, function
        self.names, self.columns = names, columns
        self.parts = parts  # clients at once; or of a batch, if there is one client, or the server

    def __call__(self, given: Sequence[jax.Array], batched: Sequence[bool]) -> jax.Array:
        begin = len(given) - len(self.columns) - 1
        every: list[Any] = [torch.from_dlpack(a) for a in given[:begin]]
        every += [np.asarray(a) for a in given[begin:]]
        clients = [len(a) for a, own in zip(given, batched, strict=True) if own]
        sizes = [math.prod(a.shape[several:]) for a, several in zip(given, batched, strict=True)]
        size = sum(sizes[: len(self.names)]) + sizes[begin]
        found = torch.empty((*clients[:1], size))

        def of_client(i: int) -> None:
            own = [a[i] if several else a for a, several in zip(every, batched, strict=True)]
            self.one(found[i], own[:begin], *own[begin:])

        if clients:
            in_threads(of_client, clients[0], self.parts)
        else:
            self.alone(found, every[:begin], *every[begin:])
        # By NumPy: an array from `from_dlpack` is bound to its device, and programs that had others
        # would be compiled again.
        return jnp.asarray(found.numpy())

    def one(self, out: torch.Tensor, given: list[torch.Tensor], *data: np.ndarray) -> None:
        """For one client."""
        raise NotImplementedError

    def alone(self, out: torch.Tensor, given: list[torch.Tensor], *data: np.ndarray) -> None:
        in_threads(lambda _: self.one(out, given, *data), 1)

    def module(self) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        """This thread's own, and its parameters in their order."""
        module = self.model.of_thread("native")
        named = dict(module.named_parameters())
        return module, [named[name] for name in self.names]

    def slopes(
        self, module: torch.nn.Module, parameters: Sequence[torch.Tensor], weights: torch.Tensor,
        batch: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:  # fmt: skip
        """The losses, and the gradients of their sum."""
        losses = self.function(module, batch).float()
        weighted = (losses * weights).sum()  # as in callbacks.py
        found = torch.autograd.grad(weighted, parameters, allow_unused=True, materialize_grads=True)
        return losses.detach(), found

    def batch(self, columns: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        return {name: tensor(a) for name, a in zip(self.columns, columns, strict=True)}


class Gradients(Work):
    """Gradients of one batch."""

    def one(self, out, given, *data) -> None:
        weights, *columns = data
        if not weights.any():  # a padded step: its result is not used
            out.zero_()
            return
        module, parameters = self.module()
        for parameter, value in zip(parameters, given, strict=True):
            parameter.data = value
        losses, slopes = self.slopes(module, parameters, tensor(weights), self.batch(columns))
        torch.cat([*(g.flatten() for g in slopes), losses], out=out)

    def alone(self, out, given, *data) -> None:
        """Each thread has some of the examples."""
        cuts = np.array_split(np.arange(len(data[0])), min(self.parts, len(data[0])))
        size = len(out) - len(data[0])
        parts = [torch.empty(size + len(cut)) for cut in cuts]

        def of_part(i: int) -> None:
            self.one(parts[i], given, *(a[cuts[i]] for a in data))

        in_threads(of_part, len(cuts))
        # By NumPy: in this thread, PyTorch's operators would use all cores.
        arrays = [a.numpy() for a in parts]
        out.numpy()[:size] = functools.reduce(np.add, [a[:size] for a in arrays])
        np.concatenate([a[size:] for a in arrays], out=out.numpy()[size:])


class Steps(Work):
    """All steps of a client with plain SGD. Besides the parameters it is given the augmenting
    gradient, if there is one, and the learning rate; `weights` and columns have an axis of steps.
    The module's parameters are views of the result, so nothing is copied."""

    def one(self, out, given, *data) -> None:
        *arrays, lr = given
        start, aug = arrays[: len(self.names)], arrays[len(self.names) :]
        weights, batch = tensor(data[0]), self.batch(data[1:])
        size, rate = len(out) - weights.numel(), -float(lr)
        out[size:] = 0
        torch.cat([a.flatten() for a in start], out=out[:size])
        module, parameters = self.module()
        own = out[:size].split([a.numel() for a in start])
        for parameter, part, like in zip(parameters, own, start, strict=True):
            parameter.data = part.view(like.shape)
        losses = out[size:].view(weights.shape)
        for k in np.flatnonzero(data[0].any(axis=1)):  # the others are padding
            one = {name: column[k] for name, column in batch.items()}
            losses[k], slopes = self.slopes(module, parameters, weights[k], one)
            with torch.no_grad():
                torch._foreach_add_([*parameters], [*slopes], alpha=rate)
                if aug:
                    torch._foreach_add_([*parameters], aug, alpha=rate)


def in_threads(function: Callable[[int], Any], count: int, most: int | None = None) -> list[Any]:
    """function(0), ..., function(count - 1), at most so many at once, with the cores divided among
    these."""
    at_once = min(count, most or count)
    before, each = torch.get_num_threads(), max(1, (os.cpu_count() or 1) // at_once)

    def alone(i: int) -> Any:
        torch.set_num_threads(each)  # of this thread
        return function(i)

    try:
        return list(_threads(at_once).map(alone, range(count)))
    finally:
        torch.set_num_threads(before)  # some libraries have one number for all threads


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, f"mixfl-pytorch-{count}")
