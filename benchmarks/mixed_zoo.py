"""The zoo's models, small and mixed: data that can be learned, clients that differ, and a server
with other labels. For benchmarks.advice_real.

`problem("mlp", 0.1)`: the federated rows are dealt to 40 clients by Dirichlet(0.1) over the labels.
The clients have labels 0 to 6, the server 5 to 9. A text's label is the chain that wrote it, a
rating's label the kind of the item.
"""

import functools

import numpy as np

import mixfl
from benchmarks.zoo.in_jax import INITS, LOSSES
from mixfl.settings import Settings

CLIENTS, ROWS, LABELS = 40, 3200, 10
WRONG = 0.1  # pictures with a random label: without them, a linear model separates the labels
OF_CLIENTS, OF_SERVER = range(7), range(5, 10)
PICTURE = {"image": (12, 12), "classes": LABELS}
TEXT = {"vocabulary": 20, "length": 12}
MODELS: dict[str, dict] = {
    "logistic": PICTURE,
    "mlp": PICTURE | {"hidden": 48},
    "cnn": PICTURE | {"channels": (8, 16), "hidden": 32},
    "lstm": TEXT | {"embedding": 8, "hidden": 32, "layers": 1},
    "gpt": TEXT | {"width": 32, "layers": 2, "heads": 2},
    "factors": {"users": 100, "items": 200, "width": 8},
}
RATES = {"logistic": 0.05, "mlp": 0.1, "cnn": 0.1, "lstm": 0.5, "gpt": 0.1, "factors": 0.5}


def pictures(m, label, rng):
    """A picture is its label's pattern under much noise."""
    patterns = np.random.default_rng(1).uniform(0, 1, (LABELS, *m["image"]))
    pixels = 0.2 * patterns[label] + 0.8 * rng.uniform(0, 1, (len(label), *m["image"]))
    return {"image": (255 * pixels).astype(np.uint8)}


def texts(m, label, rng):
    """Each label has its own Markov chain."""
    V = m["vocabulary"]
    chances = np.exp(2 * np.random.default_rng(2).normal(size=(LABELS, V, V)))
    totals = np.cumsum(chances / chances.sum(-1, keepdims=True), -1)
    text = np.empty((len(label), m["length"] + 1), np.int32)
    text[:, 0] = rng.integers(0, V, len(label))
    for t in range(1, m["length"] + 1):
        below = totals[label, text[:, t - 1]] < rng.uniform(size=(len(label), 1))
        text[:, t] = np.minimum(below.sum(-1), V - 1)
    return {"text": text}


def ratings(m, label, rng):
    """Ratings of items of the label's kind, by three factors of users and items."""
    truth = np.random.default_rng(3)
    of_users, of_items = (truth.normal(size=(m[k], 3)) for k in ("users", "items"))
    user = rng.integers(0, m["users"], len(label))
    item = rng.integers(0, m["items"] // LABELS, len(label)) * LABELS + label
    rating = 3 + (of_users[user] * of_items[item]).sum(-1) / 2 + rng.normal(0, 0.3, len(label))
    return {
        "user": user.astype(np.int32), "item": item.astype(np.int32),
        "rating": rating.astype(np.float32),
    }  # fmt: skip


def columns(name: str, labels: range, seed: int) -> dict[str, np.ndarray]:
    m, rng = MODELS[name], np.random.default_rng(seed)
    label = rng.choice(np.array(labels), ROWS)
    make = pictures if "image" in m else texts if "vocabulary" in m else ratings
    made = make(m, label, rng)
    wrong = (rng.uniform(size=ROWS) < WRONG) & ("image" in m)
    label = np.where(wrong, rng.choice(np.array(labels), ROWS), label)
    return {**made, "label": label.astype(np.int32)}


def problem(name: str, alpha: float) -> tuple[mixfl.Problem, Settings]:
    m = MODELS[name]
    clients = mixfl.partition(
        columns(name, OF_CLIENTS, 10), f"dirichlet:{alpha:g}:{CLIENTS}", label="label", seed=0
    )
    loss = functools.partial(LOSSES[name], model=m)
    given = mixfl.Problem(
        init=functools.partial(INITS[name], model=m),
        terms=[
            mixfl.Federated(loss, clients, weight=0.5),
            mixfl.Central(loss, columns(name, OF_SERVER, 11), weight=0.5),
        ],
        name=f"{name}, alpha {alpha:g}",
    )
    return given, Settings(cohort_size=10, local_steps=5, client_batch=8, client_lr=RATES[name])
