"""Next-character prediction: people's posts stay with them, the datacenter has articles.

Federated: clients' sequences of characters; central: sequences from articles. The model is a GRU.
It is evaluated on clients and articles that it was not trained on.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from mixfl.client_evaluation import ClientEvaluation
from mixfl.data.examples import ClientData, Examples
from mixfl.data.split import held_out_clients
from mixfl.data.synthetic.text import texts
from mixfl.errors import MixflError
from mixfl.problem import Central, Federated, Problem
from mixfl.tasks.chunks import over_chunks
from mixfl.tasks.options import (
    CLIENT_EVAL_HELP,
    VALIDATION_HELP,
    Several,
    UpToBillion,
    UpToMillion,
    Width,
    set_aside,
)
from mixfl.tasks.text import char_model
from mixfl.tasks.text.vocabulary import FILE, TFF, UNKNOWN, Vocabulary
from mixfl.validation import Index, Share, check_fields, key

WEIGHTS = {"federated": 0.73, "central": 0.27}  # the paper's, in training and in the mixture
EVAL_CHUNK = 250


@dataclass(frozen=True)
class Options:
    embedding: Width = key(64, "numbers in the embedding of a character")
    hidden: Width = key(64, "units of the GRU")
    embedding_scale: Annotated[float, Meta(ge=0, le=100)] = key(
        1.0, "the embedding begins uniform between -this and this"
    )
    vocabulary: Literal["central", "tff"] = key(
        "central", "characters of the central data; or tff: TFF's 86"
    )
    vocabulary_size: Annotated[int, Meta(ge=1, le=30000)] = key(
        100, "characters of the central data at most"
    )
    held_out: Share = key(0.1, "part of the clients and articles that is for evaluation")
    validation: bool = key(False, VALIDATION_HELP)
    client_eval: bool = key(False, CLIENT_EVAL_HELP)
    mixture: Literal["documents", "sequences"] | Share = key(
        "documents",
        "the evaluation's: documents: 0.73 posts to 0.27 articles, as in training; sequences: all "
        "held-out ones pooled; or the articles' part, 0 to 1",
    )
    eval_sequences: UpToBillion = key(1000, "sequences of each split that are evaluated at most")
    clients: Several = key(250, "synthetic clients, held-out ones included", synthetic=True)
    per_client: UpToMillion = key(80, "sequences per synthetic client", synthetic=True)
    articles: Annotated[int, Meta(ge=2, le=10**8)] = key(
        8000, "sequences of the synthetic central data", synthetic=True
    )
    length: UpToMillion = key(100, "characters of a synthetic sequence", synthetic=True)
    difficulty: Share = key(0.5, "of the synthetic text, 0 to 1", synthetic=True)
    data_seed: Index = key(0, "seed of the synthetic text and of what is held out and evaluated")

    def __post_init__(self):
        check_fields(self)


def problem(options: Options = Options(), data: Path | None = None) -> Problem:  # noqa: B008
    """From a folder with the stores `federated` and `central`, or synthetic text."""
    o = options
    parts = _synthetic(o) if data is None else _opened(data, o)
    train = {name: part[0] for name, part in parts.items()}
    test = {name: part[1].examples for name, part in parts.items()}
    validation = None
    if o.validation:
        divided = {name: set_aside(part, o.data_seed) for name, part in train.items()}
        train = {name: part[0] for name, part in divided.items()}
        validation = {name: part[1].examples for name, part in divided.items()}
    vocabulary = Vocabulary(tuple(TFF))
    if o.vocabulary == "central":  # the server can't read the clients' text
        vocabulary = Vocabulary.of(train["central"].examples, o.vocabulary_size, o.data_seed)
    loss = partial(char_model.loss, table=vocabulary.table)
    judge = partial(
        Evaluation, vocabulary=vocabulary, most=o.eval_sequences, seed=o.data_seed,
        mixture=o.mixture,
    )  # fmt: skip
    return Problem(
        init=partial(
            char_model.init, vocabulary=len(vocabulary), embedding=o.embedding, hidden=o.hidden,
            embedding_scale=o.embedding_scale,
        ),
        terms=[
            Federated(loss, train["federated"], weight=WEIGHTS["federated"]),
            Central(loss, train["central"].examples, weight=WEIGHTS["central"]),
        ],
        evaluate=judge(test),
        validate=judge(validation) if validation else None,
        client_eval=(
            ClientEvaluation(loss, parts["federated"][1], at_server=True) if o.client_eval else None
        ),
        name="text",
        files={FILE: vocabulary.to_json()},
        predict=partial(char_model.predict, table=vocabulary.table),
    )  # fmt: skip


def _synthetic(o: Options) -> dict[str, tuple[ClientData, ClientData]]:
    drawn = texts(
        o.clients, o.per_client, o.articles, length=o.length, difficulty=o.difficulty,
        seed=o.data_seed,
    )  # fmt: skip
    stores = [ClientData.from_arrays({"text": d["text"]}, client=d["client"]) for d in drawn]
    return {name: _divided(s, o, name) for name, s in zip(WEIGHTS, stores, strict=True)}


def _opened(folder: Path, o: Options) -> dict[str, tuple[ClientData, ClientData]]:
    """Training and evaluation data of both terms. Data prepared with --split is divided already."""
    parts = {}
    for name in WEIGHTS:
        path = folder / name
        if (path / "train").is_dir() and (path / "test").is_dir():
            parts[name] = (_store(path / "train"), _store(path / "test"))
        elif path.is_dir():
            parts[name] = _divided(_store(path), o, name)
        else:
            raise MixflError(
                f"{folder} has no folder '{name}': the text task needs the client stores "
                f"{folder}/federated and {folder}/central. Make them with `mixfl data prepare` "
                "(docs/text.md)."
            )
    return parts


def _store(path: Path) -> ClientData:
    people = ClientData.open(path)
    column = people.examples.columns.get("text")
    if column is None:
        columns = ", ".join(people.examples.columns)
        raise MixflError(f"{path} has no column 'text' of the text task (it has {columns}).")
    if column.dtype.kind not in "iu" or len(column.shape) != 1 or column.shape[0] < 2:
        raise MixflError(
            f"{path}: the column 'text' has {column.dtype} {list(column.shape)} per example, "
            "expected at least two code points as whole numbers. Prepare it with one of the text "
            "formats (docs/data.md)."
        )
    return ClientData(
        Examples({"text": column}, people.examples.rows), people.offsets, people.ids, people.dropped
    )


def _divided(people: ClientData, o: Options, name: str) -> tuple[ClientData, ClientData]:
    try:
        test = held_out_clients(len(people), o.held_out, o.data_seed)
    except MixflError as error:
        raise MixflError(f"{name}: {error}") from None
    return people.select(np.flatnonzero(~test)), people.select(np.flatnonzero(test))


class Evaluation:
    """Accuracy and loss per character on each split, and on the mixture of both.

    An unknown character is a class of its own in the loss; predicting it never counts as right.
    """

    def __init__(
        self, splits: dict[str, Examples], vocabulary: Vocabulary, most: int, seed: int,
        mixture: str | float = "documents",
    ):  # fmt: skip
        self.weights = _weights(splits, mixture)
        self.splits = {}
        for name, examples in splits.items():
            rng = np.random.default_rng(seed)
            n = len(examples)
            rows = rng.choice(n, min(n, most), replace=False, shuffle=False)
            self.splits[name] = examples.subset(np.sort(rows))
        self.sums = jax.jit(partial(sums, table=vocabulary.table))

    def __call__(self, params) -> dict[str, float]:
        metrics: dict[str, float] = {"loss": 0.0, "accuracy": 0.0}
        for name, examples in self.splits.items():
            loss, right, count = self._total(params, examples)
            for metric, value in (("loss", loss / count), ("accuracy", right / count)):
                metrics[f"{name}/{metric}"] = value
                metrics[metric] += self.weights[name] * value
        return metrics

    def _total(self, params, examples: Examples) -> np.ndarray:
        n = len(examples)

        def chunk(rows):
            text = examples.take(np.minimum(rows, n - 1))["text"]
            text[rows >= n] = 0
            return np.asarray(self.sums(params, text), np.float64)

        return sum(over_chunks(chunk, n, EVAL_CHUNK), np.zeros(3))


def _weights(splits: dict[str, Examples], mixture: str | float) -> dict[str, float]:
    """Of the two splits in the mixture that is evaluated, 1 in all."""
    if isinstance(mixture, str):
        parts = WEIGHTS if mixture == "documents" else {k: len(e) for k, e in splits.items()}
    else:
        parts = {"federated": 1 - mixture, "central": mixture}
    return {name: part / sum(parts.values()) for name, part in parts.items()}


def sums(params, text, table):
    """Total loss, characters predicted right and characters, in a chunk of sequences."""
    ids = char_model.encoded(text, table)
    z, losses = char_model.cross_entropies(params, ids)
    targets = ids[1:]
    own = jnp.take_along_axis(z, targets[..., None], -1)
    best = z.max(-1, keepdims=True)
    # Ties are broken at random. (argmax would take as long as everything except the GRU.)
    chance = jnp.where(own == best, 1 / (z == best).sum(-1, keepdims=True), 0)[..., 0]
    right = jnp.where(targets > UNKNOWN, chance, 0)
    return jnp.stack([losses.sum(), right.sum(), (targets > 0).sum()])
