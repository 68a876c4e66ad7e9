"""The bare loop: a FedAvg round written directly in JAX, on one device, with the data in memory.

With `--rows`, each client trains only the table rows that its data uses.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import jax_models, protocol

HELD = 4  # rounds whose data is in memory


class Engine:
    def __init__(self, rows: bool = False):
        self.rows = rows

    def init(self, folder):
        w = protocol.Workload(folder)
        cohorts = [w.cohort(t) for t in range(min(HELD, len(w.order)))]
        if self.rows:
            cohorts = with_rows(cohorts)
        self.data = jax.device_put(cohorts)
        self.x = jax.tree.map(jnp.asarray, protocol.tree(w.params))
        self.t = 0
        loss = jax_models.LOSSES[w.task]
        step = make_step(lambda x, b: w.size["weight"] * loss(x, b, w.model).mean(), w.size["lr"])
        self.round = jax.jit(
            row_round(step, w.K) if self.rows else dense_round(step, w.K), donate_argnums=0
        )

    def run(self, rounds):
        for _ in range(rounds):
            self.x = self.round(self.x, self.data[self.t % len(self.data)])
            self.t += 1
        jax.block_until_ready(self.x)

    def parameters(self):
        return protocol.flat(self.x)


def make_step(loss, lr):
    def step(y, batch):
        return jax.tree.map(lambda y, g: y - lr * g, y, jax.grad(loss)(y, batch))

    return step


def steps(step, K, y, batches):
    for k in range(K):
        y = step(y, jax.tree.map(lambda a, k=k: a[k], batches))
    return y


def dense_round(step, K):
    def round(x, data):
        def body(total, batches):
            y = steps(step, K, x, batches)
            return jax.tree.map(lambda t, y, x: t + (y - x), total, y, x), None

        total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, x), data)
        clients = len(jax.tree.leaves(data)[0])
        return jax.tree.map(lambda x, d: x + d / clients, x, total)

    return round


def row_round(step, K):
    """Like `dense_round`, but with only the rows data["rows"] of the table `movies`."""

    def round(x, data):
        def body(total, feed):
            batches = dict(feed)
            rows = batches.pop("rows")
            own = {**x, "movies": x["movies"][rows]}
            delta = jax.tree.map(jnp.subtract, steps(step, K, own, batches), own)
            table = total["movies"].at[rows].add(delta.pop("movies"))
            rest = jax.tree.map(jnp.add, {k: total[k] for k in delta}, delta)
            return {**rest, "movies": table}, None

        total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, x), data)
        clients = len(data["rows"])
        return jax.tree.map(lambda x, d: x + d / clients, x, total)

    return round


def with_rows(cohorts):
    """Renumbers each client's movies and adds their table rows, padded to equal length. (Padding
    refers to row 0, but no batch uses a padded row, so it changes nothing.)"""
    renumbered = []
    for data in cohorts:
        unique = [
            np.unique(np.concatenate([data[c][i].ravel() for c in ("context", "movie")]))
            for i in range(len(data["movie"]))
        ]
        renumbered.append((dict(data), unique))
    most = max(len(u) for _, unique in renumbered for u in unique)
    for data, unique in renumbered:
        for column in ("context", "movie"):
            data[column] = np.stack(
                [np.searchsorted(u, c).astype(np.int32) for u, c in zip(unique, data[column])]  # noqa: B905
            )
        data["rows"] = np.stack([np.pad(u, (0, most - len(u))) for u in unique]).astype(np.int32)
    return [data for data, _ in renumbered]


if __name__ == "__main__":
    protocol.serve(Engine(rows="--rows" in sys.argv))
