"""Times a round at the paper's smile size: 21168-64-1, S = 100, K = 2, |B_i| = 5.

    python -m benchmarks.rounds [--trials N] [--rounds N]

Every algorithm runs through the simulator, from a memory-mapped store, reading included. Beside
it, in the same run and interleaved with it: the bare scan loop over clients that FedAvg wraps,
written down in JAX with its data already in memory, and the machine's best sgemm. A trial is a
few rounds; the table has medians over the trials and half the range between the quartiles.
"""

import json
import platform
import tempfile
import time
from functools import partial
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms import ALGORITHMS
from mixfl.cli import print_table
from mixfl.data import ClientData
from mixfl.engine import Simulator
from mixfl.problem import Central, Federated, Problem
from mixfl.settings import Settings
from mixfl.tasks import smile

S, K, B, H = 100, 2, 5, 64
IMAGE = (84, 84, 3)
D = int(np.prod(IMAGE))
LR = 0.01
CLIENTS, PER_CLIENT = 400, 20
RESULTS = Path(__file__).parent / "results.json"


def make_problems(folder: Path) -> tuple[Problem, Problem]:
    """Random images: what they show makes no difference to the time."""
    rng = np.random.default_rng(0)
    n = CLIENTS * PER_CLIENT
    images = rng.integers(0, 256, (n, *IMAGE), dtype=np.uint8)
    faces = {"image": images, "smiling": np.ones(n, np.uint8)}
    ClientData.from_arrays(faces, client=np.arange(n) // PER_CLIENT).write(folder / "store")
    clients = ClientData.open(folder / "store")
    loss = partial(smile.image_loss, mean=np.float32(127), scale=np.float32(1 / 255))
    unsmiling = {"image": images[:2000], "smiling": np.zeros(2000, np.uint8)}
    init = partial(smile.init, inputs=D, hidden=H)
    federated = Federated(loss, clients, 0.5)
    mixed = Problem(init, [federated, Central(loss, unsmiling, 0.5)])
    return mixed, Problem(init, [federated, Central(weight_decay, weight=0.5)])


def weight_decay(params):
    """A central loss that clients can compute too, for `baseline`."""
    return 1e-4 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


class BareLoop:
    """FedAvg's round as one would write it down, on one cohort that stays in memory."""

    def __init__(self, problem: Problem):
        term = problem.populations[0]
        rows = np.arange(S * K * B).reshape(S, K, B)
        self.data = jax.device_put(term.examples.take(rows))
        self.x = problem.init(jax.random.key(0))

        def client(x, batches):
            y = x
            for k in range(K):
                batch = jax.tree.map(lambda a, k=k: a[k], batches)
                g = jax.grad(lambda x, b=batch: term.weight * term.loss(x, b).mean())(y)
                y = jax.tree.map(lambda y, g: y - LR * g, y, g)
            return jax.tree.map(jnp.subtract, y, x)

        def round(x, data):
            def body(total, batches):
                return jax.tree.map(jnp.add, total, client(x, batches)), None

            zero = jax.tree.map(jnp.zeros_like, x)
            total, _ = jax.lax.scan(body, zero, data)
            return jax.tree.map(lambda x, d: x + d / S, x, total)

        self.round = jax.jit(round, donate_argnums=0)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.x = self.round(self.x, self.data)
        jax.block_until_ready(self.x)


class Mixfl:
    def __init__(self, problem: Problem, algorithm: str):
        s = Settings(
            rounds=10**6, cohort_size=S, client_batch=B, local_steps=K, client_lr=LR,
            pretrain_rounds=0,
        )  # fmt: skip
        self.simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)
        self.rounds = self.simulator.rounds(self.simulator.init(), 0, s.rounds)
        feed = self.simulator.at(0).feed
        drawn = sum(d.steps * d.batch for d in feed.draw if d)
        own = S * K * B * (2 if feed.share else 1) if feed.clients else 0
        self.waited = 0.0  # seconds waited for data in the timed rounds
        self.flops = 4 * (own + drawn) * (D * H + H)  # forward, and gradient of the weights

    def run(self, rounds: int) -> None:
        before = self.simulator.waited
        for _ in range(rounds):
            result = next(self.rounds)
        jax.block_until_ready(result.info)
        self.waited += self.simulator.waited - before

    def close(self) -> None:
        self.rounds.close()


class Sgemm:
    """The hardware's limit: the rate of one large product."""

    SIZE = 3000

    def __init__(self):
        a = np.random.default_rng(0).normal(size=(self.SIZE, self.SIZE)).astype(np.float32)
        self.a = jnp.asarray(a)
        self.dot = jax.jit(lambda a: a @ a)

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.dot(self.a).block_until_ready()


@click.command()
@click.option("--trials", default=7, show_default=True)
@click.option("--rounds", default=6, show_default=True, help="Rounds in a trial.")
@click.option("--algorithms", default=",".join(ALGORITHMS))
def main(trials: int, rounds: int, algorithms: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        problem, regularized = make_problems(Path(folder))
        engines = {"sgemm": Sgemm(), "bare scan loop": BareLoop(problem)}
        for name in algorithms.split(","):
            engines[name] = Mixfl(regularized if name == "baseline" else problem, name)
        compiled = {}
        for name, engine in engines.items():
            begun = time.perf_counter()
            engine.run(1)
            compiled[name] = time.perf_counter() - begun
            engine.run(2)  # warm
            engine.waited = 0.0
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(trials):
            for name, engine in engines.items():
                begun = time.perf_counter()
                engine.run(rounds)
                times[name].append(1000 * (time.perf_counter() - begun) / rounds)
        for engine in engines.values():
            if isinstance(engine, Mixfl):
                engine.close()

    limit = 2 * Sgemm.SIZE**3 / (min(times["sgemm"]) / 1000)  # flop/s
    bare = float(np.median(times["bare scan loop"]))
    rows, cells = [], []
    for name, engine in engines.items():
        if name == "sgemm":
            continue
        median = float(np.median(times[name]))
        low, high = np.percentile(times[name], [25, 75])
        flops = engine.flops if isinstance(engine, Mixfl) else 4 * S * K * B * (D * H + H)
        share = flops / (median / 1000) / limit
        row = dict(
            task="smile", engine="mixfl" if isinstance(engine, Mixfl) else "scan",
            algorithm=name if isinstance(engine, Mixfl) else "fedavg", ms_median=round(median, 2),
            ms_spread=round((high - low) / 2, 2), share_of_limit=round(share, 3),
            compile_s=round(compiled[name], 2),
        )  # fmt: skip
        waited = 0.0
        if isinstance(engine, Mixfl):
            waited = row["waited_for_data"] = round(
                1000 * engine.waited / (rounds * sum(times[name])), 4
            )
        if name == "fedavg":
            row["ratio_to"] = {"scan": round(bare / median, 3)}  # above 1: faster than the loop
        rows.append(row)
        cells.append([
            name, f"{median:.0f}", f"± {row['ms_spread']:.0f}", f"{share:.2f}",
            f"{median / bare:.2f}" if name in ("fedavg", "bare scan loop") else "",
            f"{100 * waited:.0f} %" if isinstance(engine, Mixfl) else "", f"{compiled[name]:.1f}",
        ])  # fmt: skip
    print_table(
        ["algorithm", "ms/round", "spread", "share of sgemm limit", "x bare loop", "waits",
         "compile s"],
        cells, title=f"smile {D}-{H}-1, S={S} K={K} |B_i|={B}, reading included",
    )  # fmt: skip
    print(f"sgemm limit {limit / 1e9:.0f} GFLOP/s, {trials} interleaved trials of {rounds} rounds")
    record = {
        "machine": platform.processor() or platform.machine(), "jax": jax.__version__,
        "sgemm_gflops": round(limit / 1e9, 1), "trials": trials, "rounds_per_trial": rounds,
    }  # fmt: skip
    content = [{**row, **record} for row in rows]
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    print(f"Written to {RESULTS}")


if __name__ == "__main__":
    main()
