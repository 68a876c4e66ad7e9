"""Work of a traced round that is done on the host, by something other than JAX.

`host_call` stands for it in the trace. Where the loops run on the host (dispatch.py), it is simply
called. In a compiled program it would be a callback.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

NAME = "host_call"


class Work(Protocol):
    def __call__(self, given: Sequence[jax.Array], batched: Sequence[bool]) -> jax.Array:
        """One array of float32. Arguments that are `batched` have an axis of clients in front. If
        there are any, so has the result."""


_call = Primitive(NAME)


def host_call(work: Work, size: int, *given: Any) -> jax.Array:
    """What `work` returns: an array of `size` numbers."""
    return _call.bind(*given, work=work, size=size, batched=(False,) * len(given))


def run(eqn: Any, given: Sequence[jax.Array]) -> list[jax.Array]:
    """One that was found in a trace."""
    return [eqn.params["work"](given, eqn.params["batched"])]


def _shape(given: Sequence[Any], size: int, batched: Sequence[bool]) -> tuple[int, ...]:
    clients = [a.shape[:1] for a, own in zip(given, batched, strict=True) if own]
    return (*clients[0], size) if clients else (size,)


@_call.def_abstract_eval
def _abstract(*given, work, size, batched):
    return jax.core.ShapedArray(_shape(given, size, batched), jnp.float32)


def _of_clients(given, axes, *, work, size, batched):
    new = tuple(axis is not None for axis in axes)
    front = [jnp.moveaxis(a, axis, 0) if own else a
             for a, axis, own in zip(given, axes, new, strict=True)]  # fmt: skip
    if not any(batched):
        return _call.bind(*front, work=work, size=size, batched=new), 0
    places = [  # there is an axis of clients already: a call for each place of this one
        _call.bind(*(a[i] if own else a for a, own in zip(front, new, strict=True)),
                   work=work, size=size, batched=batched)
        for i in range(front[new.index(True)].shape[0])
    ]  # fmt: skip
    return jnp.stack(places), 0


def _callback(*given, work, size, batched):
    def call(*given):
        return work([jnp.asarray(a) for a in given], batched)

    like = jax.ShapeDtypeStruct(_shape(given, size, batched), jnp.float32)
    return jax.pure_callback(call, like, *given)


batching.primitive_batchers[_call] = _of_clients
mlir.register_lowering(_call, mlir.lower_fun(_callback, multiple_results=False))
