"""Is a loss pure? The same inputs must give the same loss.

A loss is traced twice. What it draws or counts in Python then differs between the two traces. A
loss that calls out of the compiled program is also computed twice.
"""

import hashlib
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from mixfl.errors import MixflError

CALLS = ("pure_callback", "io_callback")
LARGE = 1 << 16  # bytes of a constant, above which its digest is compared
ADVICE = (
    "is not pure: the same inputs give another loss. Draw random numbers (dropout, augmentation) "
    "with a key, loss(params, batch, key); counters and other things that change must be columns "
    "of the data"
)


class ImpureLoss(MixflError):
    """A loss with an effect or a value that its inputs don't determine."""


def check_pure(name: str, loss: Callable, shapes: tuple, inputs: Callable[[], tuple]) -> None:
    """`inputs()` returns arrays of these shapes, if they are needed."""
    first, second = (jax.make_jaxpr(lambda *args: loss(*args))(*shapes) for _ in range(2))
    content = list(_content(first))
    same = content == list(_content(second))
    if same and any(piece in CALLS for piece in content):
        args = inputs()
        once, again = (np.asarray(loss(*args)) for _ in range(2))
        same = np.array_equal(once, again, equal_nan=True)
    if not same:
        raise ImpureLoss(f"{name} {ADVICE}.")


def _content(closed: ClosedJaxpr) -> Iterator:
    """A program's operations and numbers, without the names of its variables."""
    yield from map(_number, closed.consts)
    yield from _operations(closed.jaxpr)


def _operations(jaxpr: Jaxpr) -> Iterator:
    place = {v: i for i, v in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for v in eqn.invars:
            yield _number(v.val) if isinstance(v, Literal) else place[v]
        for name in sorted(eqn.params):
            yield name
            yield from _parameter(eqn.params[name])
        for v in eqn.outvars:
            place[v] = len(place)
            yield str(v.aval)
    for v in jaxpr.outvars:
        yield _number(v.val) if isinstance(v, Literal) else place[v]


def _parameter(value) -> Iterator:
    if isinstance(value, ClosedJaxpr):
        yield from _content(value)
    elif isinstance(value, Jaxpr):
        yield from _operations(value)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _parameter(each)
    elif not callable(value):
        yield re.sub(r"0x[0-9a-f]+", "", str(value))


def _number(value):
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    a = np.ascontiguousarray(value)
    content = a.tobytes() if a.nbytes < LARGE else hashlib.sha256(a.reshape(-1).view(np.uint8).data)
    return a.shape, str(a.dtype), content if isinstance(content, bytes) else content.digest()
