"""A kind of nn.Module, as mixfl's model: what is trained, and what is not.

The trained parameters, by name, are mixfl's params. Tied parameters are one. Everything else stays
as `make` made it: parameters with requires_grad=False, and buffers.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch

from mixfl.errors import MixflError
from mixfl.frozen import Frozen
from mixfl.pytorch.callbacks import called
from mixfl.pytorch.compiled import frozen_arrays
from mixfl.pytorch.loss import Loss
from mixfl.pytorch.predict import Predict
from mixfl.pytorch.tensors import tensor, to_numpy

FROZEN_SEED = 0  # of what is not trained: the same in every process of a deployment


class Model:
    """A module as a model. `make()` returns it; it is called for each seed and in each thread.

    >>> model = mixfl.pytorch.Model(lambda: torch.nn.Linear(4, 1))
    >>> loss = model.loss(lambda module, batch: (module(batch["x"])[:, 0] - batch["y"]) ** 2)
    >>> sorted(model.init(jax.random.key(0)))
    ['bias', 'weight']
    """

    def __init__(self, make: Callable[[], torch.nn.Module]):
        self.make = make
        self.local = threading.local()
        module = self._made(FROZEN_SEED)
        self.names: dict[str, list[str]] = {}  # of each trained parameter; tied ones have several
        first: dict[int, str] = {}
        for name, p in module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                self.names.setdefault(first.setdefault(id(p), name), []).append(name)
        if not self.names:
            raise MixflError(
                f"{type(module).__name__} has no parameter to train (requires_grad=True)."
            )
        for name, p in _trained(module):
            if p.dtype != torch.float32:
                raise MixflError(
                    f"the parameter {name} is of type {p.dtype}: what is trained must be float32 "
                    "(module.float(), or requires_grad=False)."
                )
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise MixflError(
                    f"the parameter {name} has a hook on its gradient, which is not called. To "
                    "shorten gradients, set grad_clip; otherwise change them in the loss."
                )
        self.shapes = {
            n: jax.ShapeDtypeStruct(tuple(p.shape), to_numpy(p).dtype) for n, p in _trained(module)
        }
        self.frozen: dict[str, torch.Tensor] = {n: t.detach() for n, t in _frozen(module)}
        # The same as arrays, for compiled losses and to compare them between server and nodes.
        self.frozen_arrays = Frozen(lambda: frozen_arrays(self)) if self.frozen else None

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """The trained parameters that `make` makes from a seed."""

        def made(words):
            return {n: to_numpy(p) for n, p in _trained(self._made(int(words[-1])))}

        return called(made, self.shapes, jax.random.key_data(key))

    def loss(self, function: Callable) -> Loss:
        """`function(module, batch)`: one loss per example; `function(module)`: a regularizer."""
        return Loss(self, function)

    def predict(self, function: Callable) -> Predict:
        """For Problem(predict=...). `function(module, batch)`: a tensor, or a dict of tensors, with
        a row per example."""
        return Predict(self, function)

    def module(self, params: Mapping[str, Any]) -> torch.nn.Module:
        """A new module with these parameters."""
        if params.keys() != self.names.keys():
            wrong = sorted(params.keys() ^ self.names.keys())
            raise MixflError(
                f"the parameters are not this model's: {wrong[0]} is "
                f"{'missing' if wrong[0] in self.names else 'not one of them'}."
            )
        module = self.fresh()
        self.fill(module, params)
        return module

    def state_dict(self, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """For PyTorch's load_state_dict: also what is not trained, and every name of tied ones."""
        return self.module(params).state_dict()

    def of_thread(self, use: str) -> torch.nn.Module:
        """This thread's own module. Its tensors that are not trained are shared by all threads."""
        if not hasattr(self.local, use):
            setattr(self.local, use, self.fresh(share=True))
        return getattr(self.local, use)

    def fresh(self, share: bool = False) -> torch.nn.Module:
        """A module whose tensors that are not trained have the values that all modules have."""
        module = self._made(FROZEN_SEED)
        for name, t in _frozen(module):
            t.data = self.frozen[name] if share else self.frozen[name].clone()
        return module

    def fill(self, module: torch.nn.Module, params: Mapping[str, Any]) -> torch.nn.Module:
        """Puts parameters (or some rows of them) into a module. They stay the same objects, as a
        module may hold them in a list of its own too."""
        named = dict(module.named_parameters())
        for name, value in params.items():
            named[name].grad = None
            named[name].data = tensor(value)
        return module

    def _made(self, seed: int) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make()
        if not isinstance(module, torch.nn.Module):
            raise MixflError(
                f"Model needs a function that returns an nn.Module, this one returned a "
                f"{type(module).__name__}."
            )
        return module


def _trained(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in module.named_parameters() if p.requires_grad)


def _frozen(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, p) for name, p in module.named_parameters() if not p.requires_grad)
    yield from module.named_buffers()
