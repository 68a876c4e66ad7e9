"""The first model is what `init` returns, to the bit, from one program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import clients, logistic, settings

import mixfl
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.engine import Simulator
from mixfl.engine.first_model import _program, _traced, first_model

SCALE = 1.7
# With the optimizations of users: the least that first_model takes are more than the quick tests'.
pytestmark = [pytest.mark.numbers, pytest.mark.optimized]


def layers(key):
    """XLA alone would merge products with what draws."""
    params = {}
    for i, own in enumerate(jax.random.split(key, 4)):
        a, b, c = jax.random.split(own, 3)
        params[f"layer{i}"] = {
            "w": jax.random.normal(a, (16, 8)) * 0.02 / jnp.sqrt(3.0 + i),
            "v": jax.nn.initializers.glorot_uniform()(b, (8, 5)) * SCALE,
            "b": 0.1 * jax.random.uniform(c, (5,)) + 0.3,
        }
    return params


def of_unit_norm(key):
    return jax.tree.map(lambda a: a / jnp.linalg.norm(a), layers(key))


def on_the_host(key):
    rng = np.random.default_rng(int(jax.random.key_data(key)[-1]))
    return {f"w{i}": rng.normal(size=3).astype(np.float32) for i in range(9)}


def of(init):
    return mixfl.Problem(init, [mixfl.Federated(logistic, clients(1))])


@pytest.mark.parametrize("init", [layers, of_unit_norm, on_the_host])
def test_to_the_bit(init):
    p = of(init)
    for seed in (0, 7):
        want, got = init(jax.random.key(seed)), first_model(p, seed)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_one_program_where_bits_stay():
    problems = [of(init) for init in (layers, of_unit_norm, on_the_host)]
    programs = [_program(p.init, lambda p=p: _traced(p)) is not p.init for p in problems]
    assert programs == [True, False, False]


def test_another_seed_compiles_nothing_and_other_values_count(monkeypatch):
    p, compiled = of(layers), []
    first = first_model(p, 0)
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    other = first_model(p, 1)
    assert compiled == []
    assert (first["layer0"]["w"] != other["layer0"]["w"]).any()
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    np.testing.assert_array_equal(
        first_model(p, 0)["layer0"]["v"], layers(jax.random.key(0))["layer0"]["v"]
    )


def test_init_is_traced_once():
    traced = []

    def counted(key):
        traced.append(1)
        return layers(key)

    x = np.zeros((8, 16), np.float32)
    data = mixfl.ClientData.from_arrays({"x": x}, client=np.arange(8))
    p = mixfl.Problem(
        counted, [mixfl.Federated(lambda x, batch: batch["x"] @ x["layer0"]["w"][:, 0], data)]
    )
    s = settings(cohort_size=2, client_batch=4, local_steps=1)
    simulator = Simulator(p, fed_avg.build(p, s), s)
    next(simulator.rounds(simulator.init(), 0, 1))
    assert len(traced) == 1


def test_a_round_traces_a_loss_once():
    traced = []

    def loss(params, batch):
        traced.append(1)
        return logistic(params, batch)

    p = mixfl.Problem(lambda key: {"w": jnp.zeros(3), "b": jnp.zeros(())},
                      [mixfl.Federated(loss, clients(1))])  # fmt: skip
    s = settings(cohort_size=2, client_batch=4, local_steps=1, loops="compiled", devices=1)
    simulator = Simulator(p, fed_avg.build(p, s), s)
    del traced[:]
    next(simulator.rounds(simulator.init(), 0, 1))
    assert len(traced) == len(simulator.feeder.shapes[0])
