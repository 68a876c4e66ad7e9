"""A loss in PyTorch, as a function that JAX can differentiate."""

import copy
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.engine.host_calls import host_call
from mixfl.engine.native import Step
from mixfl.engine.purity import ImpureLoss
from mixfl.errors import MixflError
from mixfl.frozen import Frozen
from mixfl.losses import takes
from mixfl.pytorch import callbacks
from mixfl.pytorch.native import Gradients, Steps
from mixfl.pytorch.step import step_of
from mixfl.pytorch.trial import Verdict, failed, tried
from mixfl.randomness import trial_batch

EXAMPLES = 3  # in a batch of a trial; unlike most sizes in a model
BATCHES = 3  # in a trial: from all of the term's examples


class Loss(callbacks.InPyTorch):
    """`function(module, batch)`, as loss(params, batch). It is compiled if a trial says that it can
    be. Before it was tried, and otherwise, PyTorch is called.

    `function(module, batch, key)` may draw: PyTorch's random operators, such as Dropout, then draw
    from the examples' keys, and `batch` has the column KEYS (randomness.py).

    >>> model = mixfl.pytorch.Model(lambda: torch.nn.Linear(4, 1))
    >>> isinstance(model.loss(lambda module, batch: module(batch["x"])[:, 0]), mixfl.pytorch.Loss)
    True
    """

    def __init__(self, model: Any, function: Callable):
        self.model, self.function = model, function
        self.takes_key = takes(function).key
        if "key" in list(inspect.signature(function).parameters)[1:2]:
            raise MixflError(
                "a loss without data takes no key: there are no examples to draw for. It is "
                "function(module); with data and draws, function(module, batch, key)."
            )
        self.term: Any = None
        self.compile = True
        self.given: Any = None  # in place of the model's frozen arrays
        self.verdicts: dict[Any, Verdict] = {}  # by the kind of batch
        self.lock = threading.Lock()

    def of_term(self, term) -> "Loss":
        """The same loss. It can be tried on the term's examples."""
        bound = copy.copy(self)
        bound.term = term
        return bound

    def in_pytorch(self) -> "Loss":
        """The same loss, never compiled."""
        plain = copy.copy(self)
        plain.compile, plain.verdicts = False, {}
        return plain

    def step(self, batch: dict[str, Any]) -> Step:
        """How PyTorch takes a step on a client's batch."""
        return step_of(self, batch)

    def natively(self, threads: int) -> "NativeLoss":
        """The same loss, whose gradients PyTorch computes itself."""
        return NativeLoss(self, threads)

    def __call__(self, params, *batch):
        kind = _kind(batch)
        verdict = self._verdict(kind, batch)
        if verdict.refused:
            raise ImpureLoss(f"{self.name} {verdict.refused}")
        if verdict.compiled is not None:
            try:
                return verdict.compiled(params, self._frozen(), *batch)
            except Exception as error:  # in this shape of a batch
                self.verdicts[kind] = failed(error)
        return callbacks.losses(self, params, *batch)

    @property
    def frozen(self) -> Frozen | None:
        """The model's arrays that are not trained."""
        return self.model.frozen_arrays

    def with_frozen(self, arrays: Any) -> "Loss":
        """The same loss with other arrays of these shapes."""
        bound = copy.copy(self)
        bound.given = arrays
        return bound

    def _frozen(self) -> Any:
        if self.given is not None or self.frozen is None:
            return self.given or {}
        return self.frozen.arrays

    @property
    def name(self) -> str:
        """As messages call it."""
        if self.term is not None:
            return f"the loss of term '{self.term.name}'"
        return f"the loss {getattr(self.function, '__name__', '')}".strip()

    @property
    def notes(self) -> list[str]:
        """What the user of a run should know."""
        return [
            f"{self.name} runs in PyTorch, outside of the compiled program and slower: {v.note}"
            for v in self.verdicts.values()
            if v.note
        ]

    def _verdict(self, kind, batch) -> Verdict:
        with self.lock:
            if kind not in self.verdicts:
                examples = self._examples(kind, batch)
                if examples is None:
                    return Verdict()
                # A thread of its own: JAX may be tracing a function in this one.
                with ThreadPoolExecutor(1) as aside:
                    self.verdicts[kind] = aside.submit(tried, self, examples).result()
            return self.verdicts[kind]

    def _examples(self, kind, batch) -> list[tuple] | None:
        """A few batches, of the kind that the loss is called with; None if none are known."""
        if not batch:
            return [()]
        if self.term is not None and getattr(self.term, "here", True) and self.term.examples:
            examples = self.term.examples
            first = np.arange(EXAMPLES) % len(examples)
            spread = np.linspace(0, len(examples) - 1, EXAMPLES * BATCHES).astype(int)
            rows = [first, *(spread[i::BATCHES] for i in range(1, BATCHES))]
            few = [(trial_batch(self.term, each),) for each in rows]
            if _kind(few[0]) == kind:
                return few
        if any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(batch)):
            return None
        return [jax.tree.map(lambda a: np.asarray(a)[:EXAMPLES], batch)]


class NativeLoss(Loss):
    """A loss whose gradients in a round PyTorch computes, outside of compiled programs. Whatever
    else uses it is compiled, or calls PyTorch."""

    def __init__(self, loss: Loss, threads: int):
        vars(self).update(vars(loss))
        self.threads = threads
        self.pure: dict[Any, Verdict] = {}  # by the kind of batch, of losses that are not compiled

    @property
    def notes(self) -> list[str]:
        return [f"{self.name} is not compiled: {v.note}" for v in self.verdicts.values() if v.note]

    def gradient_in_form(self, mean, x, batch):
        """`mean` is linear."""
        self._check(batch.data)
        weights = jax.grad(mean)(jnp.zeros(batch.mask.shape))
        losses, grads = self._called(Gradients, x, [], weights, batch.data)
        return mean(losses), grads

    def steps_in_form(self, weight, lr, x, batches, aug=None):
        """After steps x - lr (g + aug), one on each batch that is not padding: x, and the sum of
        `weight` times the means of the losses."""
        self._check(jax.tree.map(lambda a: a[0], batches.data))
        count = jnp.sum(batches.mask, axis=1, keepdims=True)
        weights = weight * batches.mask / jnp.maximum(count, 1)
        added = [] if aug is None else [aug[name] for name in sorted(x)]
        losses, x = self._called(Steps, x, [*added, jnp.float32(lr)], weights, batches.data)
        return x, jnp.sum(weights * losses.reshape(weights.shape))

    def _check(self, data):
        """Only what matters to PyTorch: whether the loss can be compiled need not be known."""
        kind, plain = _kind((data,)), self.in_pytorch()
        plain.verdicts = self.pure
        verdict = (self if kind in self.verdicts else plain)._verdict(kind, (data,))
        if verdict.refused:
            raise ImpureLoss(f"{self.name} {verdict.refused}")

    def _called(self, kind, x, more, weights, data):
        """The losses, and the arrays that take the place of those in x."""
        names, columns = tuple(sorted(x)), tuple(sorted(data))
        sizes = [x[name].size for name in names]
        work = kind(self.model, self.function, names, columns, self.threads)
        given = [x[name] for name in names], more, weights, [data[name] for name in columns]
        found = host_call(work, sum(sizes) + weights.size, *jax.tree.leaves(given))
        *arrays, losses = jnp.split(found, np.cumsum(sizes))
        return losses, {n: a.reshape(x[n].shape) for n, a in zip(names, arrays, strict=True)}


def _kind(batch) -> Any:
    """Columns with their types and shapes, for any number of examples."""
    return tuple(
        (name, "i" if np.dtype(a.dtype).kind in "iu" else np.dtype(a.dtype).kind, a.shape[1:])
        for columns in batch
        for name, a in sorted(columns.items())
    )
