"""What a run was made with: its data, the versions that computed it, and the machine.

With other data a run can't go on as it would have gone on; with another version of JAX, or on
another kind of machine, it can, but for the last bits of its numbers.
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
SOME_BYTES = 32 << 20  # of a column or index that are looked at
SOME_ROWS = 256  # of a larger one: it may lie on a disk


def check(folder: Path, problem: Problem, start: int, changed: bool, note: Callable) -> list | None:
    """Compares with what the run was made with before. What to `write`, if that is another now.

    `start` is the round that it goes on from; with `changed`, other data is what is wanted.
    """
    now: dict[str, Any] = {"round": start, "data": data(problem), **surroundings()}
    told = _read(folder / FILE)
    before = told[-1] if told else now
    others = _differences(before["data"], now["data"])
    if others and start and not changed:
        raise MixflError(
            f"the data of {folder} is not what it was made with up to round {start} "
            f"({'; '.join(others)}). Restore it, or choose another --out; or go on with the "
            "present data by --changed-data (changed_data=True in Python)."
        )
    if others and start:
        note(f"going on with other data from round {start} on ({'; '.join(others)})")
    elsewhere = [d for k in ("versions", "machine") for d in _differences(before[k], now[k])]
    if elsewhere and start:
        note(
            f"going on, though {'; '.join(elsewhere)}: the last bits of its numbers may be others "
            "than those of a run without interruption"
        )
    return [*(told if start else []), now] if not told or others or elsewhere else None


def write(folder: Path, content: list | None) -> None:
    if content is not None:
        write_whole(folder / FILE, (json.dumps(content, indent=1) + "\n").encode())


def data(problem: Problem) -> dict[str, dict[str, Any]]:
    """What there is of each term. Nothing of one whose data is at nodes."""
    found = {}
    for term in problem.terms:
        if isinstance(term, Federated) and not term.here:
            continue
        examples = term.examples
        if examples is not None:
            found[term.name] = _about(term, examples)
    return found


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
    """All rows, if they are not much; otherwise some, from beginning to end."""
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
    """Nothing where there is none, as in older runs, or where it is damaged."""
    try:
        content = json.loads(path.read_bytes())
        good = all(isinstance(e[k], dict) for e in content for k in ("data", "versions", "machine"))
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError):
        return []
    return content if good else []


def _differences(before: dict[str, Any], now: dict[str, Any], of: str = "") -> list[str]:
    found = []
    for key in sorted({*before, *now}):
        a, b = before.get(key), now.get(key)
        name = f"{of} {key}".strip()
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, name)
        elif key == "digest" and a != b:
            found.append(f"{of}: other values")
        elif a != b:
            found.append(f"{name} was {a}, now {b}")
    return found
