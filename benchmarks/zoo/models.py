"""The zoo: the size of each model and of its rounds, its data, and what is asked of mixfl.

The models themselves are in `in_jax.py` and `in_torch.py`. The data is noise, made from a seed: the
time does not depend on its values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.sizes import Size

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    size: Size
    columns: Callable[[Mapping[str, Any], int, np.random.Generator], Columns]
    asked: float = 2.0  # times as fast as the fastest other engine
    peers: Sequence[str] = ("fedjax", "pfl")
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)  # as in mixfl.Federated


def images(m: Mapping[str, Any], rows: int, rng: np.random.Generator) -> Columns:
    pixels = rng.integers(0, 256, (rows, *m["image"]), dtype=np.uint8)
    return {"image": pixels, "label": rng.integers(0, m["classes"], rows, dtype=np.int32)}


def texts(m: Mapping[str, Any], rows: int, rng: np.random.Generator) -> Columns:
    """One character more than the model reads: the last one is predicted."""
    return {"text": rng.integers(0, m["vocabulary"], (rows, m["length"] + 1), dtype=np.int32)}


def ratings(m: Mapping[str, Any], rows: int, rng: np.random.Generator) -> Columns:
    """Clients are users. Each has rated `per_user` items."""
    return {
        "user": (np.arange(rows) // m["per_user"] % m["users"]).astype(np.int32),
        "item": rng.integers(0, m["items"], rows, dtype=np.int32),
        "rating": rng.uniform(1, 5, rows).astype(np.float32),
    }


def sized(task: str, S: int, K: int, B: int, lr: float, clients: int, **model: Any) -> Size:
    per_client = 2 * K * B
    return Size(task, S, K, B, lr, 0.5, clients, per_client, 4 * K * B, model)


ALL = ("fedjax", "pfl", "flower")  # Flower's rounds take seconds: it is asked for two models only
DIGIT, PHOTO = (28, 28), (32, 32, 3)

MODELS = {
    "logistic": Model(
        sized("logistic", S=100, K=5, B=10, lr=0.1, clients=400, image=DIGIT, classes=10), images
    ),
    "mlp": Model(
        sized("mlp", S=50, K=5, B=10, lr=0.1, clients=200, image=DIGIT, classes=10, hidden=200),
        images, peers=ALL,
    ),
    "cnn": Model(
        sized("cnn", S=20, K=5, B=20, lr=0.05, clients=60, image=DIGIT, classes=62,
              channels=(32, 64), hidden=128),
        images, asked=2.5, peers=ALL,
    ),
    "resnet": Model(
        sized("resnet", S=10, K=2, B=10, lr=0.1, clients=40, image=PHOTO, classes=10,
              stages=(16, 32, 64), blocks=3, groups=8),
        images,
    ),
    "lstm": Model(
        sized("lstm", S=10, K=2, B=10, lr=1.0, clients=40, vocabulary=90, embedding=8, hidden=256,
              layers=2, length=80),
        texts,
    ),
    "gpt": Model(
        sized("gpt", S=10, K=2, B=8, lr=0.1, clients=40, vocabulary=90, width=128, layers=4,
              heads=4, length=64),
        texts,
    ),
    "factors": Model(
        sized("factors", S=100, K=5, B=20, lr=0.5, clients=1000, users=1000, items=3000, width=32,
              per_user=200),
        ratings, rows={"users": ("user",), "user_bias": ("user",), "items": ("item",),
                       "item_bias": ("item",)},
    ),
}  # fmt: skip
ASKED_TORCH = 1.5  # mixfl with a PyTorch module: times as fast as the best PyTorch loop
