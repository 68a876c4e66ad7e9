"""Next-movie recommendation: users' histories stay with them, the server spreads the movies out.

Federated: a hinge loss that pulls a user's recent movies and the next one together. Central: a
regularizer without data (spreadout) that pushes all movies apart; without it all embeddings
collapse to one direction. The model is a dual encoder with one table of embeddings:

    movies   [movies + 2, d]  row i is movie i; row 0 is padding, the last one spare
    context  d x d and bias   the left tower's layer: mean of the previous movies -> ReLU

An example scores by the cosine of the left tower and the next movie's row.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from mixfl.client_evaluation import ClientEvaluation
from mixfl.data.examples import ClientData, Column, Examples
from mixfl.data.synthetic.ratings import ratings
from mixfl.errors import MixflError
from mixfl.problem import Central, Federated, Problem
from mixfl.tasks.chunks import over_chunks
from mixfl.tasks.options import CLIENT_EVAL_HELP, VALIDATION_HELP, UpToBillion
from mixfl.validation import Auto, Index, Share, check_fields, key

# The paper's users: 3865 for training, 483 for validation, 483 for tests, 1209 in the datacenter.
USERS, TRAIN, HELD_OUT = 6040, 3865, 483
TOP = 10
BALANCE = 40  # lambda x movies: lambda is 0.01 for MovieLens-1M
INIT = 0.05
EPSILON = 1e-12  # under square roots, whose slope at 0 is infinite
EVAL_CHUNK = 256  # examples whose scores fit in the cache


@dataclass(frozen=True)
class Options:
    embedding: Annotated[int, Meta(ge=1, le=4096)] = key(16, "dimensions of a movie's embedding")
    margin: Annotated[float, Meta(ge=-1, le=1)] = key(0.9, "of the hinge loss")
    spreadout: Annotated[float, Meta(ge=0, le=1e6)] | Auto = key(
        "auto", "lambda, the regularizer's strength; auto: 40 / movies"
    )
    largest_id: Annotated[int, Meta(ge=1, le=10**8)] | Auto = key(
        "auto", "of the movies; auto: the data's"
    )
    split: Literal["test", "validation"] = key("test", "users to evaluate on: test or validation")
    validation: bool = key(False, VALIDATION_HELP)
    client_eval: bool = key(False, CLIENT_EVAL_HELP)
    count_context: bool = key(True, "are movies of the context candidates of recall@10?")
    eval_examples: UpToBillion = key(100_000, "examples to evaluate on, at most")
    users: Annotated[int, Meta(ge=13, le=10**6)] = key(
        1000, "of the synthetic data, held-out ones included", synthetic=True
    )
    movies: Annotated[int, Meta(ge=50, le=10**6)] = key(
        1000, "of the synthetic data", synthetic=True
    )
    per_user: Annotated[int, Meta(ge=20, le=10**5)] = key(
        100, "ratings of a synthetic user, on average", synthetic=True
    )
    difficulty: Share = key(0.5, "of the synthetic data, 0 to 1", synthetic=True)
    data_seed: Index = key(0, "of the synthetic data and of the split of users")

    def __post_init__(self):
        check_fields(self)
        if self.validation and self.split == "validation":
            raise MixflError("validation = true needs split = test: give one of the two.")

    def strength(self, movies: int) -> float:
        """Lambda. The regularizer's pull on a movie does not depend on the number of movies, but
        that of the hinge loss falls with it: a movie is in fewer examples."""
        return BALANCE / movies if self.spreadout == "auto" else float(self.spreadout)


def problem(options: Options = Options(), data: Path | None = None) -> Problem:  # noqa: B008
    """From a client store with the columns `context` and `movie`, or synthetic ratings."""
    users = with_lengths(_synthetic(options) if data is None else _opened(data))
    largest = options.movies if data is None else _largest_id(users.examples)
    movies = largest if options.largest_id == "auto" else int(options.largest_id)
    if movies < largest:
        raise MixflError(
            f"largest_id = {movies}, but the data has a movie {largest}: give {largest} or more, "
            "or auto."
        )
    parts = {name: users.select(rows) for name, rows in split(len(users), options).items()}
    train = parts["train"]
    hinge = partial(hinge_loss, margin=options.margin)
    spread = partial(spreadout, strength=options.strength(movies))
    judge = partial(Evaluation, train=train, movies=movies, options=options)
    return Problem(
        init=partial(init, movies=movies, embedding=options.embedding),
        terms=[
            Federated(hinge, train, weight=0.5, rows={"movies": ("context", "movie")}),
            Central(spread, weight=0.5),
        ],
        evaluate=judge(parts[options.split]),
        validate=judge(parts["validation"]) if options.validation else None,
        client_eval=(
            ClientEvaluation(hinge, parts[options.split], name="hinge", at_server=True)
            if options.client_eval
            else None
        ),
        name="movie",
        predict=predict,
    )


def _synthetic(o: Options) -> ClientData:
    drawn = ratings(o.users, o.movies, o.per_user, difficulty=o.difficulty, seed=o.data_seed)
    user = drawn.pop("user")
    return ClientData.from_arrays(drawn, client=user)


def _opened(path: Path) -> ClientData:
    if (path / "train").is_dir():
        raise MixflError(
            f"{path} was prepared with --split: the movie task splits the users itself (in the "
            "paper's proportions, by data_seed). Prepare it without."
        )
    users = ClientData.open(path)
    columns = users.examples.columns
    kinds = {name: (len(c.shape), c.dtype.kind) for name, c in columns.items()}
    if kinds.get("context") != (1, "i") or kinds.get("movie") != (0, "i"):
        raise MixflError(
            f"{path} is no data of the movie task: it needs the whole-number columns `context` "
            "(previous movies) and `movie` (the next), as `mixfl data prepare movielens` writes."
        )
    return users


def with_lengths(users: ClientData) -> ClientData:
    """Add a column `length`, the number of movies in the context.

    The loss can't count the nonzero movies itself: a client that holds only its own rows of the
    table has its movies renumbered, including the padding.
    """
    columns = users.examples.columns
    lengths = []
    for part in columns["context"].parts:
        known = part > 0
        if (part < 0).any() or (known[:, 1:] > known[:, :-1]).any():
            raise MixflError(
                "the column `context` has a negative number, or a 0 before a movie: expected "
                "movies from 1, filled up with zeros at the end."
            )
        lengths.append(known.sum(1).astype(np.int32 if part.shape[1] > 255 else np.uint8))
    if any((part < 1).any() for part in columns["movie"].parts):
        raise MixflError("the column `movie` has a number below 1: movies count from 1.")
    examples = Examples({**columns, "length": Column(lengths)}, users.examples.rows)
    return ClientData(examples, users.offsets, users.ids, users.dropped)


def _largest_id(examples: Examples) -> int:
    """The size of the catalog, which is public and says nothing about a user."""
    columns = (examples.columns["context"], examples.columns["movie"])
    return max(int(part.max()) for column in columns for part in column.parts)


def split(users: int, options: Options) -> dict[str, np.ndarray]:
    """Users for each purpose, in the paper's proportions.

    `datacenter` are the paper's 20 % of users whose data is at the server. No algorithm trains on
    them here, because the central loss needs no data. They are left out so that training uses as
    many users as in the paper.
    """
    if users < 13:
        raise MixflError(f"the data has {users} users: the movie task needs at least 13.")
    order = np.random.default_rng(options.data_seed).permutation(users)
    train, held_out = users * TRAIN // USERS, users * HELD_OUT // USERS
    ends = np.cumsum([train, held_out, held_out])
    names = ("train", "validation", "test", "datacenter")
    return {k: np.sort(rows) for k, rows in zip(names, np.split(order, ends), strict=True)}


def init(key: Any, movies: int, embedding: int) -> dict[str, Any]:
    """Movies uniform within 0.05 (as Keras' embeddings), the layer Glorot-uniform, no bias."""
    first, second = jax.random.split(key)
    return {
        "movies": jax.random.uniform(first, (movies + 2, embedding), minval=-INIT, maxval=INIT),
        "context": {
            "w": jax.nn.initializers.glorot_uniform()(second, (embedding, embedding)),
            "b": jnp.zeros(embedding),
        },
    }


def unit(vectors):
    """Vectors scaled to length 1; the zero vector (all ReLUs off) stays 0, with a finite slope."""
    return vectors * jax.lax.rsqrt(jnp.sum(vectors**2, axis=-1, keepdims=True) + EPSILON)


@jax.custom_vjp
def product(x, w):
    """x @ w. XLA is several times slower at many small products x'g than at x @ g: for a group of
    clients, the gradients of the weights would take a third of the time. So x is transposed first,
    behind a barrier that keeps XLA from fusing the two."""
    return x @ w


product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, jax.lax.optimization_barrier(kept[0].T) @ g),
)


def left_tower(layer, context, length):
    """Embeddings of the context [n, 10, d] -> [n, d]; only the first `length` count."""
    counts = jnp.arange(context.shape[1]) < length[:, None]  # [n, 10]
    total = jnp.sum(jnp.where(counts[..., None], context, 0), axis=1)
    mean = total / jnp.maximum(length, 1)[:, None]
    return unit(jax.nn.relu(product(mean, layer["w"]) + layer["b"]))


def hinge_loss(params, batch, margin):
    """max(margin - cosine, 0)^2: clients have positive examples only."""
    table = params["movies"]
    left = left_tower(params["context"], table[batch["context"]], batch["length"])
    cosine = jnp.sum(left * unit(table[batch["movie"]]), axis=-1)
    return jnp.maximum(margin - cosine, 0) ** 2


def spreadout(params, strength):
    """strength x sqrt(sum over i != j of (u_i . u_j)^2), u the movies' rows at length 1.

    The sum over all i, j of (u_i . u_j)^2 is the squared norm of the d x d matrix U'U. Every movie
    counts, even one that nobody rated, because the server can't know. Row 0 and the spare row are
    not movies.
    """
    u = unit(params["movies"][1:-1])
    itself = jnp.sum(jnp.sum(u**2, axis=1) ** 2)
    return strength * jnp.sqrt(jnp.maximum(jnp.sum((u.T @ u) ** 2) - itself, 0) + EPSILON)


def predict(params, batch):
    """`scores`: of every movie after those in `context` (0: padding), at most 1; -1 for id 0."""
    table = params["movies"]
    lengths = jnp.sum(batch["context"] > 0, axis=1)
    left = left_tower(params["context"], table[batch["context"]], lengths)
    return {"scores": (left @ unit(table[:-1]).T).at[:, 0].set(-1.0)}


def hits(scores, target, context, count_context: bool):
    """Whether `target` is among the ten best: 0 or 1, or its chance if ties are broken at random.

    scores: [n, movies + 1], -inf for id 0; target: [n]; context: [n, 10], 0 = padding.
    """
    each = jnp.arange(len(scores))
    own = scores[each, target][:, None]
    if not count_context:
        scores = scores.at[each[:, None], context].set(-jnp.inf)
        scores = scores.at[each, target].set(own[:, 0])
    higher, tied = jnp.sum(scores > own, axis=1), jnp.sum(scores == own, axis=1)
    return jnp.clip((TOP - higher) / tied, 0, 1)


class Evaluation:
    """Hinge, spreadout, their sum with weights 1/2, and recall@10 over all movies.

    The weights stay at 1/2 whatever w_f and w_c are, so that runs can be compared.
    """

    def __init__(self, users: ClientData, train: ClientData, movies: int, options: Options):
        rng = np.random.default_rng(options.data_seed)
        n = len(users.examples)
        rows = np.sort(rng.permutation(n)[: options.eval_examples])
        self.examples = users.examples.take(rows)
        self.count_context = options.count_context
        self.counts = np.zeros(movies + 1, np.float32)
        seen = Examples({"movie": train.examples.columns["movie"]}, train.examples.rows)
        np.add.at(self.counts, seen.all()["movie"], 1)
        self.counts[0] = -np.inf
        self.spreadout = jax.jit(partial(spreadout, strength=options.strength(movies)))
        self.chunk = jax.jit(partial(self._chunk, margin=options.margin))
        self.popular = jax.jit(self._popular)

    def __call__(self, params) -> dict[str, float]:
        hinge, hit = self._over_all(partial(self.chunk, params))
        spread = float(self.spreadout(params))
        return {
            "loss": 0.5 * hinge + 0.5 * spread,
            "hinge": hinge,
            "spreadout": spread,
            "recall@10": hit,
            "popularity/recall@10": self.popularity,
        }

    @cached_property
    def popularity(self) -> float:
        """Recall@10 of the movies that the training users rated most, the same for everyone."""
        return self._over_all(lambda batch: (self.popular(batch),))[0]

    def _over_all(self, function) -> list[float]:
        """Means over all examples of the values that `function` returns for a chunk."""
        n = len(self.examples["movie"])

        def chunk(rows):
            values = function({k: a[np.minimum(rows, n - 1)] for k, a in self.examples.items()})
            return [np.asarray(v)[rows < n].sum(dtype=np.float64) for v in values]

        totals = over_chunks(chunk, n, EVAL_CHUNK)
        return [float(total) / n for total in np.sum(totals, axis=0)]

    def _chunk(self, params, batch, margin):
        table = params["movies"]
        left = left_tower(params["context"], table[batch["context"]], batch["length"])
        scores = (left @ unit(table[:-1]).T).at[:, 0].set(-jnp.inf)
        hit = hits(scores, batch["movie"], batch["context"], self.count_context)
        return hinge_loss(params, batch, margin), hit

    def _popular(self, batch):
        scores = jnp.broadcast_to(self.counts, (len(batch["movie"]), len(self.counts)))
        return hits(scores, batch["movie"], batch["context"], self.count_context)
