"""FedJAX: `for_each_client` and its own client datasets, as its `fed_avg` uses them.

This follows fedjax.algorithms.fed_avg, without the norms of the updates that it also computes. The
workload determines the order of the rows, hence `skip_shuffle`.
"""

import os

# The pmap backend needs two host devices; they do not slow down the jit backend.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={os.cpu_count()}"

import fedjax
import jax
import jax.numpy as jnp
from fedjax.core import tree_util

from benchmarks.peers import jax_models, protocol


class Engine:
    def init(self, folder):
        self.work = w = protocol.Workload(folder)
        backend = os.environ.get("FEDJAX_BACKEND", "jit")
        fedjax.set_for_each_client_backend(backend)
        loss = jax_models.LOSSES[w.task]

        def mean_loss(params, batch):
            return w.size["weight"] * loss(params, batch, w.model).mean()

        def grad(params, batch, rng):
            return jax.grad(mean_loss)(params, batch)

        self.train = fedjax.algorithms.fed_avg.create_train_for_each_client(
            grad, fedjax.optimizers.sgd(w.size["lr"])
        )
        self.batching = fedjax.ShuffleRepeatBatchHParams(
            batch_size=w.B, num_epochs=None, num_steps=w.K, skip_shuffle=True
        )
        self.server = fedjax.optimizers.sgd(1.0)
        self.params = jax.tree_util.tree_map(jnp.asarray, protocol.tree(w.params))
        self.state = self.server.init(self.params)
        self.t = 0

    def run(self, rounds):
        for _ in range(rounds):
            self.round()
        jax.block_until_ready(self.params)

    def round(self):
        rngs = jax.random.split(jax.random.PRNGKey(self.t), self.work.S)
        datasets = {
            i: fedjax.ClientDataset(self.work.client(self.t, i)) for i in range(self.work.S)
        }
        clients = [
            (i, data.shuffle_repeat_batch(self.batching), rngs[i]) for i, data in datasets.items()
        ]
        total, count = tree_util.tree_zeros_like(self.params), 0
        for i, delta in self.train(self.params, clients):
            examples = len(datasets[i])
            total = tree_util.tree_add(total, tree_util.tree_weight(delta, examples))
            count += examples
        mean = tree_util.tree_inverse_weight(total, count)
        self.state, self.params = self.server.apply(mean, self.state, self.params)
        self.t += 1

    def parameters(self):
        return protocol.flat(self.params)


if __name__ == "__main__":
    protocol.serve(Engine())
