"""A loss as a JAX function that calls PyTorch, out of the compiled program, for values and
derivatives. Right for every loss, and slow."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mixfl.pytorch.tensors import tensor, to_numpy
from mixfl.randomness import KEYS

# Calls from a compiled program run in this thread: in XLA's own threads, PyTorch crashes with large
# arrays (seen with JAX 0.10.2 and PyTorch 2.13).
_thread = ThreadPoolExecutor(1, "mixfl-pytorch")


def called(function: Callable, like: Any, *args: Any) -> Any:
    """function(*args), called from a compiled program of JAX. `like` has the shapes of the
    result."""

    def call(*args):
        return _thread.submit(function, *jax.tree.map(np.array, args)).result()

    return jax.pure_callback(call, like, *args, vmap_method="sequential")


def losses(loss, params, *batch):
    """The losses, with first and second derivatives with respect to the parameters."""
    shape = jax.tree.leaves(batch)[0].shape[:1] if batch else ()
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    nothing = tuple(None for _ in batch)

    def shapes(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)

    @jax.custom_vjp
    def values(params, *batch):
        return called(loss.values, like, params, *batch)

    @jax.custom_vjp
    def slopes(params, cotangent, *batch):
        return called(loss.slopes, shapes(params), params, cotangent, *batch)

    def second(kept, along):
        params, cotangent, *batch = kept
        both = shapes((params, cotangent))
        return *called(loss.second, both, params, cotangent, along, *batch), *nothing

    def first(kept, cotangent):
        params, *batch = kept
        return slopes(params, cotangent, *batch), *nothing

    values.defvjp(lambda *args: (values(*args), args), first)
    slopes.defvjp(lambda *args: (slopes(*args), args), second)
    return values(params, *batch)


class InPyTorch:
    """What PyTorch computes, from arrays to arrays. A subclass has `model`, `function` and
    `takes_key`."""

    model: Any
    function: Callable
    takes_key: bool

    def at(self, module: torch.nn.Module, *batch) -> torch.Tensor:
        """The losses. If they draw, one by one: each example has a generator of its own."""
        if not self.takes_key:
            return self.together(module, *batch)
        (data,) = batch
        ones = ({n: a[i : i + 1] for n, a in data.items()} for i in range(len(data[KEYS])))
        return torch.cat([self.together(module, one) for one in ones])

    def together(self, module: torch.nn.Module, *batch) -> torch.Tensor:
        """The losses, all at once. If they draw, then all from the first example's key."""
        if not self.takes_key:
            return self.function(module, *map(_tensors, batch))
        (data,) = batch
        words = np.array(data[KEYS], np.uint32)
        columns = {name: a for name, a in data.items() if name != KEYS}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(words[0, 0]) << 32 | int(words[0, 1]))
            return self.function(module, _tensors(columns), tensor(words.view(np.int32)))

    def values(self, params, *batch):
        with torch.no_grad():
            return to_numpy(self.at(self._module(params), *batch).float())

    def slopes(self, params, cotangent, *batch):
        """The gradient of the sum of the losses, weighted by `cotangent`."""
        module = self._module(params)
        return _arrays(self._slopes(module, params, self.at(module, *batch), tensor(cotangent)))

    def second(self, params, cotangent, along, *batch):
        """The derivatives of `slopes` times `along`, with respect to the first two arguments."""
        module, weights = self._module(params), tensor(cotangent).requires_grad_()
        losses = self.at(module, *batch)
        g = self._slopes(module, params, losses, weights, create_graph=True)
        product = sum((g[name] * tensor(along[name])).sum() for name in g)
        if not product.requires_grad:  # the losses are linear
            zeros = {name: np.zeros_like(a) for name, a in along.items()}
            return zeros, np.zeros_like(cotangent)
        inputs = [*self._named(module, params).values(), weights]
        *found, by_weight = torch.autograd.grad(
            product, inputs, allow_unused=True, materialize_grads=True
        )
        return _arrays(dict(zip(g, found, strict=True))), to_numpy(by_weight)

    def _module(self, params) -> torch.nn.Module:
        return self.model.fill(self.model.of_thread("called"), params)

    def _named(self, module, params) -> dict[str, torch.Tensor]:
        named = dict(module.named_parameters())
        return {name: named[name] for name in params}

    def _slopes(self, module, params, losses, cotangent, **more) -> dict[str, torch.Tensor]:
        named = self._named(module, params)
        # Their weighted sum: given the weights, PyTorch would import a library of symbols.
        slopes = torch.autograd.grad(
            (losses.float() * cotangent).sum(), list(named.values()),
            allow_unused=True, materialize_grads=True, **more,
        )  # fmt: skip
        return dict(zip(named, slopes, strict=True))


def _tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor(column) for name, column in batch.items()}


def _arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: to_numpy(t) for name, t in tensors.items()}
