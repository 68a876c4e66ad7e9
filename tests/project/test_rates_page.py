"""The examples of rates, client settings and populations in docs/models.md run as they are."""

import re
from pathlib import Path

import pytest
from problems import examples, init, logistic, population, problem

import mixfl

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
BLOCKS = ("schedules", "client settings", "bfloat16", "populations")


@pytest.mark.parametrize("name", BLOCKS)
def test_an_example_runs(name):
    (block,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    names = {
        "mixfl": mixfl, "problem": problem(), "population": population, "init": init,
        "loss": logistic, "central": examples(2, 40, -0.5),
    }  # fmt: skip
    exec(compile(block, f"docs/models.md ({name})", "exec"), names)
