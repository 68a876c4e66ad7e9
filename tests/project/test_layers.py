"""Imports point one way: the layers in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lint_imports(config):
    command = [Path(sys.executable).with_name("lint-imports"), "--config", config, "--no-cache"]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_layers_hold():
    done = lint_imports(ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


def test_an_import_from_a_layer_above_is_found(tmp_path):
    text = (ROOT / "pyproject.toml").read_text()
    order = '    "report",\n    "runs",\n'
    assert order in text
    swapped = tmp_path / "pyproject.toml"
    swapped.write_text(text.replace(order, '    "runs",\n    "report",\n'))
    done = lint_imports(swapped)
    assert done.returncode == 1
    assert "mixfl.report is not allowed to import mixfl.runs" in " ".join(done.stdout.split())
