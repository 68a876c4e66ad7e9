"""Exact low-rank first layers: a dense layer on raw inputs without a copy of it per client.

With plain SGD, a client's weights of such a layer are at every step

    W = W_0 + X' C + g G

where X [steps * rows, D] has all its inputs of the round, G is the augmenting gradient and g is
-eta times the steps taken. C has a row for each input: 0 until the step that uses the input, then
-eta times the gradient at the layer's output. So a client trains C and g in place of W. It needs
only the products X W_0 and X G, and the Gram matrix X X'. The server needs the sum over clients of
p_i X_i' C_i. For a whole cohort these are a few large products. Client by client, most of the time
would go into copies of W.

first_layers.py finds these layers in the loss."""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.algorithms.client_opt import plain_steps
from mixfl.algorithms.marks import uses_own_loss_only
from mixfl.errors import MixflError
from mixfl.forms.base import Candidate, Form, Part, Refused, map_parts
from mixfl.forms.first_layers import find_layers, first_layers, may_pay, pays
from mixfl.forms.jaxpr import Traced
from mixfl.trees import name, named_leaves, on_named

UNROLL = 10


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Local:
    """Stands for W: W_0 + X' C + g G."""

    c: Any  # [steps, rows, width]
    g: Any  # scalar


def is_local(leaf) -> bool:
    return isinstance(leaf, Local)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Factor(Part):
    """Stands for a change of W: X' C."""

    c: Any  # [steps, rows, width]
    gram: Any  # X X', [steps, rows, steps, rows]; None if norms are not needed
    weight: str = dataclasses.field(metadata={"static": True})
    kept = True

    def squares(self):  # ||X' C||^2 = sum of C' (X X') C
        return jnp.einsum("kbh,kbjc,jch->", self.c, self.gram, self.c)

    def scaled(self, factor):
        return dataclasses.replace(self, c=factor * self.c)

    def to_keep(self):
        return dataclasses.replace(self, gram=None)


class Products(NamedTuple):
    """A layer's products with the inputs X_k of one step."""

    base: Any  # X_k W_0, [rows, width]
    aug: Any  # X_k G, or None
    gram: Any  # X_k X_j' for each step j (the last only for norms), [rows, steps, rows]
    step: Any  # k


class LowRank(Form):
    name = "low_rank"
    large_groups = True

    def __init__(self, weights: Collection[str], norms: bool):
        self.weights = weights
        self.norms = norms  # the norms of the clients' changes are needed

    def start(self, term, broadcast, feeds):
        """Computes the products for all clients, and puts C and g in place of the weights."""
        data, mask, _ = feeds.batches
        count, steps = mask.shape[:2]
        batch = {k: jax.ShapeDtypeStruct(a.shape[2:], a.dtype) for k, a in data.items()}
        traced = Traced(term.loss, broadcast.x, batch)
        layers = {n: layer for n, layer in find_layers(traced).items() if n in self.weights}
        compute = traced.function(list(traced.data.values()), [v.inputs for v in layers.values()])
        raw = jax.vmap(jax.vmap(compute))(*(data[k] for k in traced.data))
        # [clients * steps * rows, D] each. Every use takes them in this shape: for another one, XLA
        # would compute them again.
        inputs = {n: a.reshape(-1, a.shape[-1]) for n, a in zip(layers, raw, strict=True)}
        products = {
            n: self._products(n, layer, inputs[n], broadcast, count, steps)
            for n, layer in layers.items()
        }

        def local(tree, g: float):
            def begin(_, layer):
                return Local(jnp.zeros((steps, layer.rows, layer.width)), jnp.full((), g))

            return on_named(begin, layers, tree)

        read = traced.reads([v.output for v in layers.values()], traced.jaxpr.outvars)
        columns = {k: data[k] for k, v in traced.data.items() if v in read}
        x = named_leaves(broadcast.x)
        shapes = {n: jax.ShapeDtypeStruct(x[n].shape, x[n].dtype) for n in layers}
        loss = LowRankLoss(term.loss, shapes, batch)
        aug = None if broadcast.aug is None else local(broadcast.aug, 1.0)
        return (
            Started(self.weights, self.norms, layers, inputs, steps),
            dataclasses.replace(term, loss=loss),
            broadcast._replace(x=local(broadcast.x, 0.0), aug=aug),
            feeds._replace(batches=feeds.batches._replace(data=columns, extra=products)),
        )

    def _products(self, n, layer, x_i, broadcast, count, steps) -> Products:
        def times(w):
            product = x_i @ (w.T if layer.transposed else w)
            return product.reshape(count, steps, layer.rows, layer.width)

        aug = None if broadcast.aug is None else times(named_leaves(broadcast.aug)[n])
        step = jnp.broadcast_to(jnp.arange(steps), (count, steps))
        gram_i = gram(x_i, count, steps, self.norms)
        return Products(times(named_leaves(broadcast.x)[n]), aug, gram_i, step)

    def trained(self, numbers):
        return {n: k for n, k in numbers.items() if n not in self.weights}


class Started(LowRank):
    """The form in a running round, with the inputs of all clients."""

    def __init__(self, weights, norms, layers, inputs, steps):
        super().__init__(weights, norms)
        self.layers, self.inputs, self.steps = layers, inputs, steps

    def summand(self, sums, feed):
        def factor(path, leaf):
            if not is_local(leaf):
                return leaf
            weight = name(path)
            gram = feed.batches.extra[weight].gram if self.norms else None
            return Factor(leaf.c, gram, weight)

        def marked(tree):
            return jax.tree_util.tree_map_with_path(factor, tree, is_leaf=is_local)

        unweighted = None if sums.unweighted is None else marked(sums.unweighted)
        return sums._replace(weighted=marked(sums.weighted), unweighted=unweighted)

    def widen(self, sums, without):
        def total(leaf):
            return self._total(leaf, without) if isinstance(leaf, Factor) else leaf

        return map_parts(total, sums)

    def _total(self, stacked: Factor, without):
        """The sum over clients of X_i' C_i."""
        x_i, layer = self.inputs[stacked.weight], self.layers[stacked.weight]
        c = stacked.c.reshape(-1, layer.width)
        total = c.T @ x_i if without is None else jax.lax.cond(
            jnp.any(without), lambda: _one_by_one(c, x_i, without), lambda: c.T @ x_i
        )  # fmt: skip
        if not layer.transposed:
            # Transposing after the product is faster; the barrier keeps XLA from undoing it.
            total = jax.lax.optimization_barrier(total).T
        return total


def _one_by_one(c, x_i, without):
    """C' X without the inputs of some clients, which may not be finite. Rare: it saves memory."""
    own = len(x_i) // len(without)

    def one(i, total):
        c_i, own_x = (jax.lax.dynamic_slice_in_dim(a, own * i, own) for a in (c, x_i))
        return total + c_i.T @ jnp.where(without[i], 0, own_x)

    zero = jnp.zeros((c.shape[1], x_i.shape[1]), jnp.result_type(c, x_i))
    return jax.lax.fori_loop(0, len(without), one, zero)


# Choosing the form


def choose(c: Candidate) -> Form | Refused | None:
    wanted = c.settings.first_layer == "low-rank"
    if c.settings.first_layer == "plain" or not c.algorithm.feed.clients or not c.term.here:
        return None
    try:
        some = wanted or any(map(may_pay, jax.tree.leaves(c.x)))
        layers = first_layers(c.term, c.x, c.batch) if some else {}
    except Exception:  # the preflight says what is wrong with the loss
        layers = {}
    weights = [n for n, layer in layers.items() if wanted or pays(layer, c.steps)]
    if c.single:
        reason = f"aggregation = {c.settings.aggregation} compares the whole changes of all clients"
    elif c.elements:
        reason = "the aggregation changes single numbers of what clients send"
    elif not uses_own_loss_only(c.algorithm) or not plain_steps(c.settings):
        reason = "the clients' steps are not plain SGD on their own loss"
    elif c.settings.grad_clip != "off" or c.settings.compute != "float32":
        reason = "grad_clip and compute = bfloat16 need a layer's whole gradient or weights"
    elif not weights:
        reason = "no loss has a dense layer on raw inputs whose weights are used nowhere else"
    else:
        return LowRank(weights, c.squares)
    return Refused(reason) if wanted else None


def required(refused: str) -> MixflError:
    """The error for users who asked for this form."""
    return MixflError(f"first_layer = low-rank, but {refused}. Set first_layer = auto.")


# Training in the form


def gram(x, clients: int, steps: int, whole: bool = False):
    """Products of inputs [clients * steps * rows, D]: for each client, of the rows of every step
    with those of the steps before, [clients, steps, rows, steps - 1, rows]. The first step has no
    step before it, so its part is 0. With `whole`, of all steps with all steps:
    [clients, steps, rows, steps, rows]."""
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
        products = (later @ sooner.T).reshape(steps - 1, rows, steps - 1, rows)
        return None, jnp.pad(products, [(1, 0), (0, 0), (0, 0), (0, 0)])

    # A loop, because batched products are slow on CPUs. Unrolled, it can use several cores.
    return jax.lax.scan(one, None, jnp.arange(clients), unroll=UNROLL)[1]


@dataclass(frozen=True)
class LowRankLoss:
    """`loss` for parameters with Local in place of weights, and batches with Products as extra.

    `weights` and `batch` have the shapes that `loss` itself takes.
    """

    loss: Callable
    weights: dict[str, Any]
    batch: dict[str, Any]

    def __call__(self, x, data):
        return self.loss(x, data)  # with whole weights

    def gradient_in_form(self, mean, x, batch):
        return jax.value_and_grad(lambda x: mean(self._losses(x, batch.data, batch.extra)))(x)

    def _losses(self, x, data, products):
        paths, tree = jax.tree_util.tree_flatten_with_path(x, is_leaf=is_local)
        leaves = {name(path): leaf for path, leaf in paths}
        full = tree.unflatten([self.weights.get(n, leaf) for n, leaf in leaves.items()])
        # Traced again: a client's tables may have fewer rows than the server's.
        traced = Traced(self.loss, full, self.batch | data)
        layers = {n: layer for n, layer in find_layers(traced).items() if n in self.weights}
        given = {traced.params[n]: leaf for n, leaf in leaves.items() if n not in self.weights}
        given |= {traced.data[k]: v for k, v in data.items()}
        for n, layer in layers.items():
            z = product(leaves[n], products[n])
            given[layer.output] = z.T if layer.swapped else z
        (losses,) = traced.function(list(given), traced.jaxpr.outvars)(*given.values())
        return losses


@jax.custom_vjp
def product(w: Local, p: Products):
    """X_k W. Its derivative with respect to W is a Local: the gradient X_k' D has D as the part of
    C that belongs to step k, and no part along G."""
    z = p.base + jnp.einsum("bjc,jch->bh", p.gram, w.c[: p.gram.shape[1]])
    return z if p.aug is None else z + w.g * p.aug


def _forward(w, p):
    return product(w, p), (w, p)


def _backward(kept, d):
    w, p = kept
    return Local(jnp.zeros_like(w.c).at[p.step].set(d), jnp.zeros_like(w.g)), None


product.defvjp(_forward, _backward)
