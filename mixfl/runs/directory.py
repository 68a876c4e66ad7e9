"""A run's folder, and reading it back.

    config.toml        complete: the run can be repeated from it
    metrics.jsonl      one JSON object per evaluated round
    checkpoints/       Orbax; the newest few
    tensorboard/       the metrics as TensorBoard events
    mlflow.json        the run's id in MLflow, if it is tracked there
    status.json        running, finished, interrupted or diverged, and at which round
    model.safetensors  the trained model, when the run has finished
    and the problem's own files, such as vocabulary.json

Whatever is written is there whole or not at all; one process at a time writes to it.
"""

import contextlib
import errno
import fcntl
import json
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mixfl.errors import MixflError
from mixfl.tasks import read_toml

# What may be another when a run goes on: how a deployment deals with failures, too.
OPERATION = ("round_deadline", "min_replies", "min_clients", "over_select", "max_update_norm")
BEGUN = {".lock", ".config.toml.partial"}  # what a run may have left before its config.toml


@dataclass(frozen=True)
class Run:
    """What `mixfl.load` gives."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    params: Any  # None while the run has not finished
    status: str


def load(path: str | Path, like: Any = None) -> Run:
    """A run's model, configuration and metrics.

    The model comes back as nested dicts and lists; give `like` (a model of the same structure,
    for instance problem.init(key)) to have another kind of pytree filled.
    """
    path = Path(path)
    if not (path / "config.toml").is_file():
        raise MixflError(f"{path} holds no run (no config.toml in it).")
    model = path / "model.safetensors"
    params = load_model(model, like) if model.exists() else None
    status = read_status(path).get("status", "unknown")
    return Run(path, read_toml(path / "config.toml"), read_metrics(path), params, status)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a damaged line, or a last one cut off by a crash, is left out."""
    file = path / "metrics.jsonl"
    rows = map(_json, file.read_bytes().split(b"\n") if file.exists() else [])
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("round"), int)]


def read_status(path: Path) -> dict[str, Any]:
    try:
        content = _json((path / "status.json").read_bytes())
    except OSError:
        content = None
    return content if isinstance(content, dict) else {}


def _json(content: bytes) -> Any:
    """None where it is damaged."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


class Busy(MixflError):
    """Another process has the folder."""


class RunDirectory:
    """The folder of a run that is under way. One process at a time."""

    def __init__(
        self, path: Path, config: dict[str, Any], toml: str, resume: bool,
        files: Mapping[str, str] = MappingProxyType({}),
    ):  # fmt: skip
        self.path, self.files = path, files
        try:
            self._claim(config, toml, resume)
        except OSError as error:
            raise MixflError(f"{path} can't be written: {error.strerror}.") from None

    def _claim(self, config, toml, resume):
        path = self.path
        self._look(config, resume)
        path.mkdir(parents=True, exist_ok=True)
        self.lock = open(path / ".lock", "a")  # noqa: SIM115 (held as long as the run)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            raise Busy(f"another process is writing to {path}.") from None
        try:
            self._look(config, resume)  # again: another process may have been here meanwhile
            for left in path.glob(".*.partial"):
                left.unlink()
            if not (path / "config.toml").exists():
                for name, content in self.files.items():
                    write_whole(path / name, content.encode())
                write_whole(path / "config.toml", toml.encode())  # the last: now it is a run
        except BaseException:
            self.lock.close()
            raise
        self.metrics_file = path / "metrics.jsonl"

    def _look(self, config, resume):
        """Refuses a folder with anything but this run in it."""
        path = self.path
        if path.exists() and not path.is_dir():
            raise MixflError(f"{path} is a file: choose another --out.")
        if not (path / "config.toml").exists():
            begun = {*BEGUN, *self.files, *(f".{name}.partial" for name in self.files)}
            foreign = {p.name for p in path.iterdir()} - begun if path.exists() else set()
            if foreign:
                raise MixflError(
                    f"{path} holds other files ({min(foreign)}) and no run: choose another --out."
                )
            return
        changed = differences(read_toml(path / "config.toml"), config)
        if changed:
            raise MixflError(
                f"{path} holds another run ({'; '.join(changed)}): choose another --out, or "
                "give the same settings to resume it."
            )
        for name, content in self.files.items():
            kept = path / name
            if not kept.is_file() or kept.read_bytes() != content.encode():
                raise MixflError(
                    f"{kept} is not what this run would write: its data has changed, or the file. "
                    "Choose another --out, or restore what it was trained with."
                )
        if not resume:
            raise MixflError(
                f"{path} holds this run already: --resume to go on with it, or choose another "
                "--out."
            )

    @property
    def finished(self) -> bool:
        return (self.path / "model.safetensors").exists()

    def keep_metrics(self, until: int) -> list[dict[str, Any]]:
        """Drops the rows after round `until`: they will be made again."""
        rows = [row for row in read_metrics(self.path) if row["round"] <= until]
        write_whole(self.metrics_file, b"".join(_line(row) for row in rows))
        return rows

    def add_metrics(self, row: dict[str, Any]) -> None:
        append_whole(self.metrics_file, _line(row))

    def set_status(self, status: str, round: int, message: str = "") -> None:
        content = {"status": status, "round": round} | ({"message": message} if message else {})
        write_whole(self.path / "status.json", (json.dumps(content) + "\n").encode())

    def save_model(self, params: Any) -> None:
        write_whole(self.path / "model.safetensors", model_bytes(params))

    def close(self) -> None:
        self.lock.close()


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`client_lr was 0.1, now 0.2` for each key that differs and must not."""
    return [
        f"{k} was {earlier.get(k, 'unset')}, now {now.get(k, 'unset')}"
        for k in sorted({*earlier, *now} - {"version", *OPERATION})
        if earlier.get(k) != now.get(k)
    ]


class Events:
    """The metrics for TensorBoard, a file per start of the run.

    Written at once: tensorboardX's own writer works in the background, so that a kill loses
    what its queue holds, and a full disk stops it for good.
    """

    def __init__(self, path: Path, start: int):
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.file = path / f"events.out.tfevents.{int(time.time()):010d}.mixfl.{start:08d}"
        try:
            path.mkdir(exist_ok=True)
            self.file.write_bytes(b"")
        except OSError as error:
            raise disk_error(self.file, error) from None
        self._add(Event(file_version="brain.Event:2"))
        # What an earlier process wrote of the rounds that are made again is hidden.
        self._add(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))

    def add(self, row: dict[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=value)
            for key, value in row.items()
            if key != "round" and value is not None
        ]
        self._add(Event(step=row["round"], summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        """A record: its length and its bytes, each followed by a checksum."""
        from tensorboardX.record_writer import masked_crc32c

        event.wall_time = time.time()
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checksum = lambda part: struct.pack("<I", masked_crc32c(part))  # noqa: E731
        append_whole(self.file, length + checksum(length) + content + checksum(content))


def append_whole(path: Path, content: bytes) -> None:
    """All or nothing, at the end of a file."""
    before = path.stat().st_size
    try:
        with open(path, "ab", buffering=0) as file:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(path, before)
        raise disk_error(path, error) from None


def write_whole(path: Path, content: bytes) -> None:
    """All or nothing: written beside, then renamed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise disk_error(path, error) from None


def disk_error(path: Path, error: OSError) -> MixflError:
    return MixflError(
        f"{path} could not be written: {error.strerror or error}. Free some space (or choose "
        "another --out); --resume goes on from the last checkpoint."
    )


def model_bytes(params: Any) -> bytes:
    """safetensors with names like hidden/w; the metadata has their paths in the pytree."""
    import jax
    from safetensors.numpy import save

    paths = _paths(params)
    leaves = [np.asarray(leaf, order="C") for leaf in jax.tree.leaves(params)]
    arrays = dict(zip(paths, leaves, strict=True))
    # One entry only: safetensors writes several in an order that changes, and so would the bytes.
    return save(arrays, metadata={"paths": json.dumps(paths)})


def load_model(path: Path, like: Any = None) -> Any:
    import jax
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            paths = json.loads((file.metadata() or {}).get("paths", "{}"))
        if like is None:
            return _nested({name: paths.get(name, [name]) for name in arrays}, arrays)
    except Exception as error:  # whatever a damaged file makes safetensors and json raise
        raise MixflError(
            f"{path} is damaged: {error}. Remove it and run the same command with --resume to "
            "have it written again."
        ) from None
    names = list(_paths(like))
    if sorted(names) != sorted(arrays):
        raise MixflError(f"{path} has the arrays {sorted(arrays)}, expected {sorted(names)}.")
    for name, leaf in zip(names, jax.tree.leaves(like), strict=True):
        if np.shape(leaf) != arrays[name].shape:
            raise MixflError(
                f"{path} has {name} with shape {arrays[name].shape}, expected {np.shape(leaf)}."
            )
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in names])


def _paths(tree: Any) -> dict[str, list[str | int]]:
    """Each leaf's name and its path in the pytree, in which a number is a place in a list."""
    import jax

    found: dict[str, list[str | int]] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        parts = [
            k.idx if hasattr(k, "idx") else str(getattr(k, "key", getattr(k, "name", k)))
            for k in path
        ]
        name = "/".join(map(str, parts)) or "params"
        while name in found:  # keys with a / in them may look like others
            name += "'"
        found[name] = parts
    return found


def _nested(paths: dict[str, list[str | int]], arrays: dict[str, np.ndarray]) -> Any:
    """Dicts, and lists where the keys are numbers; an array on its own is just that."""
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        *parents, last = "root", *path
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = arrays[name]

    def with_lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        children = {k: with_lists(v) for k, v in node.items()}
        if all(isinstance(k, int) for k in children):
            return [children.get(i) for i in range(max(children) + 1)]
        return children

    return with_lists(root)["root"]
