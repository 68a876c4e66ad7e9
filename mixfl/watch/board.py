"""All runs below some folders, and what has changed since a page last asked."""

import contextlib
import json
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError
from mixfl.runs.folder import is_locked
from mixfl.runs.reading import read_run_config
from mixfl.runs.stopping import STOP
from mixfl.watch.curves import Columns
from mixfl.watch.going_on import going_on
from mixfl.watch.run_state import log_lines, signature, summary
from mixfl.watch.runs_below import runs_below

SCAN_SECONDS = 0.9  # between two looks at the folders
KEPT = 64  # runs whose curves are in memory


class Watched:
    """A run. The versions are the board's, when it, its configuration or its metrics changed."""

    def __init__(self, id: int, path: Path, name: str):
        self.id, self.path, self.name = id, path, name
        self.signature: tuple = ()
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.version = self.config_version = self.curve_version = 0

    def look(self, version: int) -> None:
        found = signature(self.path)
        if found == self.signature:
            return
        if not self.signature or found[0] != self.signature[0]:
            self.config, self.config_version = self._config(), version
        if not self.signature or found[2] != self.signature[2]:
            self.curve_version = version
        self.signature = found
        self.summary = summary(self.path, self.config.get("rounds"))
        self.version = version

    def _config(self) -> dict[str, Any]:
        try:
            return read_run_config(self.path)
        except (MixflError, OSError) as error:
            return {"unreadable": str(error)}


class Board:
    def __init__(self, folders: Sequence[Path]):
        self.folders = list(folders)
        self.names = _told_apart(self.folders)
        self.id = secrets.token_hex(4)  # another board has other numbers for its runs
        self.runs: dict[int, Watched] = {}
        self.numbers: dict[Path, int] = {}
        self.gone: list[tuple[int, int]] = []  # version and number
        self.version, self.scanned = 0, -SCAN_SECONDS
        self.lock = threading.Lock()
        self.columns: OrderedDict[int, Columns] = OrderedDict()

    def changes(self, since: int) -> dict[str, Any]:
        """What a page that knows version `since` does not know."""
        with self.lock:
            self._scan()
            changed = [r for r in self.runs.values() if r.version > since]
            return {
                "board": self.id,
                "version": self.version,
                "now": time.time(),
                "runs": [{"id": r.id, "name": r.name, **r.summary} for r in changed],
                "configs": {r.id: _texts(r.config) for r in changed if r.config_version > since},
                "gone": [id for version, id in self.gone if version > since],
            }

    def _scan(self) -> None:
        if time.monotonic() - self.scanned < SCAN_SECONDS:
            return
        self.version += 1
        found = {p: f for f in self.folders for p in runs_below(f)}
        for path in [p for p in self.numbers if p not in found]:
            number = self.numbers.pop(path)
            del self.runs[number]
            self.columns.pop(number, None)
            self.gone.append((self.version, number))
        for path, folder in found.items():
            if path not in self.numbers:
                number = self.numbers[path] = len(self.numbers) + len(self.gone) + 1
                self.runs[number] = Watched(number, path, self._name(path, folder))
            self.runs[self.numbers[path]].look(self.version)
        self.scanned = time.monotonic()

    def _name(self, path: Path, folder: Path) -> str:
        within = path.relative_to(folder)
        name = within if len(self.folders) == 1 else self.names[folder] / within
        return os.fspath(name if name.parts else Path(path.resolve().name))

    def curves(self, wanted: dict[int, int], metrics: Sequence[str]) -> dict[str, Any]:
        """Of runs by number, unless the page has their newest version."""
        with self.lock:
            lines = {}
            for number, known in wanted.items():
                run = self.runs.get(number)
                if run is None or run.curve_version <= known:
                    continue
                columns = self.columns.pop(number, None) or Columns(run.path)
                self.columns[number] = columns
                columns.update()
                lines[number] = {
                    "version": run.curve_version,
                    "lines": {m: columns.line(m) for m in metrics},
                    "metrics": [*columns.values],
                }
            while len(self.columns) > KEPT:
                self.columns.popitem(last=False)
            return {"board": self.id, "runs": lines}

    def details(self, number: int) -> dict[str, Any]:
        run = self._run(number)
        return {
            "id": number,
            "path": os.fspath(run.path),
            "log": log_lines(run.path),
            "resume": going_on(run.path, run.config),
        }

    def stop(self, number: int) -> str:
        """Asks a run to save and stop. Returns what to tell the user."""
        run = self._run(number)
        if not is_locked(run.path):
            raise MixflError(f"{run.name} is not running.")
        try:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(run.path / STOP, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except OSError as error:
            raise MixflError(f"{run.name} can't be stopped from here: {error.strerror}.") from None
        return f"{run.name} stops after this round and saves."

    def _run(self, number: int) -> Watched:
        with self.lock:
            run = self.runs.get(number)
        if run is None:
            raise MixflError("there is no such run (any more).")
        return run


def _told_apart(folders: Sequence[Path]) -> dict[Path, Path]:
    """The last parts of their paths, as many as it takes: a/runs and b/runs."""
    parts = {folder: folder.resolve().parts for folder in folders}
    count = 1
    while len({p[-count:] for p in parts.values()}) < len({*parts.values()}):
        count += 1
    return {folder: Path(*p[-count:]) for folder, p in parts.items()}


def _texts(config: dict[str, Any]) -> dict[str, str]:
    return {
        k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, default=str)
        for k, v in config.items()
    }
