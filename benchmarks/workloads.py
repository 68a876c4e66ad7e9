"""Writes the workloads as plain arrays to a folder, so that every engine reads the same data.

    <folder>/settings.json        S, K, |B_i|, learning rate, weight, sizes of the model
    <folder>/columns/<name>.npy   the clients' examples, grouped by client, all of equal size
    <folder>/order.npy            [rounds, S, K |B_i|] rows that each client trains on, in order
    <folder>/params.npz           the initial model, by names such as hidden/w
    <folder>/store                the same examples as a client store, for mixfl

If peers have other algorithms than FedAvg:

    <folder>/central/<name>.npy            the server's examples
    <folder>/central_order/<algorithm>.npy [rounds, steps, batch] rows of the server's batches

The time does not depend on the values, so most of the data is noise. But a user's movies form a
history (examples with the same few movies), because the number of table rows of a client matters.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax
import numpy as np

from benchmarks.peers import jax_models
from benchmarks.sizes import Size
from benchmarks.zoo import in_jax
from benchmarks.zoo.models import MODELS
from mixfl.algorithms import ALGORITHMS
from mixfl.data import ClientData
from mixfl.engine import cohort
from mixfl.forms import flops
from mixfl.problem import Central, Federated, Problem
from mixfl.settings import Settings
from mixfl.tasks import movie, smile
from mixfl.tasks.text import char_model
from mixfl.trees import named_leaves

SEED = 0
CONTEXT = 10  # previous movies of an example
FEW = 1e4  # flops of an example's products that decide nothing


SIZES = {
    "smile": Size(
        "smile", S=100, K=2, B=5, lr=0.01, weight=0.5, clients=400, per_client=20, central=2000,
        model={"side": 84, "hidden": 64},
    ),
    "movie": Size(  # the paper's training users of MovieLens-1M
        "movie", S=100, K=10, B=16, lr=0.5, weight=0.5, clients=3865, per_client=165, central=0,
        model={"movies": 3952, "embedding": 16, "margin": 0.9, "spreadout": 0.01},
    ),
    "text": Size(
        "text", S=20, K=4, B=8, lr=2.0, weight=0.73, clients=100, per_client=40, central=2000,
        model={"vocabulary": 88, "embedding": 64, "hidden": 128, "length": 100},
    ),
}  # fmt: skip


def columns(size: Size, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The examples of clients with `size.per_client` examples each."""
    m = size.model
    if size.task in MODELS:
        return MODELS[size.task].columns(m, rows, rng)
    if size.task == "smile":
        shape = (rows, m["side"], m["side"], 3)
        images = rng.integers(0, 256, shape, dtype=np.uint8)
        return {"image": images, "smiling": rng.integers(0, 2, rows, dtype=np.uint8)}
    if size.task == "text":
        return {"text": rng.integers(2, m["vocabulary"], (rows, m["length"]), dtype=np.uint8)}
    return _histories(rows // size.per_client, size.per_client, m["movies"], rng)


def _histories(users: int, n: int, movies: int, rng) -> dict[str, np.ndarray]:
    """Each user's n examples (up to ten movies, and the next one), drawn by popularity."""
    fame = np.exp(rng.standard_normal(movies))
    wait = rng.standard_exponential((users, movies), np.float32) / fame
    seen = 1 + np.argpartition(wait, n, axis=1)[:, : n + 1].astype(np.int32)
    place = np.arange(n)[:, None] - np.arange(CONTEXT)  # [n, 10] into the history, latest first
    context = np.where(place >= 0, seen[:, np.maximum(place, 0)], 0)
    length = np.minimum(np.arange(n) + 1, CONTEXT).astype(np.uint8)
    return {
        "context": context.reshape(-1, CONTEXT).astype(np.int32),
        "movie": seen[:, 1:].reshape(-1).copy(),
        "length": np.tile(length, users),
    }


def settings(size: Size, clip="off", **more) -> Settings:
    """Settings without clipping, because no peer clips and the models are compared."""
    return Settings(
        rounds=10**6, seed=SEED, cohort_size=size.S, client_batch=size.B, local_steps=size.K,
        client_lr=size.lr, clip=clip, **more,
    )  # fmt: skip


def order(size: Size, rounds: int) -> np.ndarray:
    """[rounds, S, K |B_i|]: the rows that mixfl's clients train on."""
    rows_of_rounds = np.empty((rounds, size.S, size.K * size.B), np.int64)
    for t in range(rounds):
        chosen = cohort.cohort(SEED, t, 0, size.clients, size.S)
        sizes = np.full(size.S, size.per_client)
        rows, mask = cohort.cohort_rows(
            SEED, t, 0, chosen, chosen * size.per_client, sizes, size.K, size.B
        )
        assert mask.all(), "a client of a workload has examples for K full batches"
        rows_of_rounds[t] = rows.reshape(size.S, -1)
    return rows_of_rounds


def write(
    size: Size, folder: Path, rounds: int = 8, store: bool = True, mixed: Sequence[str] = ()
) -> None:
    """Writes the workload's folder. After `rounds` rounds, peers start again with the first.
    `mixed` has the algorithms of which peers read the server's batches."""
    rng = np.random.default_rng(SEED)
    (folder / "columns").mkdir(parents=True)
    data = columns(size, size.clients * size.per_client, rng)
    for name, column in data.items():
        np.save(folder / "columns" / f"{name}.npy", column)
    np.save(folder / "order.npy", order(size, rounds))
    params = model(size)[0](jax.random.key(SEED))
    np.savez(folder / "params.npz", **named(params))  # type: ignore[arg-type]
    client = np.repeat(np.arange(size.clients), size.per_client)
    clients = ClientData.from_arrays(data, client=client)
    if store:
        clients.write(folder / "store")
    for algorithm in mixed:
        write_central(problem(size, clients), size, folder, algorithm, rounds)
    (folder / "settings.json").write_text(json.dumps(asdict(size)))


def write_central(p: Problem, size: Size, folder: Path, algorithm: str, rounds: int) -> None:
    """The server's examples, and the rows of its batches as mixfl draws them."""
    for name in ("central", "central_order"):
        (folder / name).mkdir(exist_ok=True)
    for name, column in server_columns(size).items():
        np.save(folder / "central" / f"{name}.npy", column)
    (draw,) = filter(None, ALGORITHMS[algorithm].build(p, settings(size)).feed.draw)
    rows = [
        cohort.drawn_rows(
            cohort.generator(SEED, t, cohort.CENTRAL, 1), size.central, draw.steps, draw.batch
        )
        for t in range(rounds)
    ]
    np.save(folder / "central_order" / f"{algorithm}.npy", np.stack(rows))


def server_columns(size: Size) -> dict[str, np.ndarray]:
    return columns(size, size.central, np.random.default_rng(SEED + 1))


def read_size(folder: Path) -> Size:
    return Size(**json.loads((folder / "settings.json").read_text()))


def named(params) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(params).items()}


def model(size: Size):
    """mixfl's `init` and federated loss."""
    m = size.model
    if size.task in MODELS:
        init, loss = in_jax.INITS[size.task], in_jax.LOSSES[size.task]
        return partial(init, model=m), partial(loss, model=m)
    if size.task == "smile":
        loss = partial(smile.image_loss, mean=np.float32(0), scale=np.float32(1 / 255))
        return partial(smile.init, inputs=m["side"] ** 2 * 3, hidden=m["hidden"]), loss
    if size.task == "text":
        init = partial(
            char_model.init, vocabulary=m["vocabulary"], embedding=m["embedding"],
            hidden=m["hidden"], embedding_scale=1.0,
        )  # fmt: skip
        # Texts already are numbers of characters.
        return init, partial(char_model.loss, table=np.arange(m["vocabulary"], dtype=np.int32))
    init = partial(movie.init, movies=m["movies"], embedding=m["embedding"])
    return init, partial(movie.hinge_loss, margin=m["margin"])


def problem(size: Size, clients: ClientData, init=None, loss=None, rows=None) -> Problem:
    """mixfl's problem on the given clients; also with other functions than those of `model`."""
    if loss is None:
        init, loss = model(size)
        rows = marked_rows(size.task)
    federated = Federated(loss, clients, weight=size.weight, rows=rows)
    weight = 1 - size.weight
    if size.task == "movie":
        spread = partial(movie.spreadout, strength=size.model["spreadout"])
        return Problem(init, [federated, Central(spread, weight=weight)], name=size.task)
    central = Central(loss, server_columns(size), weight=weight)
    return Problem(init, [federated, central], name=size.task)


def marked_rows(task: str) -> Mapping[str, Sequence[str]]:
    if task in MODELS:
        return MODELS[task].rows
    return {"movies": ("context", "movie")} if task == "movie" else {}


def flops_per_example(size: Size) -> float | None:
    """Flops of a gradient on the plain path: only products, 2 flop per multiply-add.

    The text model's inputs are embeddings, each multiplied by the GRU's weights. None for models
    with next to no products.
    """
    params = jax.eval_shape(model(size)[0], jax.random.key(SEED))
    data = columns(size, size.per_client, np.random.default_rng(SEED))
    example = {k: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for k, a in data.items()}
    loss = partial(jax_models.LOSSES[size.task], model=size.model)
    count = flops.of_gradient(loss, params, example)
    return count if count > FEW else None
