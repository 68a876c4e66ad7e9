"""Exact low-rank first layers: a dense layer on raw inputs without a copy of it per client.

With plain SGD, a client's weights of such a layer are at every step

    W = W_0 + X' C + g G

where X [steps * rows, D] are all its inputs of the round, C has a row for each (-eta times the
gradient at the layer's output, once the input had its turn; 0 before), G is the augmenting
gradient and g is -eta times the steps taken. So a client trains C and g in place of W. What it
needs of the weights are the products X W_0 and X G and the Gram matrix X X'; the server needs the
sum over clients of p_i (X_i' C_i + g_i G). For a whole cohort these are a few large products,
where client by client the time went into copies of W.

Layers are found in the loss itself: the product of a parameter, which is used nowhere else, with
something that follows from the batch alone.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mixfl.algorithms.contract import Batches, ClientFeed, Message
from mixfl.forms.jaxpr import Traced
from mixfl.problem import Federated
from mixfl.trees import name, named_leaves, on_named

UNROLL = 10
PRODUCTS = "products of first layers"  # their column in a batch, beside the user's


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Local:
    """In place of W: W_0 + X' C + g G."""

    c: Any  # [steps, rows, width]
    g: Any  # scalar


def is_local(leaf) -> bool:
    return isinstance(leaf, Local)


class Products(NamedTuple):
    """Of a layer and the inputs X_k of one step."""

    base: Any  # X_k W_0, [rows, width]
    aug: Any  # X_k G, or None
    gram: Any  # X_k X_j' for the steps j (but the last, where not asked for), [rows, steps, rows]
    step: Any  # k


# Finding the layers


class Layer(NamedTuple):
    width: int
    rows: int  # inputs in a batch
    transposed: bool  # the parameter is [width, D], not [D, width]
    turned: bool  # the product is [width, rows], not [rows, width]
    inputs: Any  # the variable that has the inputs, [rows, D]
    output: Any  # the variable that has the product


def find_layers(traced: Traced) -> dict[str, Layer]:
    """The first layers of a loss, by the name of the weight."""
    found = {}
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
            found[weight] = Layer(
                w_is.shape[1 - w_dims[0]], x_is.shape[0], w_dims[0] == 1, i == 0,
                x, eqn.outvars[0],
            )  # fmt: skip
    return found


def first_layers(term: Federated, x, rows: int) -> dict[str, Layer]:
    """Those of a term's loss, on batches of so many examples of its data."""
    batch = {
        k: jax.ShapeDtypeStruct((rows, *c.shape), c.dtype) for k, c in term.examples.columns.items()
    }
    return find_layers(Traced(term.loss, x, batch))


def pays(layer: Layer, steps: int) -> bool:
    """Whether it is likely to be faster than the plain way: the Gram matrices grow with the square
    of a client's inputs."""
    return steps * layer.rows <= 2 * layer.width


# Training with them


class Cohort(NamedTuple):
    """A cohort that trains C and g in place of the layers' weights."""

    term: Federated
    message: Message
    clients: ClientFeed
    # (weight's name, Local of all clients, stacked, the clients that are left out) -> their sum
    whole: Callable


def low_rank(term: Federated, message: Message, clients: ClientFeed,
             weights: Collection[str], norms: bool = False) -> Cohort:  # fmt: skip
    """`clients` has the feeds of all, [clients, ...]; `weights` names the layers; with `norms`, a
    client can tell the norm of its change."""
    data, mask = clients.batches
    count, steps = mask.shape[:2]
    batch = {k: jax.ShapeDtypeStruct(a.shape[2:], a.dtype) for k, a in data.items()}
    traced = Traced(term.loss, message.x, batch)
    layers = {n: layer for n, layer in find_layers(traced).items() if n in weights}
    x, aug = named_leaves(message.x), None if message.aug is None else named_leaves(message.aug)
    find = traced.function(list(traced.data.values()), [v.inputs for v in layers.values()])
    found = jax.vmap(jax.vmap(find))(*(data[k] for k in traced.data))
    # [clients * steps * rows, D] each. All that needs them takes them in this shape: in another one
    # XLA would compute them once more.
    inputs = {n: a.reshape(-1, a.shape[-1]) for n, a in zip(layers, found, strict=True)}

    def products(weight: str) -> Products:
        x_i, layer = inputs[weight], layers[weight]

        def times(w):
            product = x_i @ (w.T if layer.transposed else w)
            return product.reshape(count, steps, layer.rows, layer.width)

        return Products(
            times(x[weight]), None if aug is None else times(aug[weight]),
            gram(x_i, count, steps, norms),
            jnp.broadcast_to(jnp.arange(steps), (count, steps)),
        )  # fmt: skip

    def whole(weight: str, stacked: Local, without=None):
        x_i, layer = inputs[weight], layers[weight]
        if without is not None:  # their inputs may not be finite
            x_i = jnp.where(jnp.repeat(without, steps * layer.rows)[:, None], 0, x_i)
        total = stacked.c.reshape(-1, layer.width).T @ x_i
        if not layer.transposed:
            # Turned afterwards: the product is faster in this form, which XLA would undo.
            total = jax.lax.optimization_barrier(total).T
        return total if aug is None else total + jnp.sum(stacked.g) * aug[weight]

    def local(tree, g: float):
        def start(_, layer):
            return Local(jnp.zeros((steps, layer.rows, layer.width)), jnp.full((), g))

        return on_named(start, layers, tree)

    outputs = [v.output for v in layers.values()]
    read = traced.reads(outputs, traced.jaxpr.outvars)
    columns = {k: data[k] for k, v in traced.data.items() if v in read}
    columns[PRODUCTS] = {weight: products(weight) for weight in layers}
    shapes = {weight: jax.ShapeDtypeStruct(x[weight].shape, x[weight].dtype) for weight in layers}
    return Cohort(
        dataclasses.replace(term, loss=local_loss(term.loss, shapes, batch)),
        Message(local(message.x, 0.0), None if aug is None else local(message.aug, 1.0)),
        clients._replace(batches=Batches(columns, mask)),
        whole,
    )


def gram(x, clients: int, steps: int, whole: bool = False):
    """Of inputs [clients * steps * rows, D], the products of a client's steps with those before:
    [clients, steps, rows, steps - 1, rows]. The first step has none, and its part is 0. With
    `whole`, those of all steps with all: [clients, steps, rows, steps, rows]."""
    own = len(x) // clients
    rows = own // steps
    if whole:

        def every(_, i):
            x_i = jax.lax.dynamic_slice_in_dim(x, own * i, own)
            return None, (x_i @ x_i.T).reshape(steps, rows, steps, rows)

        return jax.lax.scan(every, None, jnp.arange(clients), unroll=UNROLL)[1]
    if steps == 1:
        return jnp.zeros((clients, 1, rows, 0, rows))

    def one(_, i):
        sooner, later = (
            jax.lax.dynamic_slice_in_dim(x, own * i + begin, own - rows) for begin in (0, rows)
        )
        found = (later @ sooner.T).reshape(steps - 1, rows, steps - 1, rows)
        return None, jnp.pad(found, [(1, 0), (0, 0), (0, 0), (0, 0)])

    # A loop, as products of batches are slow on CPUs; several at once can use several cores.
    return jax.lax.scan(one, None, jnp.arange(clients), unroll=UNROLL)[1]


def local_loss(loss, weights, batch) -> Callable:
    """`loss` for parameters with Local in place of weights, and batches that have Products.

    `weights` and `batch` are the shapes of what `loss` itself takes.
    """

    def local(x, data):
        paths, tree = jax.tree_util.tree_flatten_with_path(x, is_leaf=is_local)
        leaves = {name(path): leaf for path, leaf in paths}
        full = tree.unflatten([weights.get(n, leaf) for n, leaf in leaves.items()])
        # Traced anew: of tables, a client may have fewer rows than the server.
        traced = Traced(loss, full, batch | {k: v for k, v in data.items() if k != PRODUCTS})
        layers = {n: layer for n, layer in find_layers(traced).items() if n in weights}
        given = {traced.params[n]: leaf for n, leaf in leaves.items() if n not in weights}
        given |= {traced.data[k]: v for k, v in data.items() if k != PRODUCTS}
        for n, layer in layers.items():
            z = product(leaves[n], data[PRODUCTS][n])
            given[layer.output] = z.T if layer.turned else z
        (losses,) = traced.function(list(given), traced.jaxpr.outvars)(*given.values())
        return losses

    return local


@jax.custom_vjp
def product(w: Local, p: Products):
    """X_k W. Its derivative is that of W in the form of Local: the gradient X_k' D has D as the
    part of C that belongs to step k, and no part along G."""
    z = p.base + jnp.einsum("bjc,jch->bh", p.gram, w.c[: p.gram.shape[1]])
    return z if p.aug is None else z + w.g * p.aug


def _forward(w, p):
    return product(w, p), (w, p)


def _backward(kept, d):
    w, p = kept
    return Local(jnp.zeros_like(w.c).at[p.step].set(d), jnp.zeros_like(w.g)), None


product.defvjp(_forward, _backward)
