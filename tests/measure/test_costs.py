"""`mixfl costs`: the paper's figures to the digit, and what is counted beside them."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from mixfl.cli import cli
from mixfl.measure.costs import Paper, notes, tables
from mixfl.studies.costs import costs

PAPER = Paper(N=3954, d=16, B=16, K=10, n=160)
SMALL = dict(users=60, movies=120, per_user=25, cohort_size=5, client_batch=4, local_steps=3)


def test_the_papers_table_3_to_the_digit():
    """tab.nmp-results."""
    assert f"{PAPER.step_flop('baseline') / 1e6:.2f}" == "125.16"
    for algorithm in ("pt", "1wgt", "2wgt"):
        assert f"{PAPER.step_flop(algorithm) / 1e6:.3f}" == "0.025"
    kb = [f"{PAPER.bytes(a) / 1024:.0f}" for a in ("baseline", "pt", "1wgt", "2wgt")]
    assert kb == ["494", "20", "30", "30"]


def test_the_papers_savings():
    """99.98 % of computation, more than 93.9 % of communication."""
    saved = 1 - PAPER.step_flop("1wgt") / PAPER.step_flop("baseline")
    assert f"{saved:.2%}" == "99.98%"
    assert 1 - PAPER.bytes("1wgt") / PAPER.bytes("baseline") > 0.939


@pytest.fixture(scope="module")
def small():
    return costs("movie", "demo", None, SMALL)


def test_counted_beside_the_formulas(small):
    N, d = small.paper.N, small.paper.d
    counted = small.counted
    dense = 4 * (N * d + d * d + d)
    assert counted["baseline"].down == dense
    assert counted["baseline"].up == dense + 8  # p_i and K_i
    rows = counted["pt"].rows
    assert 4 < rows < N
    layer = 4 * (d * d + d)
    assert counted["pt"].down == pytest.approx(4 * rows * d + layer)
    numbers = counted["pt"].up - (4 * rows * d + layer + 8)  # of the rows: a byte or two each
    assert rows <= numbers * 1.001 < 2 * rows
    for a in ("1wgt", "2wgt"):
        assert counted[a].down == pytest.approx(2 * counted["pt"].down)
        assert counted[a].up == pytest.approx(counted["pt"].up)


def test_the_memory_of_a_client(small):
    """The baseline holds several models of all movies; the others their own rows. Those with an
    augmenting gradient hold it too."""
    counted, N, d = small.counted, small.paper.N, small.paper.d
    model = 4 * (N * d + d * d + d)
    assert 3 * model < counted["baseline"].memory < 20 * model
    assert counted["pt"].memory < 0.8 * counted["baseline"].memory
    sent = counted["pt"].down
    for a in ("1wgt", "2wgt"):
        assert counted[a].memory >= counted["pt"].memory + 0.9 * sent
    title, _, rows = tables(small)[-1]
    assert title.startswith("memory of a client")
    assert [row[0] for row in rows] == ["Baseline", "PT", "1-w GT", "2-w GT"]


def test_the_compiler_counts_what_the_forms_cost(small):
    """Over pairs N^2 d operations several times over, in the Gram form N d^2."""
    N, d = small.paper.N - 2, small.paper.d
    flop = small.counted["pt"].regularizer_flop
    assert 2 * N * N * d < flop["pairs"] < 20 * N * N * d
    assert 2 * N * d * d < flop["gram"] < 20 * N * d * d
    step = {a: c.step_flop for a, c in small.counted.items()}
    assert step["baseline"]["pairs"] - step["baseline"]["gram"] == pytest.approx(
        flop["pairs"] - flop["gram"], rel=0.05
    )
    assert step["pt"]["pairs"] == step["pt"]["gram"]  # no regularizer at the client
    assert step["pt"]["gram"] < 0.1 * step["baseline"]["pairs"]


def test_a_problem_of_ones_own(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import jax.numpy as jnp, numpy as np, mixfl\n"
        "data = mixfl.ClientData.from_arrays({'m': np.arange(8) % 5}, client=np.arange(8) // 2)\n"
        "loss = lambda p, b: jnp.sum(p['t'][b['m']] ** 2, 1)\n"
        "problem = mixfl.Problem(lambda key: {'t': jnp.ones((50, 3))},\n"
        "    [mixfl.Federated(loss, data, rows={'t': 'm'}),\n"
        "     mixfl.Central(lambda p: p['t'].sum())],\n"
        "    settings=dict(cohort_size=2, client_batch=2, local_steps=1))\n"
    )
    done = CliRunner().invoke(cli, ["costs", f"{own}:problem", "--json"])
    assert done.exit_code == 0, done.output
    counted = {a: c["counted"] for a, c in json.loads(done.stdout).items()}
    assert counted["baseline"]["down"] == 50 * 3 * 4
    assert counted["pt"]["down"] == counted["pt"]["rows"] * 3 * 4


def test_the_regularizers_steps_are_those_of_the_run():
    found = costs("movie", "demo", None, SMALL | dict(central_steps=2))
    steps = {a: c.regularizer_steps for a, c in found.counted.items()}
    assert steps == {"baseline": 3, "pt": 2, "1wgt": 1, "2wgt": 2}
    pairs = found.counted["pt"].regularizer_flop["pairs"]
    (row,) = [r for r in tables(found)[2][2] if r[0] == "PT"]
    assert float(row[4]) == pytest.approx(2 * pairs / 1e6, abs=0.01)


def test_what_is_printed(small):
    text = json.dumps([*tables(small), *notes(small)])
    assert "K N^2 d / 2" in text
    assert np.isfinite(float(tables(small)[0][2][0][1]))


def test_another_task_gets_what_can_be_counted():
    keys = dict(image_size=8, clients=20, per_client=4, cohort_size=4)
    flags = [f for k, v in keys.items() for f in ("--set", f"{k}={v}")]
    done = CliRunner().invoke(cli, ["costs", "smile", "--preset", "demo", "--json", *flags])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"pt", "1wgt", "2wgt"}  # its central loss needs data: no baseline
    assert found["1wgt"]["counted"]["down"] == 2 * found["pt"]["counted"]["down"]
