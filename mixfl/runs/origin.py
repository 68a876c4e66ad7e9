"""What a run was made with: its data, the versions of its software, and the machine.

With other data, a run can't continue as it would have. With another version of JAX, or on another
kind of machine, it can, but the last bits of its numbers may differ.
"""

import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mixfl
from mixfl.data.examples import Examples
from mixfl.errors import MixflError
from mixfl.problem import Central, Federated, Problem, Term
from mixfl.runs.files import write_whole

FILE = "origin.json"
PACKAGES = ("jax", "jaxlib", "numpy", "optax")
SOME_BYTES = 32 << 20  # data up to this size is compared in full
NOTHING: dict[str, Any] = {}
SOME_ROWS = 256  # rows that are compared of larger data, which may be on a disk


def check(
    folder: Path, problem: Problem, start: int, changed: bool, note: Callable,
    algorithm: dict[str, Any] = NOTHING,
) -> list | None:  # fmt: skip
    """Compares with what the run was made with before. Returns what to `write`, if it differs.

    `start`: the round from which the run goes on. `changed`: other data is allowed. `algorithm`:
    what an algorithm of the user's own depends on, beside its settings (engine/source.py).
    """
    now: dict[str, Any] = {"round": start, "data": data(problem), **surroundings()}
    now |= {"algorithm": algorithm} if algorithm else {}
    now |= {"frozen": digest} if (digest := problem.frozen_digest()) else {}
    entries = _read(folder / FILE)
    before = entries[-1] if entries else now
    if start and before.get("frozen", now.get("frozen")) != now.get("frozen"):
        raise MixflError(
            f"the frozen arrays are not those that {folder} was made with up to round {start}: "
            "restore them, or choose another --out."
        )
    other = _differences(before.get("algorithm", algorithm), algorithm)
    if other and start:
        raise MixflError(
            f"the algorithm is not what {folder} was made with up to round {start} "
            f"({'; '.join(other)}). Restore it (the folder has a copy of its file, if it had one), "
            "or choose another --out."
        )
    others = _differences(before["data"], now["data"])
    if others and start and not changed:
        raise MixflError(
            f"the data is not what {folder} was made with up to round {start} "
            f"({'; '.join(others)}). Restore it, or choose another --out; or go on with the "
            "present data with --changed-data (changed_data=True in Python)."
        )
    if others and start:
        note(f"going on with other data from round {start} on ({'; '.join(others)})")
    elsewhere = [d for k in ("versions", "machine") for d in _differences(before[k], now[k])]
    if elsewhere and start:
        note(
            f"going on, although {'; '.join(elsewhere)}: the last bits of its numbers may be "
            "different from those of a run without interruption"
        )
    return [*(entries if start else []), now] if not entries or others or elsewhere else None


def other_data(folder: Path, problem: Problem) -> list[str]:
    """A note if a run that is to be repeated was made with other data, as its folder knows it."""
    others = changed(folder, problem)
    if not others:
        return []
    return [f"this does not repeat {folder}: its data is not the same ({'; '.join(others)})"]


def changed(folder: Path, problem: Problem) -> list[str]:
    """In what the problem's data differs from that of a run, as its folder knows it."""
    entries = _read(folder / FILE)
    return _differences(entries[-1]["data"], data(problem)) if entries else []


def write(folder: Path, content: list | None) -> None:
    if content is not None:
        write_whole(folder / FILE, (json.dumps(content, indent=1) + "\n").encode())


def data(problem: Problem) -> dict[str, dict[str, Any]]:
    """Sizes, types and a digest for each term whose data is here, not at nodes."""
    terms = {}
    for term in problem.terms:
        if isinstance(term, Federated) and not term.here:
            continue
        examples = term.examples
        if examples is not None:
            terms[term.name] = _about(term, examples)
    return terms


def _about(term: Term, examples: Examples) -> dict[str, Any]:
    columns = {n: f"{c.dtype}{list(c.shape)}" for n, c in sorted(examples.columns.items())}
    about: dict[str, Any] = {"examples": len(examples), "columns": columns}
    digest = hashlib.sha256()
    if not isinstance(term, Central):
        about["clients"] = len(term.clients)
        digest.update(_some(np.asarray(term.clients.offsets)).tobytes())
    for _, column in sorted(_rows(examples).items()):
        digest.update(np.ascontiguousarray(column).tobytes())
    return about | {"digest": digest.hexdigest()}


def _rows(examples: Examples) -> dict[str, np.ndarray]:
    """All rows, or some from beginning to end if they are many."""
    if examples.example_bytes * len(examples) <= SOME_BYTES:
        return examples.all()
    few = max(1, min(SOME_ROWS, SOME_BYTES // max(examples.example_bytes, 1)))
    return examples.take(np.linspace(0, len(examples) - 1, few).astype(np.int64))


def _some(array: np.ndarray) -> np.ndarray:
    return array[:: max(1, array.nbytes // SOME_BYTES)]


def surroundings() -> dict[str, dict[str, str]]:
    versions = {name: _version(name) for name in PACKAGES}
    device = jax.local_devices()[0]
    kind = _processor() if device.platform == "cpu" else device.device_kind
    return {
        "versions": versions | {"mixfl": mixfl.__version__, "python": platform.python_version()},
        "machine": {"system": f"{sys.platform} {platform.machine()}", "device": kind},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or "cpu"


def _read(path: Path) -> list[dict[str, Any]]:
    """Empty if there is no file, as in older runs, or if it is damaged."""
    try:
        content = json.loads(path.read_bytes())
        good = all(isinstance(e[k], dict) for e in content for k in ("data", "versions", "machine"))
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError):
        return []
    return content if good else []


def _differences(before: dict[str, Any], now: dict[str, Any], of: str = "") -> list[str]:
    lines = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        name = f"{of} {key}".strip()
        if isinstance(a, dict) and isinstance(b, dict):
            lines += _differences(a, b, name)
        elif key == "digest" and a != b:
            lines.append(f"{of}: other values")
        elif key == "code" and a != b:
            lines.append(f"{of}: other code")
        elif a != b:
            lines.append(f"{name} was {a}, now {b}")
    return lines
