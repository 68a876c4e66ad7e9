"""Arrays that losses need and nobody trains: loss(params, batch, frozen).

A problem gives them to its losses. (JAX is imported when it is needed: making a problem must be
possible without it.)
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mixfl.errors import MixflError
from mixfl.losses import takes


class Frozen:
    """Arrays that losses need and nobody trains. `given` is a pytree of arrays, or a function that
    loads it when it is first needed.

    A loss that uses such arrays has them as `.frozen`, and `.with_frozen(arrays)` is the same loss
    with others of these shapes. So a compiled program takes them as an argument: as constants of
    the program, they would be in memory several times.
    """

    def __init__(self, given: Any):
        self.given = given

    @property
    def loaded(self) -> bool:
        """Are the arrays made by a function? In a deployment, only the server calls it."""
        return callable(self.given)

    @functools.cached_property
    def arrays(self) -> Any:
        import jax

        tree = self.given() if self.loaded else self.given
        with jax.ensure_compile_time_eval():  # also while a function is traced
            arrays = jax.tree.map(_array, tree)
        if not jax.tree.leaves(arrays):
            raise MixflError("frozen: it has no arrays.")
        return arrays

    @functools.cached_property
    def digest(self) -> str:
        """Of names, types, shapes and values."""
        from mixfl.trees import named_leaves

        digest = hashlib.sha256()
        for name, leaf in sorted(named_leaves(self.arrays).items()):
            a = np.ascontiguousarray(leaf)
            digest.update(f"{name} {a.dtype} {a.shape}\n".encode())
            digest.update(a.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def _array(leaf: Any) -> Any:
    import jax

    kind = np.asarray(leaf).dtype.kind if not isinstance(leaf, jax.Array) else None
    if kind is not None and kind not in "biufcV":  # V: bfloat16 and the like
        raise MixflError(f"frozen: expected a pytree of arrays, got a {type(leaf).__name__} in it.")
    return jax.numpy.asarray(leaf)


class WithFrozen:
    """A user's loss, with the arrays that it takes as `frozen`."""

    def __init__(self, loss: Callable, frozen: Frozen, arrays: Any = None):
        self.loss, self.frozen, self.given = loss, frozen, arrays
        self.takes = takes(loss)._replace(frozen=False)

    def __call__(self, *args, **more):
        arrays = self.frozen.arrays if self.given is None else self.given
        return self.loss(*args, **more, frozen=arrays)

    def with_frozen(self, arrays: Any) -> "WithFrozen":
        return WithFrozen(self.loss, self.frozen, arrays)


def with_frozen(loss: Callable, frozen: Frozen | None) -> Callable:
    """The loss with a problem's frozen arrays, if it takes some."""
    if isinstance(loss, WithFrozen) and frozen is not None and loss.frozen is not frozen:
        return WithFrozen(loss.loss, frozen)
    rebound, own = getattr(loss, "rebound", None), getattr(loss, "frozen", None)
    if rebound is not None and own is not None and frozen not in (None, own):
        return rebound(frozen)
    if not takes(loss).frozen:
        return loss
    if frozen is None:
        raise MixflError("a loss has a parameter `frozen`: give Problem(..., frozen=...).")
    return WithFrozen(loss, frozen)


def frozen_of(losses: Iterable[Callable]) -> list[Frozen]:
    """What these losses have, each once."""
    held = [getattr(loss, "frozen", None) for loss in losses]
    return list(dict.fromkeys(h for h in held if isinstance(h, Frozen)))


def bound(loss: Callable, arrays: dict[Frozen, Any]) -> Callable:
    """The loss with these arrays in place of its own."""
    own = getattr(loss, "frozen", None)
    return loss.with_frozen(arrays[own]) if own in arrays else loss  # type: ignore[attr-defined]


def frozen_arrays(term: Any) -> list[Any]:
    """Those of the term's loss."""
    return [f.arrays for f in frozen_of([term.loss])]


def with_arrays(term: Any, arrays: Sequence[Any]) -> Any:
    """The term with others in their place, such as a program's arguments."""
    given = dict(zip(frozen_of([term.loss]), arrays, strict=True))
    return with_losses([term], [bound(term.loss, given)])[0]


def with_losses(terms: Sequence[Any], losses: Sequence[Callable]) -> tuple:
    return tuple(
        t if t.loss is loss else dataclasses.replace(t, loss=loss)
        for t, loss in zip(terms, losses, strict=True)
    )
