"""Weights of dense layers, held the other way round while clients train.

The axis of a weight that comes last is the one along which memory is read. A layer of 784 inputs
and 10 units is usually written as [784, 10]. Its gradients and steps then go through memory ten
numbers at a time, and take twice as long as with [10, 784]. With one to four inputs at a time, a
wide layer is faster as [inputs, units]. So the weights are turned before the first client trains,
and the sums of their changes afterwards. docs/simulator.md has what was measured.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

import jax

from mixfl.algorithms.client_opt import plain_steps
from mixfl.algorithms.marks import uses_own_loss_only
from mixfl.forms.base import Candidate, Form
from mixfl.forms.first_layers import Layer, dense_layers
from mixfl.forms.jaxpr import Traced
from mixfl.randomness import batch_shapes
from mixfl.trees import on_named

# Measured, see docs/simulator.md.
THIN, LONG = 32, 64  # at most so many units, and at least so many inputs: best as [units, inputs]
WIDE, FEW = 50, 4  # at least so many units, and at most so many rows: best as [inputs, units]


class Turned(Form):
    name = "turned"

    def __init__(self, weights: Collection[str]):
        self.weights = weights

    def start(self, term, broadcast, feeds):
        loss = TurnedLoss(term.loss, self.weights)
        aug = None if broadcast.aug is None else turned(self.weights, broadcast.aug)
        x = turned(self.weights, broadcast.x)
        return self, dataclasses.replace(term, loss=loss), broadcast._replace(x=x, aug=aug), feeds

    def widen(self, sums, without):
        def back(tree):
            return None if tree is None else turned(self.weights, tree)

        return sums._replace(
            weighted=back(sums.weighted), unweighted=back(sums.unweighted), grads=back(sums.grads)
        )


def turned(weights: Collection[str], tree):
    """The tree with these weights transposed."""
    return on_named(lambda leaf, _: leaf.T, dict.fromkeys(weights), tree)


@dataclass(frozen=True)
class TurnedLoss:
    """`loss` for parameters of which some are transposed."""

    loss: Callable
    weights: Collection[str]

    def __call__(self, x, data):
        return self.loss(turned(self.weights, x), data)

    def gradient_in_form(self, mean, x, batch):
        # The loss may be that of another form, which has its own gradient.
        own_way = getattr(self.loss, "gradient_in_form", None)
        x = turned(self.weights, x)
        if own_way is not None:
            value, g = own_way(mean, x, batch)
        else:
            value, g = jax.value_and_grad(lambda x: mean(self.loss(x, batch.data)))(x)
        return value, turned(self.weights, g)


def choose(c: Candidate) -> Form | None:
    """Not where single numbers of a change, or whole changes, are looked at; and only for plain
    SGD, because another optimizer may treat the axes of a weight differently. On accelerators, XLA
    chooses how weights lie in memory."""
    if c.platform != "cpu":
        return None
    if c.single or c.elements or not c.algorithm.feed.clients or not c.term.here:
        return None
    if not uses_own_loss_only(c.algorithm) or not plain_steps(c.settings):
        return None
    others = {n for form in c.others for n in getattr(form, "weights", ())}
    try:
        layers = dense_layers(Traced(c.term.loss, c.x, batch_shapes(c.term, c.batch)))
    except Exception:  # the preflight says what is wrong with the loss
        return None
    weights = [n for n, layer in layers.items() if n not in others and pays(layer)]
    return Turned(weights) if weights else None


def pays(layer: Layer) -> bool:
    """Is the layer likely to be faster the other way round?"""
    if layer.transposed:  # [units, inputs]
        return layer.width >= WIDE and layer.rows <= FEW
    return 2 <= layer.width <= THIN and layer.depth >= LONG and layer.rows >= 2
