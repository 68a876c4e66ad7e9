"""Next-character prediction: nodes have people's posts, the server has articles.

Everything about the model and the data is in this file. Data is loaded only when it is needed. Set
MIXFL_DATA to a folder with the stores `federated` and `central` (`mixfl data prepare`), on each
machine its own; a node needs only the first. Without it, the text is synthetic.
"""

import functools
import os

import numpy as np

import mixfl
import mixfl.flower
from mixfl.data.synthetic.text import texts
from mixfl.tasks.text import char_model
from mixfl.tasks.text.vocabulary import TFF, Vocabulary

NODES = 3  # in the simulation
EMBEDDING, HIDDEN = 32, 32
vocabulary = Vocabulary(tuple(TFF))


@functools.cache
def synthetic() -> dict[str, mixfl.ClientData]:
    drawn = texts(clients=60, per_client=20, central=800, difficulty=0.2)
    names = ("federated", "central")
    return {
        name: mixfl.ClientData.from_arrays({"text": part["text"]}, client=part["client"])
        for name, part in zip(names, drawn, strict=True)
    }


@functools.cache
def writers(name: str) -> tuple[mixfl.ClientData, mixfl.ClientData]:
    """The clients to train on, and those to evaluate on."""
    if "MIXFL_DATA" in os.environ:
        everyone = mixfl.ClientData.open(os.path.join(os.environ["MIXFL_DATA"], name))
    else:
        everyone = synthetic()[name]
    tenth = len(everyone) // 10
    rows = np.arange(len(everyone))
    return everyone.select(rows[tenth:]), everyone.select(rows[:tenth])


def own_examples(node: dict) -> dict[str, np.ndarray]:
    """Runs at a node: its posts. If nodes share a store, each takes its part."""
    train, _ = writers("federated")
    parts = node.get("num-partitions", 1)
    own = np.arange(len(train))[node.get("partition-id", 0) % parts :: parts]
    return train.select(own).examples.all()


def central_examples() -> dict[str, np.ndarray]:
    """Runs at the server: articles."""
    return writers("central")[0].examples.all()


def init(key):
    return char_model.init(key, len(vocabulary), EMBEDDING, HIDDEN, embedding_scale=1.0)


def loss(params, batch):
    """One number per example."""
    return char_model.loss(params, batch, table=vocabulary.table)


def evaluate(params) -> dict[str, float]:
    """Runs at the server, on articles and, if it has them, posts that nobody trained on."""
    losses = {}
    for name in ("federated", "central"):
        if "MIXFL_DATA" in os.environ and not os.path.isdir(
            os.path.join(os.environ["MIXFL_DATA"], name)
        ):
            continue
        text = writers(name)[1].examples.all()["text"][:300]
        losses[f"{name}/loss"] = float(np.mean(loss(params, {"text": text})))
    return {"loss": sum(losses.values()) / len(losses), **losses}


problem = mixfl.Problem(
    init,
    [
        mixfl.Federated(loss, own_examples, weight=0.73),
        mixfl.Central(loss, central_examples, weight=0.27),
    ],
    evaluate,
    settings=dict(
        cohort_size=NODES, client_batch=8, local_steps=8, client_lr=2.0, central_batch=24,
        eval_every=5,
    ),
    name="text",
)  # fmt: skip

server = mixfl.flower.server_app(problem)
client = mixfl.flower.client_app(problem)


def simulation() -> mixfl.Problem:
    """The same in the simulator: mixfl run app.py:simulation --algorithm 2wgt"""
    nodes = [{"partition-id": i, "num-partitions": NODES} for i in range(NODES)]
    return mixfl.flower.simulated(problem, nodes)
