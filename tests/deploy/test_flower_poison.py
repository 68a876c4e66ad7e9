"""A client of a deployment that sends a finite, well-formed and harmful update."""

import jax
import numpy as np
import pytest
from deployed import SETTINGS, assert_same, deploy, simulate
from flower_grid import changed
from flwr.app import ArrayRecord

from mixfl.deploy.flower import messages

HARMFUL = 30.0  # norm of the update; honest ones are below 1


def harmful(content):
    """Another change, of the norm wanted, in a direction of its own."""
    rng = np.random.default_rng(1)
    ((layout, own),) = content["weighted"].items()
    drawn = rng.normal(size=len(own.data) // 4)
    factor = HARMFUL * content["numbers"]["weight"] / np.linalg.norm(drawn)
    data = (factor * drawn).astype(np.float32).tobytes()
    content["weighted"] = ArrayRecord({layout: messages.flat(data)})


def at(rounds, node=2):
    return {(str(t), node): changed(harmful) for t in rounds}


KEYS = dict(rounds=12, cohort_size=4, eval_every=1)  # all four clients, each round


def distance(found, honest) -> float:
    pairs = zip(jax.tree.leaves(found.params), jax.tree.leaves(honest.params), strict=True)
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs)))


@pytest.mark.parametrize("algorithm", ["fedavg", "2wgt"])
@pytest.mark.parametrize("rounds", [[6], [0], [0, 3, 6, 9]], ids=["once", "first", "often"])
def test_one_client_does_not_destroy_a_run(algorithm, rounds):
    honest, _, _ = deploy(algorithm=algorithm, **KEYS)
    kept, _, _ = deploy(algorithm=algorithm, faults=at(rounds), **KEYS)
    lost, _, _ = deploy(algorithm=algorithm, faults=at(rounds), clip="off", **KEYS)
    assert distance(lost, honest) > 1.0
    assert distance(kept, honest) < 0.2 * distance(lost, honest)
    assert kept.metrics[-1]["clients/clipped"] >= len(rounds)
    assert kept.metrics[-1]["clients/rejected"] == 0


def test_honest_clients_are_summed_as_in_the_simulator_with_clipping():
    """Simulator and deployment clip the same clients by the same limits."""
    keys = dict(KEYS, clip=0.02)
    found, _, _ = deploy(algorithm="2wgt", **keys)
    expected = simulate("two terms", "2wgt", **keys)
    assert found.metrics[-1]["clients/clipped"] > 0
    assert_same(found.params, expected.params)


@pytest.mark.parametrize("aggregation", ["median", "trimmed-mean", "krum"])
def test_robust_centers_are_the_simulators(aggregation):
    keys = dict(SETTINGS, rounds=4, cohort_size=4, aggregation=aggregation)
    found, _, _ = deploy(algorithm="2wgt", **keys)
    assert_same(found.params, simulate("two terms", "2wgt", **keys).params, 1e-4)
    kept, _, _ = deploy(algorithm="2wgt", faults=at([1, 2]), **(keys | {"clip": "off"}))
    assert distance(kept, found) < 1.0


def test_tables_are_whole_where_single_changes_are_compared():
    found, _, _ = deploy("tables", algorithm="2wgt", aggregation="median", rounds=2)
    expected = simulate("tables", "2wgt", aggregation="median", rounds=2)
    assert_same(found.params, expected.params, 1e-4)
