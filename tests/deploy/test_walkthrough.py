"""docs/deploy.md's walk-through, run as it is written there but for fewer rounds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mixfl
from benchmarks.deployment import end_with_parent, free_port

pytestmark = pytest.mark.flower
DOCS = Path(__file__).parents[2] / "docs/deploy.md"


def walk_through() -> str:
    """All blocks of the section, as one script, in the environment that is installed already."""
    text = DOCS.read_text().split("<!-- walk-through -->")[1].split("\n## ")[0]
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    installing = ("python3 -m venv", "pip install")
    script = "\n".join(line for line in lines if not line.startswith(installing))
    for many, few in [("rounds=20", "rounds=2"), ("--rounds 50", "--rounds 2")]:
        assert many in script
        script = script.replace(many, few)
    short = "cd smile\nsed -i 's/^rounds = 50/rounds = 2/' pyproject.toml"
    return script.replace("cd smile", short)


def test_walk_through(tmp_path):
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SUPERLINK": f"127.0.0.1:{free_port()}", "PORT": str(20000 + free_port() % 10000),
    }  # fmt: skip
    done = subprocess.run(
        ["sh", "-euc", walk_through()], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=900, preexec_fn=end_with_parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("smile", "smile-1wgt", "simulated"):
        run = mixfl.load(tmp_path / "smile/runs" / name)
        assert (run.status, run.metrics[-1]["round"]) == ("finished", 2)
    assert (tmp_path / "smile/runs/smile/report.html").exists()
