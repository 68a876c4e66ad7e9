"""Writes a project that trains one of the tasks on Flower, from the templates in project/."""

import os
import tempfile
from pathlib import Path

from mixfl.errors import MixflError, unknown

TEMPLATE = Path(__file__).parent / "project"
TASKS = ("smile", "text", "movie")
NAMES = {"gitignore": ".gitignore"}  # under its real name, git would apply it here too


def write_project(folder: Path, task: str) -> None:
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if folder.exists() and not folder.is_dir():
        raise MixflError(f"{folder} is a file: give a new folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise MixflError(f"{folder} is not empty: give a new folder. Nothing was overwritten.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # All or nothing: the project is written next to the folder and then replaces it.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".mixfl-new-") as temporary:
        made = Path(temporary) / "project"
        for source in sorted(TEMPLATE.rglob("*")):
            if source.is_file() and source.suffix not in (".py", ".pyc"):
                text = source.read_text(encoding="utf-8").replace("TASK", task)
                relative = source.relative_to(TEMPLATE)
                target = made / relative.with_name(NAMES.get(source.name, source.name))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
                if source.suffix == ".sh" and source.name != "env.sh":
                    target.chmod(0o755)
        app = (TEMPLATE / f"{task}.py").read_text(encoding="utf-8")
        (made / "app.py").write_text(app, encoding="utf-8")
        os.replace(made, folder)
