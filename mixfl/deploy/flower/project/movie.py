"""Next-movie recommendation: nodes have what someone watched, the server spreads the movies out.

The table of movies is row-sparse: a node gets and sends only the rows of its own movies.
Everything about the model and the data is in this file. Data is loaded only when it is needed. Set
MIXFL_DATA to a store with the columns `context` and `movie` (`mixfl data prepare movielens`), on
each machine its own. Without it, the ratings are synthetic.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

import mixfl
import mixfl.flower
from mixfl.data.synthetic.ratings import ratings
from mixfl.tasks import movie

NODES = 3  # in the simulation
MOVIES = 3952 if "MIXFL_DATA" in os.environ else 200  # the catalog, which everybody knows
EMBEDDING, MARGIN = 16, 0.9


@functools.cache
def viewers() -> tuple[mixfl.ClientData, mixfl.ClientData]:
    """The clients to train on, and those to evaluate on."""
    if "MIXFL_DATA" in os.environ:
        everyone = mixfl.ClientData.open(os.environ["MIXFL_DATA"])
    else:
        drawn = ratings(users=120, movies=MOVIES, per_user=60)
        everyone = mixfl.ClientData.from_arrays(drawn, client=drawn.pop("user"))
    everyone = movie.with_lengths(everyone)
    fifth = len(everyone) // 5
    rows = np.arange(len(everyone))
    return everyone.select(rows[fifth:]), everyone.select(rows[:fifth])


def own_examples(node: dict) -> dict[str, np.ndarray]:
    """Runs at a node: what its viewers saw. If nodes share a store, each takes its part."""
    train, _ = viewers()
    parts = node.get("num-partitions", 1)
    own = np.arange(len(train))[node.get("partition-id", 0) % parts :: parts]
    return train.select(own).examples.all()


def init(key):
    return movie.init(key, MOVIES, EMBEDDING)


def loss(params, batch):
    """One number per example: pulls the next movie toward the last ones."""
    return movie.hinge_loss(params, batch, MARGIN)


def spreadout(params):
    """Runs at the server, without any data: pushes all movies apart."""
    return movie.spreadout(params, movie.BALANCE / MOVIES)


@jax.jit
def recall(params, batch):
    """Share of the examples whose movie is among the ten that score best."""
    table = params["movies"]
    left = movie.left_tower(params["context"], table[batch["context"]], batch["length"])
    scores = (left @ movie.unit(table[:-1]).T).at[:, 0].set(-jnp.inf)
    return jnp.mean(movie.hits(scores, batch["movie"], batch["context"], count_context=True))


def evaluate(params) -> dict[str, float]:
    """Runs at the server, on viewers that nobody trained on."""
    batch = {name: column[:5000] for name, column in viewers()[1].examples.all().items()}
    hinge = float(jnp.mean(loss(params, batch)))
    return {"recall@10": float(recall(params, batch)), "loss": hinge / 2 + spreadout(params) / 2}


problem = mixfl.Problem(
    init,
    [
        mixfl.Federated(loss, own_examples, weight=0.5, rows={"movies": ("context", "movie")}),
        mixfl.Central(spreadout, weight=0.5),
    ],
    evaluate,
    settings=dict(
        cohort_size=NODES, client_batch=16, local_steps=10, client_lr=1.0, eval_every=5,
    ),
    name="movie",
)  # fmt: skip

server = mixfl.flower.server_app(problem)
client = mixfl.flower.client_app(problem)


def simulation() -> mixfl.Problem:
    """The same in the simulator: mixfl run app.py:simulation --algorithm 2wgt"""
    nodes = [{"partition-id": i, "num-partitions": NODES} for i in range(NODES)]
    return mixfl.flower.simulated(problem, nodes)
