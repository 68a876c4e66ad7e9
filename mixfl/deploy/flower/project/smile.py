"""Smile classification: nodes have photos of smiling faces, the server has the others.

Everything about the model and the data is in this file. Data is loaded only when it is needed. Set
MIXFL_DATA to a store with the columns `image` and `smiling` (`mixfl data prepare celeba`), on each
machine its own. Without it, the faces are synthetic.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

import mixfl
import mixfl.flower
from mixfl.data.synthetic.faces import faces
from mixfl.tasks.smile import auc

NODES = 3  # in the simulation
HIDDEN = 64


@functools.cache
def people() -> tuple[mixfl.ClientData, mixfl.ClientData]:
    """The clients to train on, and those to evaluate on."""
    if "MIXFL_DATA" in os.environ:
        everyone = mixfl.ClientData.open(os.environ["MIXFL_DATA"])
    else:
        drawn = faces(clients=60, per_client=30, size=28)
        everyone = mixfl.ClientData.from_arrays(drawn, client=drawn.pop("client"))
    fifth = len(everyone) // 5
    rows = np.arange(len(everyone))
    return everyone.select(rows[fifth:]), everyone.select(rows[:fifth])


def labelled(clients: mixfl.ClientData, smiling: int) -> dict[str, np.ndarray]:
    return clients.where(lambda columns: columns["smiling"] == smiling, "smiling").examples.all()


def own_examples(node: dict) -> dict[str, np.ndarray]:
    """Runs at a node: its smiling faces. If nodes share a store, each takes its part."""
    train, _ = people()
    parts = node.get("num-partitions", 1)
    own = np.arange(len(train))[node.get("partition-id", 0) % parts :: parts]
    return labelled(train.select(own), smiling=1)


def central_examples() -> dict[str, np.ndarray]:
    """Runs at the server: unsmiling faces."""
    return labelled(people()[0], smiling=0)


def init(key):
    pixels = int(np.prod(people()[0].examples.columns["image"].shape))
    first, second = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(first, (pixels, HIDDEN)), "b": jnp.zeros(HIDDEN)},
        "logit": {"w": glorot(second, (HIDDEN, 1)), "b": jnp.zeros(1)},
    }


def logits(params, image):
    pixels = image.reshape(len(image), -1).astype(jnp.float32) / 127.5 - 1
    hidden = jax.nn.relu(pixels @ params["hidden"]["w"] + params["hidden"]["b"])
    return (hidden @ params["logit"]["w"] + params["logit"]["b"])[:, 0]


def loss(params, batch):
    """One number per example."""
    z = logits(params, batch["image"])
    return jnp.logaddexp(0.0, z) - batch["smiling"] * z


def evaluate(params) -> dict[str, float]:
    """Runs at the server, on people that nobody trained on."""
    batch = people()[1].examples.all()
    z = np.asarray(jax.jit(logits)(params, batch["image"]), np.float64)
    losses = np.logaddexp(0, z) - batch["smiling"] * z
    return {"auc": auc(z, batch["smiling"]), "loss": losses.mean()}


problem = mixfl.Problem(
    init,
    [
        mixfl.Federated(loss, own_examples, weight=0.5),
        mixfl.Central(loss, central_examples, weight=0.5),
    ],
    evaluate,
    settings=dict(
        cohort_size=NODES, client_batch=20, local_steps=5, client_lr=0.05, central_batch=60,
        eval_every=5,
    ),
    name="smile",
)  # fmt: skip

server = mixfl.flower.server_app(problem)
client = mixfl.flower.client_app(problem)


def simulation() -> mixfl.Problem:
    """The same in the simulator: mixfl run app.py:simulation --algorithm 2wgt"""
    nodes = [{"partition-id": i, "num-partitions": NODES} for i in range(NODES)]
    return mixfl.flower.simulated(problem, nodes)
