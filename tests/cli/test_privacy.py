"""`mixfl privacy`."""

import json

import pytest
from click.testing import CliRunner

from mixfl.cli import cli
from mixfl.errors import MixflError

PLAN = ["privacy", "--clients", "50000", "--cohort", "1024", "--rounds", "10000", "--delta", "1e-5"]


def test_epsilon_of_a_plan():
    result = CliRunner().invoke(cli, [*PLAN, "--noise", "4", "--cap", "1152", "--json"])
    answer = json.loads(result.output)
    assert answer["epsilon"] == pytest.approx(2.09310, abs=1e-5)
    assert answer["noise_multiplier"] == 4
    assert answer["delta"] == 1e-5
    assert "PLD" in answer["accountant"]


def test_noise_for_an_epsilon():
    result = CliRunner().invoke(cli, [*PLAN, "--epsilon", "2.09245", "--json"])
    assert json.loads(result.output)["noise_multiplier"] == pytest.approx(4, rel=2e-3)
    text = CliRunner().invoke(cli, [*PLAN, "--noise", "4"]).output
    assert "epsilon: 2.09246" in text
    assert "neighbours: one client more or less" in text


def test_what_is_missing_is_named():
    result = CliRunner().invoke(cli, PLAN[:3])
    assert isinstance(result.exception, MixflError)
    assert "--cohort is missing" in str(result.exception)
