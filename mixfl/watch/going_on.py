"""How a run that is over before its end goes on, in words and as a command to paste."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError
from mixfl.runs.folder import OPERATION
from mixfl.tasks import PYTHON, read_toml

AT_SERVER = (
    "A deployment: start it at its server as before, with the same --run-config if it had one "
    "('up all' if the nodes are on that machine too). It goes on from its last checkpoint."
)
OWN = "Put your problem's file in place of path.py, or call mixfl.train as before with resume=True."


def going_on(run: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`command`, which may be empty, and `words` about it."""
    if any(key in config for key in OPERATION):  # keys of deployments only
        project = _project(run)
        command = ["mixfl", "flower", "up", "server", "--run", "--project", project]
        return {"command": _line(command) if project else "", "words": AT_SERVER}
    own = str(config.get("task")).startswith(PYTHON)
    named = ["path.py:problem"] if own else []
    command = ["mixfl", "run", *named, "--config", run / "config.toml", "--out", run, "--resume"]
    return {"command": _line(command), "words": OWN if own else ""}


def _line(words: list[Any]) -> str:
    return shlex.join(map(os.fspath, words))


def _project(run: Path) -> Path | None:
    """The Flower project in whose folder the run is."""
    for folder in run.parents:
        try:
            if "flwr" in read_toml(folder / "pyproject.toml").get("tool", {}):
                return folder
        except (MixflError, TypeError):
            continue
    return None
