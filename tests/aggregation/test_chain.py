"""Steps of the aggregation, composed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import problems
import table_problem
from problems import flat, settings

from mixfl import aggregation
from mixfl.aggregation.base import Chain, Step
from mixfl.aggregation.wire import restored, sent
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import Upload
from mixfl.algorithms.steps import add, client_update, gradient, scale, weighted_summand
from mixfl.engine import Simulator
from mixfl.settings import Settings

S = Settings(local_steps=3)


def summand(weight=2.0, dtype=jnp.float32):
    own = {"w": jnp.array([1.0, -2.0, 4.0], dtype)}
    return weighted_summand(S, Upload(own, jnp.float32(weight), jnp.float32(3), None, 0.0))


class Noise(Step):
    random = elements = True

    def encode(self, told, summand, key):
        noise = jax.random.normal(key, (3,))
        return summand._replace(weighted={"w": summand.weighted["w"] + noise}), ()


class Doubled(Step):
    """Clients send twice their part; the server halves the sum."""

    def encode(self, told, summand, key):
        return summand._replace(weighted=jax.tree.map(lambda a: 2 * a, summand.weighted)), ()

    def decode(self, settled, codes):
        return codes._replace(weighted=jax.tree.map(lambda a: a / 2, codes.weighted))


def test_steps_that_draw_have_keys_of_their_own():
    start, key = summand(), np.array([3, 4], np.uint32)
    one = Chain([Noise()]).encode(((),), start, key)[0].weighted["w"] - start.weighted["w"]
    two = Chain([Noise(), Noise()]).encode(((), ()), start, key)[0].weighted["w"]
    second = two - start.weighted["w"] - one
    assert np.abs(second - one).max() > 0.1
    again = Chain([Noise()]).encode(((),), start, key)[0].weighted["w"] - start.weighted["w"]
    np.testing.assert_array_equal(one, again)


def test_the_sum_of_one_array_serves_both_sums():
    start = summand(weight=4.0)._replace(unweighted={"w": jnp.full(3, jnp.nan)})
    code, _ = Chain([Doubled()]).encode(((),), start, None)
    np.testing.assert_allclose(code.unweighted["w"], code.weighted["w"] / 4)


def test_clients_steps_come_before_the_servers(monkeypatch):
    """As in a deployment, whatever their order in the list."""
    more = (*aggregation.CHOOSE, lambda s: Doubled())
    monkeypatch.setattr(aggregation, "CHOOSE", more)
    steps = aggregation.chain(Settings()).steps
    assert [step.at_client for step in steps] == [True, False]
    assert isinstance(steps[0], Doubled)


def test_what_is_decoded_is_what_was_encoded(monkeypatch):
    p, s = problems.problem(), settings(rounds=3, clip="off")

    def model():
        simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
        *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
        return flat(last.state.x)

    plain = model()
    monkeypatch.setattr(aggregation, "CHOOSE", (lambda s: Doubled(),))
    np.testing.assert_allclose(model(), plain, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_sent_as_such():
    start = summand(weight=3.0, dtype=jnp.bfloat16)
    x = {"w": jnp.zeros(3, jnp.bfloat16)}
    wire = sent(start, x)
    assert wire.weighted["w"].dtype == jnp.bfloat16
    again = restored(wire, jax.eval_shape(lambda: start))
    assert again.weighted["w"].dtype == start.weighted["w"].dtype == jnp.float32
    np.testing.assert_allclose(again.weighted["w"], start.weighted["w"], rtol=2**-8)


def test_a_phase_with_a_client_of_its_own_has_no_form():
    """Rows of tables are for clients that use the model through their own loss alone."""
    usual = table_problem.simulator("fedavg")
    p, s, fedavg = usual.problem, usual.s, usual.algorithm

    def client(term, broadcast, feed):
        def grad(x, step):
            loss, g = gradient(term, x, step.batches)
            return loss, add(g, scale(0.1, x))

        return client_update(term, s, broadcast, feed, grad)

    decayed = fedavg._replace(client=client)
    models = []
    for tables in ("auto", "dense"):
        keys = dataclasses.replace(s, tables=tables)
        simulator = Simulator(p, fedavg._replace(phase=lambda t: decayed), keys)
        assert bool(simulator.forms.tables) == (tables == "auto")
        *_, last = simulator.rounds(simulator.init(), 0, 2)
        models.append(flat(last.state.x))
        assert simulator.round_bytes(1).down > 0
    np.testing.assert_allclose(*models, rtol=1e-5, atol=1e-6)
