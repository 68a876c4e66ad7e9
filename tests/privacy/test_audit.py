"""The audit: below the accountant's epsilon, and above it if the mechanism is broken."""

import json

import pytest
from click.testing import CliRunner

from mixfl.aggregation import private
from mixfl.cli import cli
from mixfl.measure.audit import audit

SMALL = dict(epsilon=1.0, rounds=4, canaries=200, size=5000, seed=1)


@pytest.mark.parametrize("algorithm", ["fedavg", "2wgt"])
def test_the_promise_holds(algorithm):
    found = audit(algorithm, **SMALL)
    assert found.bound <= found.epsilon <= 1
    assert found.took_part.mean() > 0.1  # the attack sees something
    assert found.holds


def test_a_mechanism_without_clipping_is_caught(monkeypatch):
    encode = private.Private.encode
    monkeypatch.setattr(
        private.Private, "encode", lambda self, told, s, key: (s, encode(self, told, s, key)[1])
    )
    found = audit("fedavg", **SMALL)
    assert found.bound > 2 * found.epsilon
    assert not found.holds


def test_a_mechanism_without_noise_is_caught(monkeypatch):
    keys = private.Private.init

    def silent(self, x, population):
        return keys(self, x, population)._replace(noise=0.0 * keys(self, x, population).noise)

    monkeypatch.setattr(private.Private, "init", silent)
    assert not audit("fedavg", **SMALL).holds


def test_the_report_has_a_picture(tmp_path):
    given = ["--rounds", "2", "--canaries", "20", "--seed", "1", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, ["privacy", "audit", *given])
    assert result.exit_code == 0
    assert json.loads(result.output)["holds"]
    assert (tmp_path / "audit.png").stat().st_size > 5000
    assert "accountant" in (tmp_path / "report.md").read_text()
