"""Deployments in one process (flower_grid.py), and the same problems in the simulator."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import table_problem
from flower_grid import (
    InProcess,
)

import mixfl
import mixfl.flower
from mixfl.deploy.flower import server
from mixfl.runs.sinks.terminal import Quiet
from mixfl.runs.training import run

SETTINGS = dict(rounds=5, cohort_size=3, client_batch=3, local_steps=3, client_lr=0.2, eval_every=1)
SIZES = (1, 4, 8, 5)  # examples of the clients: 1 to 3 steps, the last batch often short


def evaluate(params):
    return {"loss": sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))}


def at_nodes(problem: mixfl.Problem) -> tuple[mixfl.Problem, list[dict]]:
    """The same problem with each client at a node, and the nodes' configurations."""
    nodes, terms = [], []
    for term in problem.terms:
        if isinstance(term, mixfl.Federated):
            nodes += [{"partition-id": i, "population": term.name}
                      for i in range(len(term.clients))]  # fmt: skip

            def own(node, clients=term.clients):
                return clients.examples.take(clients.rows(node["partition-id"]))

            term = dataclasses.replace(term, clients=own)
        terms.append(term)
    return dataclasses.replace(problem, terms=terms), nodes


def dense(*more):
    return mixfl.Problem(problems.init, [problems.population(sizes=SIZES), *more], evaluate)


def with_tables(*terms):
    """Of its populations, four clients each."""
    few = [
        dataclasses.replace(t, clients=t.clients.select([0, 2, 3, 5]))
        if isinstance(t, mixfl.Federated) else t for t in terms
    ]  # fmt: skip
    return mixfl.Problem(table_problem.init, few, evaluate)


def dropout(params, batch, key):
    """logistic, with dropout of the inputs."""
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.7, (problems.DIM,)))(key)
    return problems.logistic(params, {**batch, "x": batch["x"] * keep / 0.7})


PROBLEMS = {
    "random": lambda: mixfl.Problem(
        problems.init,
        [dataclasses.replace(t, loss=dropout) for t in dense(problems.datacenter()).terms],
        evaluate,
    ),
    "two terms": lambda: dense(problems.datacenter()),
    "two populations": lambda: dense(
        problems.datacenter(), problems.population(5, 0.5, "other", sizes=SIZES[1:], shift=-0.4)
    ),
    "tables": lambda: with_tables(*table_problem.PROBLEMS["regularizer"]()),
    "a table of one population of two": lambda: with_tables(
        *table_problem.PROBLEMS["two populations, one of them dense"]()
    ),
}


@functools.cache
def placed(name: str) -> tuple[mixfl.Problem, list[dict]]:
    return at_nodes(PROBLEMS[name]())


class Notes(Quiet):
    def __init__(self):
        self.lines = []

    def note(self, message):
        self.lines.append(message)


def deploy(problem="two terms", out=None, grid=None, nodes=None, **given):
    """A run over the in-process grid: its result, the grid and what was said."""
    callbacks = given.pop("callbacks", ())
    options = {k: given.pop(k) for k in ("faults", "gone") if k in given}
    there, every = placed(problem)
    run_config = SETTINGS | {"cohorts": "seed"} | given  # the simulator's
    grid = grid or InProcess(mixfl.flower.client_app(there), nodes or every, run_config, **options)
    notes = Notes()
    plan = server.deployed(there, grid, run_config, notes, grid.clock, out)
    return run(plan, out, True, notes, callbacks=callbacks), grid, notes.lines


def simulate(problem, algorithm, **given):
    there, nodes = placed(problem)
    local = mixfl.flower.simulated(there, nodes)
    return mixfl.train(local, algorithm, devices=1, **(SETTINGS | given))


def assert_same(actual, expected, tolerance=1e-5):
    for f, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(f, e, rtol=tolerance, atol=tolerance)


ADAM = dict(server_opt="adam(eps=1e-3)", server_lr=0.05)
