"""The predicted memory of a round, beside what XLA's compiler allocates for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixfl.algorithms import ALGORITHMS
from mixfl.data import ClientData
from mixfl.engine import Simulator
from mixfl.engine.memory import PIECES, predicted_bytes
from mixfl.problem import Central, Federated, Problem
from mixfl.settings import Settings

WIDTH, LAYERS = 256, 4
USUAL = {
    "local_steps": 2, "client_batch": 32, "devices": 1, "first_layer": "plain", "clip": "off",
}  # fmt: skip


def loss(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2, -1)


def simulator(algorithm: str, layers: int = LAYERS, **more) -> Simulator:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8 * 64, WIDTH)).astype(np.float32)
    clients = ClientData.from_arrays({"x": x}, client=np.repeat(np.arange(8), 64))
    problem = Problem(
        lambda key: [jax.random.normal(key, (WIDTH, WIDTH)) for _ in range(layers)],
        [Federated(loss, clients), Central(loss, {"x": x})],
    )
    s = Settings(rounds=2, cohort_size=4, client_lr=0.1, **USUAL | more)
    return Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)


def allocated(sim: Simulator) -> int:
    """By XLA, on one device."""
    piece = next(sim.feeder.pieces(sim.at(0), 0))
    given = sim.shapes(), piece.drawn, piece.clients, sim.given(sim.program(sim.at(0)))
    m = sim.program(sim.at(0)).whole.lower(*given).compile().memory_analysis()
    return (
        m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        + m.temp_size_in_bytes
    )  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedavg", {}),
        ("pt", {}),
        ("1wgt", {}),
        ("2wgt", {}),
        ("fedavg", {"devices": 2}),
        ("2wgt", {"devices": 2}),
        (
            "fedavg",
            {"client_opt": "adam", "server_opt": "adam", "local_steps": 6, "client_batch": 8},
        ),
        ("pt", {"central_opt": "adam", "central_batch": 256, "central_chunk": 64}),
        ("2wgt", {"client_opt": "sgd(momentum=0.9)"}),
        ("1wgt", {"client_opt": "sgd(momentum=0.9)"}),
    ],
)
def test_the_prediction_is_near_what_xla_allocates(algorithm, more):
    sim = simulator(algorithm, **more)
    predicted = predicted_bytes(sim)
    data = predicted.data / PIECES / predicted.devices
    assert predicted.device + data == pytest.approx(allocated(sim), rel=0.2)


@pytest.mark.parametrize(
    ("layers", "more"),
    [(LAYERS, {"local_steps": 6, "client_batch": 8}), (20, {}), (20, {"local_steps": 1})],
)
def test_a_loop_of_plain_steps_has_one_gradient(layers, more):
    """With another one, as steps that are written out have it, it would be 1.2 times as much."""
    sim = simulator("fedavg", layers, **more)
    predicted = predicted_bytes(sim)
    data = predicted.data / PIECES / predicted.devices
    assert predicted.device + data == pytest.approx(allocated(sim), rel=0.1)
