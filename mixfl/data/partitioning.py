"""Partitions of data without clients, in memory: who gets which rows.

Each way is a function of a generator, the rows' labels (numbered from 0), the number of clients and
one parameter. It returns the client of each row.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mixfl.data.examples import ClientData, Examples
from mixfl.errors import MixflError, unknown

TRIES = 200
LABELS = ("label", "y", "target")


def partition(
    data: Any, how: str, *, label: str | None = None, seed: int = 0, least: int = 0
) -> ClientData:
    """Assigns the rows of `data` (columns, Examples, or ClientData) to new clients.

    >>> columns = {"x": np.eye(100), "y": np.arange(100) % 10}
    >>> len(mixfl.partition(columns, "dirichlet:0.3:5", label="y", seed=0))
    5

    | how            | a client has                                                         |
    | -------------- | -------------------------------------------------------------------- |
    | iid:N          | a random N-th of the rows                                            |
    | dirichlet:A:N  | of each label a share; the N shares are drawn from Dirichlet(A)      |
    | shards:K:N     | K shards of N K, cut from the rows in order of label (McMahan et al.) |
    | labels:C:N     | C labels, and of each an equal part among those who have it          |
    | lognormal:S:N  | random rows; sizes are log-normal, with S the deviation of their log |
    | sizes:A:N      | random rows; sizes are drawn from Dirichlet(A)                       |
    | column:NAME    | the rows with one value in that column                               |

    The rows are not copied. `least`: draws again until each client has so many rows. Without it,
    clients may stay empty: they are dropped, counted in `dropped`, and a warning says so.
    """
    if isinstance(data, ClientData):
        examples = data.examples
    else:
        examples = data if isinstance(data, Examples) else Examples.from_arrays(data)
    kind, value, clients = _parsed(how)
    if kind == "column":
        return _by_column(examples, str(value))
    labels = _labels(examples, label, how) if kind in BY_LABEL else np.zeros(len(examples), int)
    rng = np.random.default_rng(seed)
    for _ in range(TRIES if least else 1):
        owner = WAYS[kind](rng, labels, clients, float(value))
        sizes = np.bincount(owner, minlength=clients)
        if sizes.min() >= least:
            return _grouped(examples, owner, sizes, how)
    raise MixflError(
        f"partition '{how}' gave some client fewer than {least} of {len(examples):,} rows in each "
        f"of {TRIES} draws: use a larger parameter, fewer clients, or a smaller `least`."
    )


def _parsed(how: str) -> tuple[str, Any, int]:
    kind, _, rest = str(how).partition(":")
    if kind == "column" and rest:
        return kind, rest, 0
    if kind not in WAYS:
        raise unknown("partition", kind, [*WAYS, "column"])
    try:
        value, clients = ("1", rest) if kind == "iid" else rest.rsplit(":", 1)
        number, n = float(value), int(clients)
        whole = kind not in ("shards", "labels") or number == int(number)
        if 1 <= n <= 10**7 and 0 < number < math.inf and whole:
            return kind, number, n
    except (ValueError, OverflowError):
        pass
    expected = "iid:CLIENTS" if kind == "iid" else f"{kind}:PARAMETER:CLIENTS"
    raise MixflError(
        f"partition '{how}': expected {expected} with positive numbers, such as iid:100, "
        "dirichlet:0.3:100, shards:2:100, labels:2:100, lognormal:1:100 or sizes:0.5:100."
    )


def _labels(examples: Examples, label: str | None, how: str) -> np.ndarray:
    """[rows], numbered from 0."""
    names = [label] if label else [n for n in LABELS if n in examples.columns][:1]
    if not names or names[0] not in examples.columns:
        raise MixflError(
            f"partition '{how}' needs a column of labels, and {label or 'none'} is among "
            f"{', '.join(examples.columns)}: name it with label."
        )
    column = examples.columns[names[0]]
    if column.shape:
        raise MixflError(
            f"the column '{names[0]}' has the shape {list(column.shape)}: expected one label for "
            "each row."
        )
    values = Examples({names[0]: column}, examples.rows).all()[names[0]]
    return np.unique(values, return_inverse=True)[1]


def _by_column(examples: Examples, name: str) -> ClientData:
    labels = _labels(examples, name, f"column:{name}")
    data = _grouped(examples, labels, np.bincount(labels), f"column:{name}")
    first = data.examples.subset(data.offsets[:-1])
    values = Examples({name: first.columns[name]}, first.rows).all()[name]
    return ClientData(data.examples, data.offsets, values.tolist())


def _grouped(examples: Examples, owner: np.ndarray, sizes: np.ndarray, how: str) -> ClientData:
    order = np.argsort(owner, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    data = ClientData(examples.subset(order), offsets, list(range(len(sizes)))).usable()
    if data.dropped:
        warnings.warn(
            f"partition '{how}' left {data.dropped} of {len(sizes)} clients without an example; "
            f"they are dropped, and {len(data)} remain. {ADVICE}, or least=1, which draws again "
            "until each client has an example.",
            stacklevel=3,
        )
    return data


ADVICE = "Use a larger parameter (alpha), or fewer clients"


def shares(rng: np.random.Generator, alpha: float, clients: int) -> np.ndarray:
    """A draw from Dirichlet(alpha). In logarithms: with a small alpha, draws from the gamma
    distribution underflow."""
    draws = np.log(rng.standard_gamma(alpha + 1, clients))
    draws += np.log1p(-rng.random(clients)) / alpha
    weights = np.exp(draws - draws.max())
    return weights / weights.sum()


def _cut(rows: np.ndarray, weights: np.ndarray, owner: np.ndarray) -> None:
    """Gives consecutive parts of the rows, in proportion to the weights, to the owners 0, 1, ..."""
    ends = np.round(np.cumsum(weights) / weights.sum() * len(rows)).astype(int)
    owner[rows] = np.searchsorted(ends, np.arange(len(rows)), side="right")


def _by_label(rng: np.random.Generator, labels: np.ndarray) -> list[np.ndarray]:
    """The rows of each label, in random order."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(labels))[:-1])


def _iid(rng, labels, clients, _):
    return rng.permutation(np.arange(len(labels)) % clients)


def _dirichlet(rng, labels, clients, alpha):
    owner = np.empty(len(labels), int)
    for rows in _by_label(rng, labels):
        _cut(rows, shares(rng, alpha, clients), owner)
    return owner


def _shards(rng, labels, clients, k):
    shards = int(k) * clients
    if shards > len(labels):
        raise MixflError(
            f"{shards:,} shards need as many rows, and the data has {len(labels):,}: use fewer "
            "clients, or fewer shards for each."
        )
    of_shard = np.repeat(rng.permutation(shards) // int(k), _even(len(labels), shards))
    owner = np.empty(len(labels), int)
    owner[np.concatenate(_by_label(rng, labels))] = of_shard
    return owner


def _label_skew(rng, labels, clients, c):
    classes, c = int(labels.max()) + 1, int(c)
    if not c <= classes <= c * clients:
        raise MixflError(
            f"{clients:,} clients with {c} labels each can't share {classes:,} labels: expected at "
            "most as many labels for a client as there are, and a client for each label."
        )
    holders: list[list[int]] = [[] for _ in range(classes)]
    for client in rng.permutation(clients):
        taken = np.array([len(h) for h in holders]) + rng.random(classes)
        for chosen in np.argsort(taken)[:c]:
            holders[chosen].append(client)
    owner = np.empty(len(labels), int)
    for rows, held in zip(_by_label(rng, labels), holders, strict=True):
        owner[rows] = np.repeat(rng.permutation(held), _even(len(rows), len(held)))
    return owner


def _lognormal(rng, labels, clients, sigma):
    owner = np.empty(len(labels), int)
    _cut(rng.permutation(len(labels)), np.exp(sigma * rng.standard_normal(clients)), owner)
    return owner


def _sizes(rng, labels, clients, alpha):
    owner = np.empty(len(labels), int)
    _cut(rng.permutation(len(labels)), shares(rng, alpha, clients), owner)
    return owner


def _even(rows: int, parts: int) -> np.ndarray:
    return np.bincount(np.arange(rows) % parts, minlength=parts)


WAYS: Mapping[str, Callable[..., np.ndarray]] = {
    "iid": _iid, "dirichlet": _dirichlet, "shards": _shards, "labels": _label_skew,
    "lognormal": _lognormal, "sizes": _sizes,
}  # fmt: skip
BY_LABEL = ("dirichlet", "shards", "labels")
