"""The audit: below the accountant's epsilon, and above it if the mechanism is broken."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from click.testing import CliRunner
from jax.flatten_util import ravel_pytree

import mixfl
from mixfl.aggregation import private
from mixfl.cli import cli
from mixfl.errors import MixflError
from mixfl.measure.audit import audit, direction
from mixfl.measure.audit_task import audit_task, with_canaries
from mixfl.runs.plan import plan_of

SMALL = dict(epsilon=1.0, rounds=4, canaries=200, size=5000, seed=1)


# The noise is secret, so another one each time. With an epsilon of 8, the mean of what the attack
# sees is 1.4 or more, give or take 0.1.


@pytest.mark.parametrize(("algorithm", "epsilon"), [("fedavg", 1.0), ("2wgt", 8.0)])
def test_the_promise_holds(algorithm, epsilon):
    found = audit(algorithm, **SMALL | {"epsilon": epsilon})
    assert found.bound <= found.epsilon <= epsilon
    assert found.took_part.mean() > (0.5 if epsilon == 8 else -0.5)  # the attack sees something
    assert found.holds


def unclipped(monkeypatch):
    encode = private.Private.encode
    monkeypatch.setattr(
        private.Private, "encode", lambda self, told, s, key: (s, encode(self, told, s, key)[1])
    )


def silent(monkeypatch):
    init = private.Private.init

    def without(self, x, population):
        state = init(self, x, population)
        return state._replace(noise=0.0 * state.noise)

    monkeypatch.setattr(private.Private, "init", without)


def noise_on_few_rows(monkeypatch):
    release = private.Private.release

    def touched(self, state, sums):
        noised, after = release(self, state, sums)
        part = lambda n, a: n.at[50:].set(a[50:]) if a.ndim and len(a) > 50 else n  # noqa: E731
        whole = jax.tree.map(part, noised.weighted, sums.weighted)
        return noised._replace(weighted=whole), after

    monkeypatch.setattr(private.Private, "release", touched)


MUTANTS = [unclipped, silent, noise_on_few_rows]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_mechanism_is_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    found = audit("fedavg", **SMALL)
    assert found.bound > 2 * found.epsilon
    assert not found.holds


# A user's problem, with a table of 2,000 rows, of which clients use 50


def scored(params, batch):
    seen = params["table"][batch["row"]].sum(-1) + params["bias"]
    return jnp.logaddexp(0.0, seen) - batch["y"] * seen


def table_problem(name="own"):
    rng = np.random.default_rng(0)
    data = {"row": rng.integers(0, 50, 120), "y": rng.integers(0, 2, 120).astype(np.float32)}
    people = mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(30), 4))
    return mixfl.Problem(
        lambda key: {"table": jnp.zeros((2000, 4)), "bias": jnp.zeros(())},
        [
            mixfl.Federated(scored, people, 0.6, rows={"table": "row"}),
            mixfl.Central(scored, {k: a[:40] for k, a in data.items()}, 0.4),
        ],
        name=name,
        settings=dict(client_batch=2, local_steps=2, client_lr=0.1, central_batch=8, devices=1),
    )


def attacked(algorithm="2wgt", problem=None, epsilon=1.0, **more):
    given = mixfl.DP(epsilon=epsilon, delta=1e-4, clip=0.1, sampling="none").keys()
    keys = {**given, "rounds": 4, "cohort_size": 4}
    planned = plan_of(problem or table_problem(), algorithm, keys)
    return audit_task(planned, rounds=4, canaries=200, seed=1, **more)


OTHERS = [pytest.param(a, marks=pytest.mark.numbers) for a in ("fedavg", "pt")]


@pytest.mark.parametrize("algorithm", ["1wgt", "2wgt", *OTHERS])
def test_canaries_among_the_clients_of_a_problem(algorithm):
    found = attacked(algorithm, epsilon=8.0)
    assert found.algorithm == algorithm
    assert found.bound <= found.epsilon <= 8
    assert found.epsilon > 7.9  # for the rounds and the population of the audit
    assert found.took_part.mean() > 0.5


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_mechanism_is_caught_on_a_problem(mutant, monkeypatch):
    mutant(monkeypatch)
    assert not attacked().holds


def test_a_canary_pulls_in_its_direction_only():
    p = problems.problem()
    term = with_canaries(p, np.array([0, 3]), jax.random.key(1)).populations[0]
    clients = p.populations[0].clients
    assert len(term.clients) == len(clients) + 2
    x = p.init(jax.random.key(0))
    ordinary = {**clients.examples.take(np.arange(3)), "canary": np.zeros(3, np.int32)}
    own = p.populations[0].loss(x, {k: v for k, v in ordinary.items() if k != "canary"})
    np.testing.assert_array_equal(term.loss(x, ordinary), own)
    # A batch of a canary, with padding: its number is in the first row only.
    loud = {**ordinary, "canary": np.array([4, 0, 0], np.int32)}
    slope = ravel_pytree(jax.grad(lambda x: jnp.sum(term.loss(x, loud)))(x))[0]
    secret = direction(jax.random.key(1), 3, slope.size)
    np.testing.assert_allclose(slope / jnp.linalg.norm(slope), -secret, atol=1e-5)


def test_what_can_not_be_audited_is_refused():
    with pytest.raises(MixflError, match="one population"):
        attacked("2wgt", problems.problem("two populations"))
    given = ["privacy", "audit", "--dp", "epsilon=4"]
    for more, message in [
        ([], "for a TASK"),
        (["smile", "--epsilon", "2"], "given twice"),
        (["smile", "--set", "rounds=3"], "--rounds"),
    ]:
        result = CliRunner().invoke(cli, [*given, "--dp", "delta=1e-5", *more])
        assert isinstance(result.exception, MixflError)
        assert message in str(result.exception)


def test_the_report_has_a_picture(tmp_path):
    given = ["--rounds", "2", "--canaries", "20", "--seed", "1", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, ["privacy", "audit", *given])
    assert result.exit_code == 0
    assert json.loads(result.output)["holds"]
    assert (tmp_path / "audit.png").stat().st_size > 5000
    assert "accountant" in (tmp_path / "report.md").read_text()
