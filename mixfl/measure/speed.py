"""How fast is this machine, next to the one of docs/benchmarks.md? In about ten seconds.

The workload is that of `make bench`: rounds of FedAvg with the smile task's model, 100 clients with
two steps of five images each. Next to it, the speed of a large product of matrices, which says how
fast rounds could be expected to be here.
"""

import time
from functools import partial
from statistics import median
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms import ALGORITHMS
from mixfl.data.examples import ClientData
from mixfl.engine import Simulator
from mixfl.problem import Federated, Problem
from mixfl.settings import Settings
from mixfl.tasks import smile

# Of benchmarks/results.json: two cores of a virtual machine.
RECORDED_MS, RECORDED_GFLOPS, RECORDED_CORES = 48.5, 175.8, 2
S, K, B, SIDE, HIDDEN = 100, 2, 5, 84, 64
CLIENTS, PER_CLIENT = 150, 10
PRODUCT = 2000
SLOW = 2.5  # times what the products let one expect


class Speed(NamedTuple):
    round_ms: float
    gflops: float

    @property
    def expected_ms(self) -> float:
        """The recorded time, on a machine whose products are as fast as here."""
        return RECORDED_MS * RECORDED_GFLOPS / self.gflops

    @property
    def slow(self) -> bool:
        return self.round_ms > SLOW * self.expected_ms


def measure(seconds: float = 10.0) -> Speed:
    """Medians: half of the time for products, half for rounds (and what compiling takes)."""
    return Speed(1000 * _round_seconds(seconds / 2), _gflops(seconds / 4))


def _gflops(seconds: float) -> float:
    a = jnp.asarray(np.random.default_rng(0).normal(size=(PRODUCT, PRODUCT)).astype(np.float32))
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    return 2 * PRODUCT**3 / median(_times(lambda: product(a).block_until_ready(), seconds)) / 1e9


def _round_seconds(seconds: float) -> float:
    rng = np.random.default_rng(0)
    rows = CLIENTS * PER_CLIENT
    columns = {
        "image": rng.integers(0, 256, (rows, SIDE, SIDE, 3), dtype=np.uint8),
        "smiling": rng.integers(0, 2, rows, dtype=np.uint8),
    }
    clients = ClientData.from_arrays(columns, client=np.repeat(np.arange(CLIENTS), PER_CLIENT))
    loss = partial(smile.image_loss, mean=np.float32(0), scale=np.float32(1 / 255))
    init = partial(smile.init, inputs=SIDE * SIDE * 3, hidden=HIDDEN)
    problem = Problem(init, [Federated(loss, clients)])
    s = Settings(cohort_size=S, local_steps=K, client_batch=B, client_lr=0.01, rounds=10**6)
    recipe = ALGORITHMS["fedavg"]
    s = recipe.resolve(problem, s)
    engine = Simulator(problem, recipe.build(problem, s), s)
    rounds = iter(engine.rounds(engine.init(), 0, s.rounds))
    try:
        for _ in range(2):  # compiles
            jax.block_until_ready(next(rounds).state.x)
        return median(_times(lambda: jax.block_until_ready(next(rounds).state.x), seconds))
    finally:
        rounds.close()  # type: ignore[attr-defined]


def _times(action, seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return times
