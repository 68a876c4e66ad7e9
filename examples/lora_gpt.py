"""Fine-tunes adapters of a frozen GPT on clients' text, without forgetting the datacenter's.

A small GPT is pretrained on central text (articles), then frozen. Its adapters (LoRA: a low-rank
change of each weight matrix) are trained on the clients' text (posts): with FL alone, and with
mixed FL, where the articles are a central term. Clients get and send only the adapters. The text is
synthetic. docs/lora.md shows the result.

    python examples/lora_gpt.py                     # some minutes; --small takes seconds
    mixfl run examples/lora_gpt.py:problem --algorithm 1wgt
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mixfl
from mixfl.data.synthetic.text import texts

CHARACTERS, LENGTH, WIDTH, HEADS, LAYERS, RANK, ALPHA = 128, 48, 64, 4, 2, 4, 8.0
MATRICES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH)}  # fmt: skip
ALGORITHMS = {  # 1-way adds one central gradient to all local steps: it needs a lower rate
    "fedavg": dict(client_lr=1.0),
    "1wgt": dict(client_lr=0.3),
    "2wgt": dict(client_lr=1.0),
}


# The model


def init_base(key):
    keys = iter(jax.random.split(key, 2 + LAYERS * len(MATRICES)))

    def matrix(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) / np.sqrt(rows)

    return {
        "characters": 0.2 * jax.random.normal(next(keys), (CHARACTERS, WIDTH)),
        "places": 0.2 * jax.random.normal(next(keys), (LENGTH, WIDTH)),
        "blocks": [{name: matrix(*shape) for name, shape in MATRICES.items()}
                   for _ in range(LAYERS)],
    }  # fmt: skip


def init_adapters(key):
    """A [rows, r] and B [r, columns] for each matrix. B begins at 0: no change."""
    keys = iter(jax.random.split(key, LAYERS * len(MATRICES)))
    return [
        {name: {"a": jax.random.normal(next(keys), (rows, RANK)) / np.sqrt(rows),
                "b": jnp.zeros((RANK, columns))}
         for name, (rows, columns) in MATRICES.items()}
        for _ in range(LAYERS)
    ]  # fmt: skip


def normed(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def logits(base, ids, adapters=None):
    def times(x, layer, name):
        product = x @ base["blocks"][layer][name]
        if adapters is None:
            return product
        pair = adapters[layer][name]
        return product + ALPHA / RANK * (x @ pair["a"]) @ pair["b"]

    n = ids.shape[1]
    hidden = base["characters"][ids] + base["places"][:n]
    past = jnp.tril(jnp.ones((n, n), bool))
    for layer in range(LAYERS):
        q, k, v = (
            a.reshape(*a.shape[:2], HEADS, -1)
            for a in jnp.split(times(normed(hidden), layer, "qkv"), 3, -1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH / HEADS)
        weights = jax.nn.softmax(jnp.where(past, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(hidden.shape)
        hidden = hidden + times(mixed, layer, "out")
        hidden = hidden + times(jax.nn.gelu(times(normed(hidden), layer, "up")), layer, "down")
    return normed(hidden) @ base["characters"].T


def cross_entropy(base, batch, adapters=None):
    """Per sequence: the mean over its characters. 0 is after the end."""
    ids = jnp.minimum(batch["text"], CHARACTERS - 1)
    scores, following = logits(base, ids[:, :-1], adapters), ids[:, 1:]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(scores), following[..., None], -1)[..., 0]
    return jnp.sum(losses * (following > 0), 1) / jnp.maximum(jnp.sum(following > 0, 1), 1)


def loss(adapters, batch, frozen):  # one number per sequence
    return cross_entropy(frozen, batch, adapters)


# The problem


def pretrained(articles, steps):
    """The base: the whole GPT, trained on the articles."""
    central = mixfl.Problem(init_base, [mixfl.Central(cross_entropy, articles)])
    rounds = max(1, steps // 10)
    result = mixfl.train(
        central, "central", rounds=rounds, central_steps=10, central_batch=32, eval_every=rounds,
        central_opt="adam", central_lr=3e-3, progress=False,
    )  # fmt: skip
    return result.params


@functools.cache
def problem(small: bool = False) -> mixfl.Problem:
    clients, sequences, central, steps = (12, 10, 300, 20) if small else (100, 40, 4000, 400)
    posts, articles = texts(clients, sequences, central, length=LENGTH, difficulty=0.3)
    people = np.unique(posts["client"])
    new = np.isin(posts["client"], people[-len(people) // 10 :])  # not trained on
    late = np.arange(len(articles["text"])) >= 0.9 * len(articles["text"])
    tests = {"articles": articles["text"][late][:300], "posts": posts["text"][new][:300]}
    train = {"text": articles["text"][~late]}

    @jax.jit
    def losses(adapters, frozen):
        each = {k: loss(adapters, {"text": v}, frozen).mean() for k, v in tests.items()}
        return {"loss": (each["articles"] + each["posts"]) / 2} | {
            f"{k}/loss": v for k, v in each.items()
        }

    def evaluate(adapters, frozen):
        return losses(adapters, frozen)

    kept = {"text": posts["text"][~new]}
    terms = [
        mixfl.Federated(loss, mixfl.ClientData.from_arrays(kept, posts["client"][~new]), 0.5),
        mixfl.Central(loss, train, 0.5),
    ]
    settings = dict(
        rounds=4 if small else 50, cohort_size=4 if small else 10, local_steps=4, client_batch=8,
        central_batch=32, eval_every=4 if small else 10, client_lr=1.0,
    )  # fmt: skip
    return mixfl.Problem(
        init_adapters, terms, evaluate, settings=settings, name="lora_gpt",
        frozen=lambda: pretrained(train, steps),
    )  # fmt: skip


def table(small: bool = False) -> list[dict]:
    """A row for the base alone, and for each algorithm."""
    p = problem(small)
    start = p.evaluate(init_adapters(jax.random.key(0)), p.frozen.arrays)
    rows = [{"model": "pretrained", **{k: float(v) for k, v in start.items()}}]
    for algorithm, settings in ALGORITHMS.items():
        last = mixfl.train(p, algorithm, progress=False, **settings).metrics[-1]
        row = {k.removeprefix("eval/"): v for k, v in last.items() if k.startswith("eval/")}
        sent = {way: last[f"comm/{way}_bytes"] for way in ("down", "up")}
        rows.append({"model": f"adapters, {algorithm}", **row, **sent})
    return rows


def main(small: bool) -> None:
    print(f"{'':<18} {'articles':>9} {'posts':>7} {'KB down':>8} {'KB up':>7}")
    for row in table(small):
        sent = [f"{row[way] / 1024:.1f}" if way in row else "" for way in ("down", "up")]
        print(
            f"{row['model']:<18} {row['articles/loss']:>9.3f} {row['posts/loss']:>7.3f} "
            f"{sent[0]:>8} {sent[1]:>7}"
        )
    whole = sum(a.nbytes for a in jax.tree.leaves(problem(small).frozen.arrays)) / 1024
    print(f"The whole GPT would be {whole:.0f} KB in each direction.")


if __name__ == "__main__":
    main("--small" in sys.argv)
