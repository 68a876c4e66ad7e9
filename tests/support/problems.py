"""Small problems for the tests, and the bridge from the simulator's data to the reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import reference
from jax.flatten_util import ravel_pytree

import mixfl
from mixfl.engine.feeding import Feeder
from mixfl.settings import KEYS

DIM = 3
REFERENCE_KEYS = {f.name for f in dataclasses.fields(reference.Settings)} & {*KEYS} - {
    "pretrain_rounds"
}


def logistic(params, batch):
    """Per-example logistic loss, y in {-1, 1}."""
    z = batch["x"] @ params["w"] + params["b"]
    return jnp.logaddexp(0.0, -batch["y"] * z)


def numpy_logistic(x, batch):
    """The same in NumPy: losses [n] and the gradient of their mean; x = ravel(b, w)."""
    features = np.concatenate([np.ones((len(batch["y"]), 1)), batch["x"]], axis=1).astype(float)
    margin = batch["y"] * (features @ x)
    slope = -batch["y"] / (1 + np.exp(margin))
    return np.logaddexp(0, -margin), features.T @ slope / len(slope)


def regularizer(params):
    return 0.5 * jnp.sum((params["w"] - 1.0) ** 2) + jnp.cos(params["b"])


def numpy_regularizer(x, _):
    return 0.5 * np.sum((x[1:] - 1) ** 2) + np.cos(x[0]), np.append(-np.sin(x[0]), x[1:] - 1)


def init(key):
    return {"b": jnp.zeros(()), "w": 0.1 * jax.random.normal(key, (DIM,))}


def examples(seed, n, shift):
    rng = np.random.default_rng(seed)
    x = rng.normal(shift, 1, (n, DIM)).astype(np.float32)
    y = np.where(x.sum(1) + rng.normal(0, 1, n) > 0, 1, -1).astype(np.float32)
    return {"x": x, "y": y}


def clients(seed, sizes=(1, 3, 4, 5, 8, 9, 12, 2), shift=0.3) -> mixfl.ClientData:
    """Clients of unequal size: fewer steps, short last batches."""
    data = examples(seed, sum(sizes), shift)
    return mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(len(sizes)), sizes))


def population(seed=1, weight=0.7, name="federated", **options):
    return mixfl.Federated(logistic, clients(seed, **options), weight, name)


def datacenter(seed=2, weight=0.4, n=40):
    return mixfl.Central(logistic, examples(seed, n, -0.5), weight)


def penalty(weight=0.3, name="penalty"):
    return mixfl.Central(regularizer, weight=weight, name=name)


PROBLEMS = {
    "two terms": lambda: [population(), datacenter()],
    "regularizer": lambda: [population(), penalty()],
    "two populations": lambda: [population(), population(5, 0.5, "other", shift=-0.4)],
    "two populations and a central term": lambda: [
        population(), datacenter(), population(5, 0.5, "other", shift=-0.4)
    ],
    "population and two central terms": lambda: [population(), datacenter(), penalty()],
}  # fmt: skip


def problem(terms="two terms") -> mixfl.Problem:
    evaluate = lambda params: {"loss": jnp.sum(params["w"] ** 2)}  # noqa: E731
    return mixfl.Problem(init, PROBLEMS[terms](), evaluate, name="test")


def settings(**changes) -> mixfl.Settings:
    defaults = dict(rounds=6, cohort_size=5, client_batch=3, local_steps=3, client_lr=0.2,
                    devices=1)  # fmt: skip
    return mixfl.Settings(**(defaults | changes))


def reference_terms(problem: mixfl.Problem) -> list[reference.Term]:
    numpy_loss = {logistic: numpy_logistic, regularizer: numpy_regularizer}
    return [
        reference.Term(type(t).__name__.lower(), numpy_loss[t.loss], t.weight)
        for t in problem.terms
    ]


def reference_round(feeder: Feeder, algorithm, t: int, s: mixfl.Settings) -> reference.Round:
    """What the simulator is fed in round t, without padding."""
    populations = len(feeder.problem.populations)
    clients = [[] for _ in range(populations)]
    shares = [[] for _ in range(populations)]
    who = [[] for _ in range(populations)]
    drawn = None
    for piece in feeder.pieces(algorithm, t):
        drawn = piece.drawn if drawn is None else drawn
        every = enumerate(piece.clients)
        for j, size, feed in [(j, k, feed) for j, feeds in every for k, feed in enumerate(feeds)]:
            for i in range(len(feed.batches.mask)):
                mask = feed.batches.mask[i] > 0
                steps = np.flatnonzero(mask.any(axis=1))
                if not len(steps):  # a place without a client
                    continue
                pick = lambda k, data=feed.batches.data, i=i, mask=mask: {  # noqa: E731
                    name: a[i, k][mask[k]] for name, a in data.items()
                }
                clients[j].append([pick(k) for k in steps])
                if piece.who:
                    who[j].append(int(piece.who[j][size][i]))
                if feed.share is not None:
                    dealt = [{n: a[i, k] for n, a in feed.share.items()} for k in steps]
                    shares[j].append(dealt)
    server = [
        None if b is None or b.data is None else
        [{n: a[k][b.mask[k] > 0] for n, a in b.data.items()} for k in range(len(b.mask))]
        for b in drawn or []
    ]  # fmt: skip
    steps = max([len(b.mask) for b in drawn if b is not None], default=1)
    sizes = [len(t.clients) for t in feeder.problem.populations]
    return reference.Round(clients, server, shares, who, sizes, steps)


def reference_models(name: str, simulator, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """The reference's models after each round, and the model before the first, on what the
    simulator is fed. Pretraining takes half of the rounds; optimizers are SGD."""
    s, x0 = simulator.s, flat(simulator.init().x).astype(float)
    fed = [reference_round(simulator.feeder, simulator.at(t), t, s) for t in range(rounds)]
    given = {k: getattr(s, k) for k in REFERENCE_KEYS if getattr(s, k) != "auto"}
    given["pretrain_rounds"] = rounds // 2
    terms = reference_terms(simulator.problem)
    models = reference.train(name, terms, x0, reference.Settings(**given), fed)
    return np.array(models), x0


def flat(params) -> np.ndarray:
    return np.asarray(ravel_pytree(params)[0])


LOUD = 30.0  # times the features of some clients


def louder(clients: mixfl.ClientData, who=(3, 6)) -> mixfl.ClientData:
    """Some clients' inputs are far larger than others', and their labels are wrong."""
    columns = {k: np.array(v) for k, v in clients.examples.all().items()}
    for i in who:
        columns["x"][clients.rows(i)] *= LOUD
        columns["y"][clients.rows(i)] *= -1
    owner = np.concatenate([np.full(len(clients.rows(i)), i) for i in range(len(clients))])
    return mixfl.ClientData.from_arrays(columns, client=owner)


OPTIMIZERS = {"sgd": "sgd", "momentum": "sgd(momentum=0.9)", "adam": "adam"}


def refuses(algorithm, terms) -> bool:
    regularizer = terms == "regularizer"
    no_central = terms == "two populations"
    return {
        "1wgt": no_central,
        "server-learning": no_central,
        "fedclg": regularizer or no_central or terms.startswith("population and two"),
        "central": no_central,
        "pretrain": no_central,
        "baseline": not regularizer,
        "example-transfer": regularizer or no_central or terms.startswith("population and two"),
    }.get(algorithm, False)
