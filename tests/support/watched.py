"""Run folders to watch, made by hand; a server that watches them."""

import contextlib
import json
import threading
from pathlib import Path

from mixfl.watch.board import Board
from mixfl.watch.server import Server


def a_run(path: Path, status: dict | None, rows: int = 5, **keys) -> Path:
    """A folder as a run would leave it. `status`: None for a run that has not begun."""
    path.mkdir(parents=True)
    config = {"task": "smile", "algorithm": "2wgt", "rounds": 50, "seed": 0, "format": 2, **keys}
    lines = [f"{k} = {json.dumps(v)}\n" for k, v in config.items()]
    (path / "config.toml").write_text("".join(lines))
    add_rows(path, 1, rows)
    if status is not None:
        (path / "status.json").write_text(json.dumps(status))
    (path / ".lock").touch()
    return path


def add_rows(path: Path, first: int, last: int) -> None:
    with open(path / "metrics.jsonl", "a") as file:
        for t in range(first, last + 1):
            row = {"round": t, "eval/loss": 1 / t, "eval/auc": 1 - 0.5 / t, "time/round_ms": 3}
            file.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def served(*folders: Path):
    server = Server(Board(folders), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
