"""A run folder (reading.py reads it back).

    config.toml        complete: the run can be repeated from it; also the folder's format
    metrics.jsonl      one JSON object per evaluated round
    checkpoints/       Orbax; the newest few, and the one with the best model
    tensorboard/       the metrics as TensorBoard events
    mlflow.json        the run's id in MLflow, if it is tracked there
    wandb.json         the run's id in Weights & Biases, if it is tracked there
    origin.json        the data, versions and machine that were used
    progress.json      how far a running run is, and the time left
    log.jsonl          when it started and ended, and the notes it gave
    stop               a request: the run saves and stops, as by Ctrl-C
    status.json        running, finished, interrupted, failed or diverged, and at which round
    model.safetensors  the trained model, when the run has finished
    clients/           what clients keep between rounds, if the algorithm needs that
    algorithm.py       a copy of the file of an algorithm of the user's own
    aside-1/           files that were in the way: damaged checkpoints, or an earlier start
    and the problem's own files, such as vocabulary.json

A file is either complete or not there; one process at a time writes to the folder.
"""

import contextlib
import fcntl
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from mixfl.errors import MixflError
from mixfl.runs.aside import EVERYTHING, Aside
from mixfl.runs.files import append_whole, write_over, write_whole
from mixfl.runs.model_file import model_bytes
from mixfl.runs.reading import load as load
from mixfl.runs.reading import read_metrics, read_run_config, read_status
from mixfl.runs.stopping import STOP
from mixfl.tasks import PYTHON, TASKS

# Keys that may change when a run goes on: how a deployment deals with failures.
OPERATION = (
    "round_deadline", "min_replies", "min_clients", "over_select", "max_update_norm", "linger",
)  # fmt: skip
BEGUN = {".lock", ".config.toml.partial"}  # a run may leave these before its config.toml
LOOKS, LOOK_SECONDS = 5, 0.01  # for a lock
MESSAGE = 2000  # characters in status.json: the file stays within one block of a disk


class Busy(MixflError):
    """Another process is writing to the folder."""


def locked(path: Path) -> Any:
    """A file; while it is open, no other process can write to the folder."""
    lock = open(path / ".lock", "a")  # noqa: SIM115
    for _ in range(LOOKS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(LOOK_SECONDS)  # it may only be `is_locked`, which holds it for a moment
    lock.close()
    raise Busy(f"another process is writing to {path}.") from None


def is_locked(path: Path) -> bool:
    """Is a process writing to the folder? If not, a run that says it is running has died."""
    try:
        with open(path / ".lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it can't be read
        return False
    return False


def say_failed(path: Path, message: str) -> None:
    """Writes the status of a run whose process could not do it. Nothing if there is no run."""
    if (path / "config.toml").is_file():
        with contextlib.suppress(MixflError, OSError), locked(path):
            earlier = {k: v for k, v in read_status(path).items() if k != "message"}
            content = {"round": 0, **earlier, "status": "failed", "message": message[:MESSAGE]}
            write_whole(path / "status.json", (json.dumps(content) + "\n").encode())


class RunFolder:
    """The folder of a run that is being made, by one process at a time."""

    def __init__(
        self, path: Path, config: dict[str, Any], resume: bool,
        files: Mapping[str, str] = MappingProxyType({}),
        copies: Mapping[str, str] = MappingProxyType({}),
    ):  # fmt: skip
        self.path, self.files, self.copies = path, files, copies
        self.frozen = ""  # the digest of the frozen arrays
        try:
            self._claim(config, resume)
        except OSError as error:
            raise MixflError(f"{path} can't be written: {error.strerror}.") from None

    def _claim(self, config, resume):
        path = self.path
        self._check(config, resume)
        path.mkdir(parents=True, exist_ok=True)
        self.lock = locked(path)
        try:
            self._check(config, resume)  # again: another process may have written meanwhile
            for left in (*path.glob(".*.partial"), path / STOP):  # an old request is not for us
                left.unlink(missing_ok=True)
            if not (path / "config.toml").exists():
                for name, content in {**self.files, **self.copies}.items():
                    write_whole(path / name, content.encode())
                write_whole(path / "config.toml", tomli_w.dumps(config).encode())  # now it is a run
        except BaseException:
            self.lock.close()
            raise
        self.metrics_file = path / "metrics.jsonl"

    def _check(self, config, resume):
        """Refuses a folder that holds anything but this run."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise MixflError(f"{path} is a file: choose another --out.")
        if not (path / "config.toml").exists():
            names = {*self.files, *self.copies}
            begun = {*BEGUN, *names, *(f".{name}.partial" for name in names)}
            foreign = {p.name for p in path.iterdir()} - begun if path.exists() else set()
            if foreign:
                raise MixflError(
                    f"{path} holds other files ({min(foreign)}) and no run: choose another --out."
                )
            return
        changed = differences(read_run_config(path), config)
        if changed:
            raise MixflError(
                f"{path} holds another run ({'; '.join(changed)}): choose another --out, or give "
                "the same settings to continue it (--resume) or to start over (--restart)."
            )
        for name, content in self.files.items():
            kept = path / name
            if not kept.is_file() or kept.read_bytes() != content.encode():
                raise MixflError(
                    f"{kept} is not what this run would write: the data or the file has changed. "
                    "Choose another --out, or restore what the run was made with."
                )
        if not resume:
            raise MixflError(
                f"{path} holds this run already: go on with --resume, start over with --restart, "
                "or choose another --out."
            )

    @property
    def finished(self) -> bool:
        return (self.path / "model.safetensors").exists()

    def restart(self) -> None:
        """Moves everything the run has made aside, so that it starts over."""
        aside = Aside(self.path)
        for name in EVERYTHING:
            aside.move(name)

    def saved(self, every: int) -> int:
        """The round of a checkpoint that the run must have had, judging by its other files; or 0.
        The first is made after at most `every` rounds, and after the row of its round."""
        status = read_status(self.path)
        round = status.get("round", 0)
        saved = round if status.get("status") == "interrupted" else status.get("saved", 0)
        rows = [row["round"] for row in read_metrics(self.path)]
        return max([saved, *(r for r in rows if r > every)])

    def keep_metrics(self, until: int) -> list[dict[str, Any]]:
        """Drops the rows after round `until`: they will be made again."""
        rows = [row for row in read_metrics(self.path) if row["round"] <= until]
        write_whole(self.metrics_file, b"".join(_line(row) for row in rows))
        return rows

    def add_metrics(self, row: dict[str, Any]) -> None:
        append_whole(self.metrics_file, _line(row))

    def set_status(self, status: str, round: int, message: str = "", **more: int | str) -> None:
        """`more` is written if it is neither 0 nor empty."""
        content: dict[str, Any] = {"status": status, "round": round}
        content |= {k: v for k, v in more.items() if v}
        content |= {"message": message[:MESSAGE]} if message else {}
        self._write_status((json.dumps(content) + "\n").encode())

    def _write_status(self, content: bytes) -> None:
        file = self.path / "status.json"
        try:
            write_whole(file, content)
        except MixflError:
            with contextlib.suppress(OSError):
                write_over(file, content)
            raise

    def save_model(self, params: Any) -> None:
        write_whole(self.path / "model.safetensors", model_bytes(params, self.frozen))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / STOP).unlink(missing_ok=True)
        self.lock.close()


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


# What runs did before these keys existed.
ALWAYS = {
    "clip": "off",
    "aggregation": "mean",
    "trim": 0.2,
    "cohorts": "seed",
    "best_by": "auto",
    "keep_best": False,
    "early_stop": 0,
    "grad_clip": "off",
    "weight_decay": 0.0,
    "proximal": 0.0,
    "compute": "float32",
    "eval_clients": 10_000,
    "client_eval": False,
}


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`client_lr was 0.1, now 0.2` for each key that differs and must not. Another release of
    mixfl, or another format that it can read, is no difference."""
    earlier = {k: v for k, v in ALWAYS.items() if k in now} | earlier
    return [
        f"{k} was {earlier.get(k, 'unset')}, now {now.get(k, 'unset')}"
        for k in sorted({*earlier, *now} - {"version", "format", "algorithm_from", *OPERATION})
        if earlier.get(k) != now.get(k) and not (k == "task" and _maybe_same(earlier, now))
    ]


def _maybe_same(earlier: dict[str, Any], now: dict[str, Any]) -> bool:
    """May two different tasks be one problem? The name of a Python program's problem does not say
    in which file it is. Its data is compared later (origin.py)."""
    names = [Path(str(c.get("task", ""))).name.removeprefix(PYTHON) for c in (earlier, now)]
    in_files = [".py" in name for name in names]
    own = not {*names} & {*TASKS}
    return names[0] == names[1] or (own and in_files[0] != in_files[1])
