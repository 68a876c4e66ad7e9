"""`mixfl check` accepts sound problems and names what is wrong with the others."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from problems import PROBLEMS, clients, datacenter, examples, logistic, problem, settings

import mixfl
from mixfl.measure.check import check_problem

TESTS = str(Path(__file__).parents[1] / "support")


def findings(terms, init=None):
    init = init or (lambda key: {"b": jnp.zeros(()), "w": jnp.zeros(3)})
    return list(check_problem(mixfl.Problem(init, terms), settings()))


@pytest.mark.parametrize(
    "terms",
    [
        "two terms",
        *(pytest.param(terms, marks=pytest.mark.numbers)
          for terms in ("regularizer", "two populations and a central term")),
    ],
)  # fmt: skip
def test_sound_problems_pass_every_identity(terms):
    found = list(check_problem(problem(terms), settings()))
    assert all(f.good for f in found), [str(f) for f in found]
    said = " ".join(f.what for f in found)
    m = len(PROBLEMS[terms]())
    assert f"2-way takes the {'doubled' if m == 2 else f'{m}-fold'} and lagged one" in said
    for identity in ("PT and 1-way take the same step", "f_c = 0: pt", "f_c = 0: 1wgt", "padding"):
        assert identity in said


def only_failure(found):
    failed = [f for f in found if not f.good]
    assert failed
    return failed[0]


def test_a_mean_over_the_batch_is_named():
    broken = mixfl.Federated(lambda p, b: logistic(p, b).mean(), clients(1))
    failed = only_failure(findings([broken, datacenter()]))
    assert "one loss per example" in failed.what
    assert "mean" in failed.detail


def test_batch_statistics_are_named():
    def normed(params, batch):
        return logistic(params, batch | {"x": batch["x"] - batch["x"].mean(0)})

    failed = only_failure(findings([mixfl.Federated(normed, clients(1)), datacenter()]))
    assert "does not depend on its batch" in failed.what
    assert "batch statistics" in failed.detail


def test_a_gradient_that_is_not_finite_is_named():
    def root(params, batch):
        return jnp.sqrt(jnp.abs(batch["x"] @ params["w"]))

    failed = only_failure(findings([mixfl.Federated(root, clients(1)), datacenter()]))
    assert "finite" in failed.what
    assert "['w']" in failed.detail


def test_a_loss_with_chance_in_it_is_named():
    rng = np.random.default_rng(0)

    def noisy(params, batch):
        return logistic(params, batch) * rng.uniform(0.999999, 1.000001)

    failed = only_failure(findings([mixfl.Federated(noisy, clients(1)), datacenter()]))
    assert "same inputs give the same loss" in failed.what


def test_a_regularizer_must_be_one_number():
    broken = mixfl.Central(lambda p: p["w"] ** 2)
    failed = only_failure(findings([mixfl.Federated(logistic, clients(1)), broken]))
    assert "one number" in failed.what


def test_the_identities_can_fail(monkeypatch):
    """A wrong algorithm is caught: 1-way that sends twice the central gradient."""
    from mixfl.measure import check

    real = check.models

    def wrong(algorithm, p, s):
        if algorithm == "1wgt":
            p = p.weighted(None, 2 * p.central[0].weight)
        return real(algorithm, p, s)

    monkeypatch.setattr(check, "models", wrong)
    central = mixfl.Central(logistic, examples(2, 40, -0.5))
    failed = only_failure(findings([mixfl.Federated(logistic, clients(1)), central]))
    assert failed.what == "PT and 1-way take the same step"


def test_the_command_fails_with_the_problem(tmp_path, monkeypatch, capsys):
    from mixfl.cli import cli

    monkeypatch.chdir(tmp_path)
    source = f"import sys; sys.path.insert(0, {TESTS!r})\nfrom problems import *\n"
    broken = "mixfl.Federated(lambda p, b: logistic(p, b).mean(), clients(1))"
    (tmp_path / "p.py").write_text(
        f"{source}problem = mixfl.Problem(init, [{broken}])\n"
        "good = mixfl.Problem(init, [population(), datacenter()])\n"
    )
    for name, code in (("good", 0), ("problem", 1)):
        with pytest.raises(SystemExit) as end:
            cli(["check", f"p.py:{name}", "--set", "cohort_size=5"], standalone_mode=False)
        assert end.value.code == code
    shown = capsys.readouterr().out
    assert "largest deviation" in shown
    assert "1 of 1 checks failed" in shown
