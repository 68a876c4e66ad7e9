"""A summand as it is sent. What follows from the rest of it is left out."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.aggregation.base import Chain, unweighted
from mixfl.algorithms.contract import Params, Sums
from mixfl.forms.base import is_part, map_parts


class Sent(NamedTuple):
    weighted: Params  # p_i u_i, or codes of u_i
    grads: Params | None
    weight: Any  # p_i
    steps: Any  # K_i
    loss: Any
    extra: Any = None  # an algorithm's own fields
    report: Any = None  # of the step that makes codes: bytes


TREES = ("weighted", "grads", "extra", "report")  # the fields that are trees


def encoded(chain: Chain, told: Any, summand: Sums, key: Any, x: Params) -> Sent:
    """What a client sends; `chain` has the steps at the client."""
    code, report = chain.coded(told, summand, key)
    code = map_parts(lambda a: a.values if is_part(a) else a, code)
    if chain.coder is None:
        return sent(code, x, chain.half)
    dtype = jnp.int8 if chain.coder.bits <= 8 else jnp.int16
    weighted, grads = (_cast(tree, dtype) for tree in (code.weighted, code.grads))
    report = jnp.concatenate([jnp.atleast_1d(a) for a in report]).astype(jnp.uint8)
    return Sent(weighted, grads, code.weight, code.steps, code.loss, code.extra, report)


def sent(code: Sums, x: Params, half: bool = False) -> Sent:
    """In the dtypes of the model `x`, if they are smaller: p_i is a 32-bit number, and so is p_i
    times a bfloat16 one. `half`: in bfloat16, without a loss, because it was rounded to that."""

    def cast(a, like):
        return a.astype(like.dtype) if like.dtype == jnp.bfloat16 else a

    if half:
        weighted, grads = (_cast(tree, jnp.bfloat16) for tree in (code.weighted, code.grads))
    else:
        weighted, grads = jax.tree.map(cast, code.weighted, x), code.grads
    return Sent(weighted, grads, code.weight, code.steps, code.loss, code.extra)


def restored(given: Sent, like: Sums) -> Sums:
    """`like` has the shapes of the summand. Codes are still codes."""

    def back(tree, like):
        return None if tree is None else jax.tree.map(lambda a, b: a.astype(b.dtype), tree, like)

    weighted, grads = back(given.weighted, like.weighted), back(given.grads, like.grads)
    taken = jnp.arange(1, like.by_steps.shape[0] + 1) == given.steps
    by_steps = jnp.where(taken, given.weight, 0.0)
    summand = Sums(
        weighted, given.weight, None, grads, given.steps, by_steps, given.loss,
        jnp.minimum(given.steps, 1.0), given.extra,
    )  # fmt: skip
    both = like.unweighted is not None
    return summand._replace(unweighted=unweighted(summand)) if both else summand


def sent_bytes(sent: Sent, bits: int | None) -> float:
    """Bytes of a summand's shapes, with codes of so many bits. Without the loss, which is there
    only to be shown."""

    def of(tree, bits=None):
        return sum(
            math.prod(a.shape) * (bits or 8 * a.dtype.itemsize) / 8 for a in jax.tree.leaves(tree)
        )

    numbers = (sent.weight, sent.steps, sent.extra, sent.report)
    return of((sent.weighted, sent.grads), bits) + of(numbers)


def _cast(tree, dtype):
    return None if tree is None else jax.tree.map(lambda a: a.astype(dtype), tree)
