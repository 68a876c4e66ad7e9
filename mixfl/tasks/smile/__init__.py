"""Smile classification: phones keep photos of smiling faces, the datacenter has the others.

Federated: clients' smiling faces; central: unsmiling faces at the server. The model is one hidden
layer of ReLUs on the pixels and a logit. It is evaluated on both labels, on clients that it was
not trained on.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from mixfl.client_evaluation import ClientEvaluation
from mixfl.data.examples import ClientData, Examples
from mixfl.data.synthetic.faces import faces
from mixfl.errors import MixflError
from mixfl.problem import Central, Federated, Problem
from mixfl.tasks.chunks import over_chunks
from mixfl.tasks.options import CLIENT_EVAL_HELP, VALIDATION_HELP, Several, Width, set_aside
from mixfl.validation import Index, Share, check_fields, key

EVAL_CHUNK = 1000


@dataclass(frozen=True)
class Options:
    hidden: Width = key(64, "units of the hidden layer")
    inputs: Literal["standardized", "central", "unit"] = key(
        "standardized",
        "standardized per pixel, with federated sums; central: by central data alone; unit: [0, 1]",
    )
    shrink: Annotated[int, Meta(ge=1, le=512)] = key(
        1, "faces are averaged over squares of so many pixels a side: 3 makes 28 of 84"
    )
    image_size: Annotated[int, Meta(ge=8, le=512)] = key(
        84, "side of the synthetic faces, in pixels", synthetic=True
    )
    clients: Several = key(300, "synthetic clients, held-out ones included", synthetic=True)
    per_client: Several = key(30, "images per synthetic client, both labels", synthetic=True)
    difficulty: Share = key(0.5, "of the synthetic faces, 0 to 1", synthetic=True)
    held_out: Share = key(0.2, "part of the clients that is for evaluation")
    validation: bool = key(False, VALIDATION_HELP)
    client_eval: bool = key(False, CLIENT_EVAL_HELP)
    data_seed: Index = key(0, "seed of the synthetic faces and of the clients held out")

    def __post_init__(self):
        check_fields(self)


def problem(options: Options = Options(), data: Path | None = None) -> Problem:  # noqa: B008
    """From a client store with the columns `image` and `smiling`, or synthetic faces."""
    train, held_out = _divided(options, data)
    validation = None
    if options.validation:
        train, validation = set_aside(train, options.data_seed)
    smiling = train.where(lambda c: c["smiling"] == 1, "smiling")
    unsmiling = train.where(lambda c: c["smiling"] == 0, "smiling").examples
    for label, images in (("smiling", smiling.examples), ("unsmiling", unsmiling)):
        if not len(images):
            raise MixflError(
                f"the {len(train)} clients for training have no {label} face: hold out less "
                f"(held_out = {options.held_out:g}), or give data with both labels."
            )

    size = _inputs(train.examples.columns["image"].shape, options.shrink)
    mean, scale = _statistics(smiling, unsmiling, options.inputs, options.shrink)
    given = {"mean": mean, "scale": scale, "shrink": options.shrink}
    loss = partial(image_loss, **given)
    each = partial(client_metrics, **given)
    return Problem(
        init=partial(init, inputs=size, hidden=options.hidden),
        terms=[
            Federated(loss, smiling, weight=0.5),
            Central(loss, unsmiling, weight=0.5),
        ],
        evaluate=Evaluation(held_out.examples, **given),
        validate=Evaluation(validation.examples, **given) if validation else None,
        client_eval=(
            ClientEvaluation(each, held_out, at_server=True) if options.client_eval else None
        ),
        name="smile",
        predict=partial(predict, **given),
    )


def _divided(o: Options, data: Path | None) -> tuple[ClientData, ClientData]:
    """Data for training and for evaluation. Data prepared with --split is divided already."""
    if data is not None and (data / "train").is_dir() and (data / "test").is_dir():
        return _opened(data / "train"), _opened(data / "test")
    people = _synthetic(o) if data is None else _opened(data)
    order = np.random.default_rng(o.data_seed).permutation(len(people))
    test = max(1, round(o.held_out * len(people)))
    return people.select(np.sort(order[test:])), people.select(np.sort(order[:test]))


def _synthetic(o: Options) -> ClientData:
    drawn = faces(
        o.clients, o.per_client, size=o.image_size, difficulty=o.difficulty, seed=o.data_seed
    )
    client = drawn.pop("client")
    return ClientData.from_arrays(drawn, client=client)


def _opened(path: Path) -> ClientData:
    people = ClientData.open(path)
    missing = {"image", "smiling"} - set(people.examples.columns)
    if missing:
        raise MixflError(f"{path} lacks the columns {sorted(missing)} of the smile task.")
    return people


def _inputs(shape: tuple[int, ...], shrink: int) -> int:
    """Their number, for images of this shape."""
    if shrink == 1:
        return int(np.prod(shape))
    if len(shape) != 3 or shape[0] % shrink or shape[1] % shrink:
        raise MixflError(
            f"shrink = {shrink}: images of {' x '.join(map(str, shape))} can't be divided into "
            f"squares of {shrink} x {shrink} pixels."
        )
    return int(np.prod(shape)) // shrink**2


def pixels(image, shrink: int):
    """[n, h, w, channels] -> [n, inputs]"""
    if shrink > 1:
        n, h, w, c = image.shape
        squares = image.reshape(n, h // shrink, shrink, w // shrink, shrink, c)
        image = squares.astype(jnp.float32).mean((2, 4))
    return image.reshape(image.shape[0], -1)


def _statistics(smiling: ClientData, unsmiling: Examples, inputs: str, shrink: int = 1):
    """Mean and scale that turn pixels into inputs: (pixel - mean) * scale.

    standardized: the server needs sums of the values and of their squares per pixel. From clients
    it gets only these sums (a federated sum). central: from the server's images alone, so that
    clients send nothing before training. FedAvg then knows how unsmiling faces look on average and
    does a little better (demo: AUC 0.69, not 0.61).
    """
    if inputs == "unit":
        return np.float32(0), np.float32(1 / 255)
    mean, square = central = _moments(unsmiling, shrink)
    if inputs == "standardized":
        both = _moments(smiling.examples, shrink) + central
        mean, square = both / 2  # both labels count equally
    return mean.astype(np.float32), (1 / (np.sqrt(square - mean**2) + 1)).astype(np.float32)


def _moments(images: Examples, shrink: int) -> np.ndarray:
    """Mean and mean square per pixel, [2, pixels], over (at most 2000 of) the images."""
    rows = np.random.default_rng(0).permutation(len(images))[:2000]
    total: Any = 0
    for part in np.array_split(rows, -(-len(rows) // 100)):
        values = pixels(images.take(part)["image"], shrink).astype(np.float64)
        total = total + np.stack([values.sum(0), (values**2).sum(0)])
    return total / len(rows)


def init(key: Any, inputs: int, hidden: int) -> dict[str, Any]:
    """Glorot-uniform weights (as Keras), zero biases."""
    first, second = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(first, (inputs, hidden)), "b": jnp.zeros(hidden)},
        "logit": {"w": glorot(second, (hidden, 1)), "b": jnp.zeros(1)},
    }


def logits(params, image, mean, scale, shrink=1):
    inputs = (pixels(image, shrink).astype(jnp.float32) - mean) * scale
    hidden = jax.nn.relu(inputs @ params["hidden"]["w"] + params["hidden"]["b"])
    return (hidden @ params["logit"]["w"] + params["logit"]["b"])[:, 0]


def cross_entropy(z, smiling):
    return jnp.logaddexp(0.0, z) - smiling * z


def image_loss(params, batch, mean, scale, shrink=1):
    return cross_entropy(logits(params, batch["image"], mean, scale, shrink), batch["smiling"])


def predict(params, batch, mean, scale, shrink=1):
    """`smiling`: the probability."""
    return {"smiling": jax.nn.sigmoid(logits(params, batch["image"], mean, scale, shrink))}


def client_metrics(params, batch, mean, scale, shrink=1):
    """Of each example, for a client's own means."""
    z = logits(params, batch["image"], mean, scale, shrink)
    right = (z > 0) == (batch["smiling"] == 1)
    return {"loss": cross_entropy(z, batch["smiling"]), "accuracy": right.astype(jnp.float32)}


class Evaluation:
    """AUC and loss on both labels, over all held-out examples, one chunk at a time."""

    def __init__(self, examples: Examples, mean, scale, shrink: int = 1):
        self.examples = examples
        self.labels = examples.take(np.arange(len(examples)))["smiling"].astype(np.float64)
        if not 0 < self.labels.mean() < 1:
            raise MixflError(
                "the held-out clients have faces of only one label: hold out more clients."
            )
        self.logits = jax.jit(partial(logits, mean=mean, scale=scale, shrink=shrink))

    def __call__(self, params) -> dict[str, float]:
        n = len(self.examples)

        def chunk(rows):
            images = self.examples.take(np.minimum(rows, n - 1))["image"]
            return np.asarray(self.logits(params, images))

        z = np.concatenate(over_chunks(chunk, n, EVAL_CHUNK))[:n].astype(np.float64)
        losses = np.logaddexp(0, z) - self.labels * z
        smiling = self.labels == 1
        return {
            "loss": losses.mean(),
            "auc": auc(z, self.labels),
            "smiling/loss": losses[smiling].mean(),
            "unsmiling/loss": losses[~smiling].mean(),
        }


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve: P(score of a positive > of a negative), ties counting half."""
    _, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[where]  # mean rank among equals
    positives = labels == 1
    n1, n0 = positives.sum(), (~positives).sum()
    return float((ranks[positives].sum() - n1 * (n1 + 1) / 2) / (n1 * n0))
