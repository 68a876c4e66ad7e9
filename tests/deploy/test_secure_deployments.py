"""Secure aggregation on Flower: the simulator's rounds to the quantization, whoever drops out."""

import numpy as np
import pytest
from deployed import ADAM, assert_same, deploy, simulate

SECURE = dict(secure=True, cohort_size=4, rounds=4)


@pytest.mark.parametrize(
    ("problem", "algorithm", "changes"),
    [("two terms", "2wgt", {}), ("two terms", "fedavg", ADAM)],
)
def test_a_secure_deployment_is_the_simulator(problem, algorithm, changes):
    found, _, _ = deploy(problem, algorithm=algorithm, **(SECURE | changes))
    given = {k: v for k, v in (SECURE | changes).items() if k != "secure"}
    expected = simulate(problem, algorithm, clip="off", **given)
    assert_same(found.params, expected.params, 1e-5)
