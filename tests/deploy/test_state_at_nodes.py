"""The state of a model in a deployment is what it is in the simulator."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import problems
from deployed import SETTINGS, SIZES, Notes, assert_same, at_nodes
from flower_grid import InProcess

import mixfl
import mixfl.flower
from mixfl.deploy.flower import server
from mixfl.runs.training import run


def loss(params, batch, state):
    mask = batch["mask"][:, None]
    mean = (batch["x"] * mask).sum(0) / jnp.maximum(mask.sum(), 1)
    losses = problems.logistic(params, {**batch, "x": batch["x"] - state["mean"]})
    return losses, {"mean": 0.7 * state["mean"] + 0.3 * mean}


def test_simulator_equals_deployment():
    terms = [problems.population(sizes=SIZES), problems.datacenter()]
    terms = [dataclasses.replace(t, loss=loss) for t in terms]
    p = mixfl.Problem(problems.init, terms, state={"mean": np.zeros(3, np.float32)})
    s = SETTINGS | {"rounds": 3, "central_batch": 6}
    there, nodes = at_nodes(p)
    config = s | {"cohorts": "seed", "algorithm": "2wgt"}
    grid, notes = InProcess(mixfl.flower.client_app(there), nodes, config), Notes()
    found = run(server.deployed(there, grid, config, notes, grid.clock), None, True, notes)
    expected = mixfl.train(p, "2wgt", devices=1, **s)
    assert_same(found.params, expected.params)
    assert_same(found.state, expected.state)
    assert np.abs(found.state["mean"]).max() > 0.05
