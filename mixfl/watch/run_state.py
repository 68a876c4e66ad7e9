"""How a run is doing, read from its folder.

    starting  a process has the folder, and its first round has not begun
    running   a process has the folder
    died      it says that it runs, and no process has the folder (kill -9, a crash, a power cut)
    stopped   by Ctrl-C or on request, and saved
    failed, diverged, finished   as status.json says

A process that writes to a folder holds its lock, which the kernel lets go however it ends.
"""

import json
import os
from pathlib import Path
from typing import Any

from mixfl.runs.folder import is_locked
from mixfl.runs.reading import read_status
from mixfl.runs.sinks.live import LOG, PROGRESS
from mixfl.validation import LARGEST_FLOAT

FILES = ("config.toml", "status.json", "metrics.jsonl", PROGRESS, LOG, "stop")
OVER = ("finished", "diverged")
TAIL = 1 << 16  # bytes


def signature(path: Path) -> tuple:
    """Differs if anything that the page shows has changed."""
    found: list[tuple[int, int, int] | None] = []
    for name in FILES:
        try:
            stat = os.stat(path / name)
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            found.append(None)
    return (*found, is_locked(path))


def state_of(status: dict[str, Any], locked: bool) -> str:
    said = status.get("status")
    if said in OVER:
        return str(said)
    if locked:
        return "running" if said == "running" else "starting"
    if said in ("running", None):
        return "died"
    return "stopped" if said == "interrupted" else str(said)


def summary(path: Path, rounds: Any) -> dict[str, Any]:
    """What the table shows. `rounds`: in all, as the configuration says."""
    locked = is_locked(path)
    status = read_status(path)
    state = state_of(status, locked)
    if state == "died" and is_locked(path):  # it began between the two looks
        state = "starting"
    row = last_row(path)
    progress = _json(path / PROGRESS) if state == "running" else {}
    counted = [status.get("round"), row.get("round"), progress.get("round")]
    try:
        changed = max(os.stat(path / n).st_mtime for n in FILES if (path / n).exists())
    except (OSError, ValueError):
        changed = 0.0
    return {
        "state": state,
        "round": max([r for r in counted if isinstance(r, int)], default=0),
        "rounds": rounds if isinstance(rounds, int) else 0,
        "share": progress.get("share", 0),
        "left": progress.get("left"),
        "at": progress.get("time"),
        "saved": status.get("saved", 0),
        "stopping": state == "running" and os.path.lexists(path / "stop"),
        "message": _message(state, status),
        "alarms": status.get("alarms", 0),
        "changed": changed,
        "values": {k: v for k, v in row.items() if k != "round" and is_number(v)},
    }


def _message(state: str, status: dict[str, Any]) -> str:
    if state == "died":
        saved = status.get("saved", 0)
        kept = f"the checkpoint of round {saved} is kept" if saved else "it had saved nothing"
        return f"Its process ended without a word; {kept}."
    stopped = f"Stopped: {status['stopped']}." if status.get("stopped") else ""
    return str(status.get("message") or stopped)


def last_row(path: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl."""
    for line in reversed(_tail(path / "metrics.jsonl").split(b"\n")[:-1]):
        row = _parsed(line)
        if isinstance(row.get("round"), int):
            return row
    return {}


def log_lines(path: Path, most: int = 200) -> list[dict[str, Any]]:
    """The last lines of the log."""
    lines = map(_parsed, _tail(path / LOG).split(b"\n")[:-1])
    return [line for line in lines if isinstance(line.get("text"), str)][-most:]


def _tail(file: Path) -> bytes:
    try:
        with open(file, "rb") as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(max(0, size - TAIL))
            return content.read(TAIL)
    except OSError:
        return b""


def _json(file: Path) -> dict[str, Any]:
    try:
        return _parsed(file.read_bytes())
    except OSError:
        return {}


def _parsed(content: bytes) -> dict[str, Any]:
    """Empty if it is damaged, or no object."""
    try:
        value = json.loads(content, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def is_number(value: Any) -> bool:
    """Finite, and what a float can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= LARGEST_FLOAT
