"""Trains an Equinox module: its arrays are the parameters, everything else stays outside.

The problem and its data are those of plain.py.

    python examples/equinox_module.py
    mixfl run examples/equinox_module.py:problem --algorithm 2wgt
"""

import equinox as eqx
import jax
import optax
from plain import clients, datacenter, test

import mixfl


def classifier(key):
    return eqx.nn.MLP(in_size=8, out_size=3, width_size=16, depth=1, key=key)


def init(key):
    return eqx.filter(classifier(key), eqx.is_inexact_array)


_, static = eqx.partition(classifier(jax.random.key(0)), eqx.is_inexact_array)


def combined(params):
    return jax.vmap(eqx.combine(params, static))  # an Equinox model takes one example


def loss(params, batch):  # one number per example
    z = combined(params)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z, batch["y"])


@jax.jit
def evaluate(params):
    right = combined(params)(test["x"]).argmax(1) == test["y"]
    return {"loss": loss(params, test).mean(), "accuracy": right.mean()}


terms = [mixfl.Federated(loss, clients, 2 / 3), mixfl.Central(loss, datacenter, 1 / 3)]
problem = mixfl.Problem(init, terms, evaluate, settings={"rounds": 60, "local_steps": 3})

if __name__ == "__main__":
    result = mixfl.train(problem, "2wgt")
    model = eqx.combine(result.params, static)
    print(f"2wgt: accuracy {result.metrics[-1]['eval/accuracy']:.3f}")
    print(f"a point of kind {test['y'][0]} is taken for {model(test['x'][0]).argmax()}")
