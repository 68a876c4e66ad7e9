"""Finds the dense layers of a loss, and among them the first layers: those on raw inputs.

A dense layer is a product of a parameter that is used nowhere else. Of a first layer, what it is
multiplied by depends on the batch alone: low_rank.py trains such layers without a copy of them per
client. turned.py holds the weights of dense layers the other way round.
"""

import math
from typing import Any, NamedTuple, cast

import numpy as np
from jax.extend.core import Literal

from mixfl.forms.jaxpr import Traced
from mixfl.problem import Federated
from mixfl.randomness import batch_shapes

COPIED = 2**15  # numbers of a weight; copies of smaller ones stay in the cache, and cost little


class Layer(NamedTuple):
    depth: int  # numbers of an input
    width: int
    rows: int  # inputs in a batch
    transposed: bool  # the parameter is [width, D], not [D, width]
    swapped: bool  # the product is [width, rows], not [rows, width]
    inputs: Any  # the variable that holds the inputs, [rows, D]; rows may have several axes
    output: Any  # the variable that holds the product


def dense_layers(traced: Traced) -> dict[str, Layer]:
    """The dense layers of a loss, by the name of the weight."""
    layers = {}
    for weight, parameter in traced.params.items():
        w, eqn = _only_use(traced, parameter)
        if eqn is None or eqn.primitive.name != "dot_general":
            continue
        contracted, batched = eqn.params["dimension_numbers"]
        i = eqn.invars.index(w)
        x, (w_dims, x_dims) = eqn.invars[1 - i], (contracted[i], contracted[1 - i])
        if isinstance(x, Literal):
            continue
        w_is, x_is = cast(Any, w.aval), cast(Any, x.aval)
        if (
            w_is.ndim == 2 and len(w_dims) == 1 and tuple(x_dims) == (x_is.ndim - 1,)
            and not any(map(len, batched)) and w_is.dtype == x_is.dtype == np.float32
        ):  # fmt: skip
            layers[weight] = Layer(
                w_is.shape[w_dims[0]], w_is.shape[1 - w_dims[0]], math.prod(x_is.shape[:-1]),
                (w_dims[0] == 1) == (w is parameter), i == 0, x, eqn.outvars[0],
            )  # fmt: skip
    return layers


def _only_use(traced: Traced, parameter) -> tuple[Any, Any]:
    """A parameter, or the transposed of it, and the only operation that uses it; None if there are
    several."""
    users = traced.users(parameter)
    if len(users) == 1 and users[0].primitive.name == "transpose":
        (parameter,) = users[0].outvars
        users = traced.users(parameter)
    return parameter, users[0] if len(users) == 1 else None


def find_layers(traced: Traced) -> dict[str, Layer]:
    """The first layers of a loss, by the name of the weight."""
    return {
        n: layer
        for n, layer in dense_layers(traced).items()
        if layer.inputs not in traced.moving and layer.inputs.aval.ndim == 2
    }


def first_layers(term: Federated, x, rows: int) -> dict[str, Layer]:
    """The first layers of a term's loss, for batches of `rows` examples."""
    return find_layers(Traced(term.loss, x, batch_shapes(term, rows)))


def pays(layer: Layer, steps: int) -> bool:
    """Is the low-rank form likely to be faster? It saves a client's copies of the weight, and its
    Gram matrices grow with the square of a client's inputs."""
    saves = layer.depth * layer.width >= COPIED  # as may_pay
    return saves and steps * layer.rows <= 2 * layer.width


def may_pay(weight: Any) -> bool:
    """Could it be the weight of such a layer? Known without tracing the loss."""
    return weight.ndim == 2 and weight.size >= COPIED
