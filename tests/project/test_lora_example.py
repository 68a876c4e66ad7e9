"""The example of adapters on a frozen GPT, in its small size."""

import importlib
import sys
from pathlib import Path

import pytest

import mixfl
from mixfl.tasks import find

FOLDER = Path(__file__).parents[2] / "examples"
ADAPTERS = 8192 * 4  # bytes


@pytest.mark.system
def test_adapters_learn_the_posts():
    sys.path.insert(0, str(FOLDER))
    lora_gpt = importlib.import_module("lora_gpt")
    base, *rows = lora_gpt.table(small=True)
    assert [row["model"].split()[-1] for row in rows] == ["fedavg", "1wgt", "2wgt"]
    for row in rows:
        assert row["posts/loss"] < base["posts/loss"]
        assert row["up"] == pytest.approx(ADAPTERS, abs=16)
    assert [round(row["down"] / ADAPTERS) for row in rows] == [1, 2, 2]


def test_the_command_line_takes_the_example():
    problem = find(f"{FOLDER}/lora_gpt.py:problem").build({}, None)
    assert isinstance(problem, mixfl.Problem)
    assert problem.frozen.loaded  # the base is trained when it is first needed
