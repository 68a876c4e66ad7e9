"""Losses that draw at random: loss(params, batch, key), with one JAX key per example in `key`.

To everything else in mixfl the keys are one more column of the data, two words per example
(engine/cohort.py makes them). So a loss stays a function of parameters and data, and forms, chunks,
devices and nodes need not know of it. (JAX is imported when it is needed: making a problem must be
possible without it.)
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixfl.errors import MixflError
from mixfl.losses import Takes, takes

KEYS = "mixfl: keys"  # the column: [..., 2] words of 32 bits
IMPLEMENTATION = "threefry2x32"


@dataclass(frozen=True)
class WithKeys:
    """loss(params, batch, key) as a function of parameters and data that has the column KEYS."""

    loss: Callable

    @property
    def takes(self) -> Takes:
        return takes(self.loss)._replace(key=False)

    def __call__(self, params: Any, data: Mapping[str, Any], **more: Any) -> Any:
        batch, key = separated(data)
        return call(self.loss, params, batch, key, more)


def with_keys(loss: Callable) -> Callable:
    return WithKeys(loss) if takes(loss).key else loss


def separated(data: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The columns of the user, and the keys."""
    import jax

    if KEYS not in data:
        raise MixflError("this loss takes a key: call it with its examples' keys.")
    batch = {name: column for name, column in data.items() if name != KEYS}
    words = jax.numpy.asarray(data[KEYS])
    return batch, jax.random.wrap_key_data(words, impl=IMPLEMENTATION)


def takes_key(loss: Any) -> bool:
    """Does it need the column KEYS?"""
    return any(isinstance(each, WithKeys) or getattr(each, "takes_key", False)
               for each in wrapped(loss))  # fmt: skip


def users_loss(loss: Any) -> Any:
    """The function that the user gave."""
    *_, last = wrapped(loss)
    return last


def wrapped(loss: Any) -> Iterator[Any]:
    """A loss, and what it wraps. mixfl's own wrappers say what they take."""
    yield loss
    while isinstance(getattr(loss, "takes", None), Takes) and hasattr(loss, "loss"):
        loss = loss.loss
        yield loss


def any_keys(*shape: int) -> np.ndarray:
    """Words of keys for a trial. They are always the same."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 2**32, (*shape, 2), np.uint32)


def batch_shapes(term: Any, *size: int) -> dict[str, Any]:
    """The shapes of what the term's loss gets, for batches [*size, ...]."""
    import jax

    columns = term.examples.columns.items()
    shapes = {k: jax.ShapeDtypeStruct((*size, *c.shape), c.dtype) for k, c in columns}
    if takes_key(term.loss):
        shapes[KEYS] = jax.ShapeDtypeStruct((*size, 2), np.uint32)
    return shapes


def trial_batch(term: Any, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The examples at `rows`, as the term's loss gets them, with keys that are always the same."""
    batch = term.examples.take(rows)
    return {**batch, KEYS: any_keys(*np.shape(rows))} if takes_key(term.loss) else batch


def per_example(f: Callable) -> Callable:
    """Turn a loss of one example into a loss of a batch, by `jax.vmap`.

    `f(params, example, key)` returns one number. `example` is a dict with one row of each column,
    `key` is a JAX key of its own:

    >>> @mixfl.per_example
    ... def loss(params, example, key):
    ...     keep = jax.random.bernoulli(key, 0.9, example["x"].shape)
    ...     return (example["x"] * keep / 0.9 @ params["w"] - example["y"]) ** 2
    >>> mixfl.Federated(loss, clients).name
    'federated'

    `f(params, example)`, without a key, works too. If `key` has a default value, the loss can also
    be called without keys, as in an evaluation.
    """
    loss = functools.partial(_of_batch, f)
    loss.takes = takes(f)  # type: ignore[attr-defined]
    return loss


def _of_batch(f, params, batch, key=None, **more):
    import jax

    if key is None:
        return jax.vmap(lambda example: f(params, example, **more))(batch)
    return jax.vmap(lambda example, k: call(f, params, example, k, more))(batch, key)


def call(loss: Callable, params: Any, batch: Any, key: Any, more: Mapping[str, Any]) -> Any:
    """The third parameter may have any name; only `key` may have another place."""
    if "key" in inspect.signature(loss).parameters:
        return loss(params, batch, key=key, **more)
    return loss(params, batch, key, **more)
