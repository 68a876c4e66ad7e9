"""The example of docs/experiments.md runs as it is."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()


def test_optuna_prunes():
    optuna = pytest.importorskip("optuna")
    (code,) = re.findall(r"<!-- optuna -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict = {}
    exec(compile(code, "docs/experiments.md", "exec"), names)
    states = [t.state for t in names["study"].trials]
    assert optuna.trial.TrialState.PRUNED in states
    assert states[0] == optuna.trial.TrialState.COMPLETE
    assert len(states) == 6
