"""The sum over the clients of a group, one by one or by XLA's own sum."""

import numpy as np
import pytest

from mixfl.forms.base import FEW, sum_of_group


@pytest.mark.parametrize("clients", [1, 2, FEW, FEW + 1])
def test_it_is_the_sum_over_the_first_axis(clients):
    stacked = {"w": np.random.default_rng(0).normal(size=(clients, 3, 2)), "n": np.arange(clients)}
    total = sum_of_group(stacked)
    np.testing.assert_allclose(total["w"], stacked["w"].sum(0), rtol=1e-5)
    assert total["n"] == stacked["n"].sum()
