"""Python's garbage collector rests while programs are traced, and only then."""

import gc
import threading

import jax.numpy as jnp
import pytest
from problems import clients, logistic, settings

import mixfl
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.engine import Simulator
from mixfl.process.collector import CollectorPaused


def test_it_rests_while_a_round_is_traced():
    on = []

    def loss(params, batch):
        on.append(gc.isenabled())
        return logistic(params, batch)

    p = mixfl.Problem(
        lambda key: {"w": jnp.zeros(3), "b": jnp.zeros(())}, [mixfl.Federated(loss, clients(1))]
    )
    s = settings(cohort_size=2, client_batch=4, local_steps=1, devices=1)
    simulator = Simulator(p, fed_avg.build(p, s), s)
    for result in simulator.rounds(simulator.init(), 0, 2):
        assert gc.isenabled(), result.round
    assert on
    assert not any(on)


def test_it_goes_on_after_the_last_and_after_an_error():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with CollectorPaused():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with pytest.raises(KeyError), CollectorPaused():
        raise KeyError
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_off_stays_off():
    gc.disable()
    try:
        with CollectorPaused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
