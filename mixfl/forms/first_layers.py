"""Finds the first layers of a loss: dense layers on raw inputs.

A first layer is the product of a parameter, which is used nowhere else, with something that depends
on the batch alone. low_rank.py trains such layers without a copy of them per client.
"""

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
    inputs: Any  # the variable that holds the inputs, [rows, D]
    output: Any  # the variable that holds the product


def find_layers(traced: Traced) -> dict[str, Layer]:
    """The first layers of a loss, by the name of the weight."""
    layers = {}
    for weight, w in traced.params.items():
        users = traced.users(w)
        if len(users) != 1 or users[0].primitive.name != "dot_general":
            continue
        (eqn,) = users
        contracted, batched = eqn.params["dimension_numbers"]
        i = eqn.invars.index(w)
        x, (w_dims, x_dims) = eqn.invars[1 - i], (contracted[i], contracted[1 - i])
        if isinstance(x, Literal):
            continue
        w_is, x_is = cast(Any, w.aval), cast(Any, x.aval)
        if (
            x not in traced.moving and w_is.ndim == x_is.ndim == 2 and len(w_dims) == 1
            and tuple(x_dims) == (1,) and not any(map(len, batched))
            and w_is.dtype == x_is.dtype == np.float32
        ):  # fmt: skip
            layers[weight] = Layer(
                w_is.shape[w_dims[0]], w_is.shape[1 - w_dims[0]], x_is.shape[0],
                w_dims[0] == 1, i == 0, x, eqn.outvars[0],
            )  # fmt: skip
    return layers


def first_layers(term: Federated, x, rows: int) -> dict[str, Layer]:
    """The first layers of a term's loss, for batches of `rows` examples."""
    return find_layers(Traced(term.loss, x, batch_shapes(term, rows)))


def pays(layer: Layer, steps: int) -> bool:
    """Is the low-rank form likely to be faster? It saves a client's copies of the weight, and its
    Gram matrices grow with the square of a client's inputs."""
    saves = layer.depth * layer.width >= COPIED
    return saves and steps * layer.rows <= 2 * layer.width
