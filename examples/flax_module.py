"""Trains a Flax module (nnx), split into its structure and a dict of parameters.

The problem and its data are those of plain.py.

    python examples/flax_module.py
    mixfl run examples/flax_module.py:problem --algorithm 2wgt
"""

import jax
import optax
from flax import nnx
from plain import clients, datacenter, test

import mixfl


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


# With linen, init would be `lambda key: Classifier().init(key, x)["params"]` for some input x, and
# `merged(params)(x)` would be `Classifier().apply({"params": params}, x)`.
def init(key):
    return nnx.to_pure_dict(nnx.state(Classifier(nnx.Rngs(key)), nnx.Param))


structure = nnx.graphdef(Classifier(nnx.Rngs(0)))


def merged(params):
    return nnx.merge(structure, params)


def loss(params, batch):  # one number per example
    z = merged(params)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z, batch["y"])


@jax.jit
def evaluate(params):
    right = merged(params)(test["x"]).argmax(1) == test["y"]
    return {"loss": loss(params, test).mean(), "accuracy": right.mean()}


terms = [mixfl.Federated(loss, clients, 2 / 3), mixfl.Central(loss, datacenter, 1 / 3)]
problem = mixfl.Problem(init, terms, evaluate, settings={"rounds": 60, "local_steps": 3})

if __name__ == "__main__":
    result = mixfl.train(problem, "2wgt")
    model = merged(result.params)
    print(f"2wgt: accuracy {result.metrics[-1]['eval/accuracy']:.3f}")
    print(f"points of kinds {test['y'][:9]} are taken for {model(test['x'][:9]).argmax(1)}")
