"""What a checkpoint's files must be: mixfl.json has their digests, and the checkpoint's format.

Only its bytes decide whether a checkpoint is damaged, not what goes wrong while it is read: a
process that runs out of file descriptors or memory is no damage.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from mixfl.format_versions import CHECKPOINT, check_format
from mixfl.runs.files import write_whole

FILE = "mixfl.json"


class Judged(NamedTuple):
    """What an evaluation said about a checkpoint's model."""

    by: str  # the metric
    value: float


def write(folder: Path, judged: Judged | None) -> None:
    """For the files that the folder holds now. `judged`: if the model was evaluated."""
    files = {
        str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()
    }
    content = {"format": CHECKPOINT, "best": judged and judged._asdict(), "files": files}
    write_whole(folder / FILE, json.dumps(content | {"digest": _own(content)}).encode())


def read(folder: Path) -> dict[str, Any] | None:
    """None if there is none: the oldest checkpoints have none. A ValueError if it is damaged; an
    error that says so if a newer mixfl wrote it."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        digest = content.pop("digest")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{FILE} has changed") from None
    if digest != _own(content):
        raise ValueError(f"{FILE} has changed")
    check_format(folder, content.get("format"), CHECKPOINT, "start over in another folder (--out)")
    return content


def damage(folder: Path) -> str | None:
    """What is wrong with the bytes. None if nothing is, or if there is no manifest. An OSError says
    nothing about the bytes."""
    try:
        content = read(folder)
    except ValueError as error:
        return str(error)
    for name, digest in (content or {"files": {}})["files"].items():
        try:
            if _digest(folder / name) != digest:
                return f"{name} has changed"
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return f"{name} is missing"
    return None


def judged(folder: Path) -> Judged | None:
    """None if the checkpoint's model was not evaluated. Raises as `read` does."""
    content = read(folder) or {}
    if content.get("best") is not None:
        return Judged(**content["best"])
    loss = content.get("loss")  # as earlier versions wrote it
    return None if loss is None else Judged("eval/loss", loss)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
