"""The algorithms of docs/algorithms.md, run as they stand there."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import mixfl

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
ONE = dict(rounds=1, client_batch=1, clip="off")


def on_page(name: str) -> dict:
    (code,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 27
    names: dict = {}
    exec(compile(code, f"{PAGE.name}: {name}", "exec"), names)
    return names


def constant_gradients(*g: float, steps: int) -> mixfl.Problem:
    """Clients whose loss is g x: their gradient is g, wherever they are."""
    clients = {str(i): {"g": np.full((steps, 1), v, np.float32)} for i, v in enumerate(g)}
    loss = lambda x, batch: batch["g"][:, 0] * x["w"]  # noqa: E731
    term = mixfl.Federated(loss, mixfl.ClientData.from_clients(clients))
    return mixfl.Problem(lambda key: {"w": jnp.zeros(())}, [term])


@pytest.mark.parametrize("mu", [0.1, 0.7])
def test_fed_prox(mu):
    """After k steps, the distance from the server's model is -g (1 - (1 - eta mu)^k) / mu."""
    fed_prox, problem = on_page("fed_prox")["fed_prox"], constant_gradients(2.0, steps=3)
    keys = dict(**ONE, cohort_size=1, local_steps=3, client_lr=0.5)
    result = mixfl.train(problem, fed_prox(mu=mu), **keys)
    expected = -2.0 * (1 - (1 - 0.5 * mu) ** 3) / mu
    assert float(result.params["w"]) == pytest.approx(expected, rel=1e-5)


def test_agreeing():
    """Changes u of 1 and 3: the mean is 2, the mean square 5, the step 2^3 / 5."""
    agreeing, problem = on_page("agreeing")["agreeing"], constant_gradients(-1.0, -3.0, steps=1)
    keys = dict(**ONE, cohort_size=2, local_steps=1, client_lr=1.0, server_lr=0.5)
    result = mixfl.train(problem, agreeing, **keys)
    assert float(result.params["w"]) == pytest.approx(0.5 * 8 / 5, rel=1e-5)
    with pytest.raises(mixfl.MixflError, match="no effect on 'agreeing'"):
        mixfl.train(problem, agreeing, server_opt="adam")


def test_remembering():
    """A change of -1 in each round, and half of the one before: -1, -1.5, -1.75."""
    remembering, problem = on_page("remembering")["remembering"], constant_gradients(1.0, steps=1)
    keys = dict(ONE, rounds=3, cohort_size=1, local_steps=1, client_lr=1.0)
    result = mixfl.train(problem, remembering, **keys)
    assert float(result.params["w"]) == pytest.approx(-(1 + 1.5 + 1.75), rel=1e-5)
