"""What a checkpoint's files must be: their digests, kept with them.

So whether a checkpoint is damaged is decided by its bytes alone, and not by what goes wrong while
it is read: a process without file descriptors or memory left is no damage.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from mixfl.runs.files import write_whole

FILE = "mixfl.json"


def write(folder: Path, loss: float | None) -> None:
    """For the files that the folder holds now. `loss` is that of the model, if it was evaluated."""
    files = {
        str(p.relative_to(folder)): _digest(p) for p in sorted(folder.rglob("*")) if p.is_file()
    }
    content = {"loss": loss, "files": files}
    write_whole(folder / FILE, json.dumps(content | {"digest": _own(content)}).encode())


def read(folder: Path) -> dict[str, Any] | None:
    """None where there is none: checkpoints had none once. A ValueError where it is damaged."""
    try:
        content = json.loads((folder / FILE).read_bytes())
        digest = content.pop("digest")
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{FILE} has changed") from None
    if digest != _own(content):
        raise ValueError(f"{FILE} has changed")
    return content


def damage(folder: Path) -> str | None:
    """What is wrong with the bytes. None if they are whole, or nothing says what they were. An
    OSError says nothing about them."""
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


def loss(folder: Path) -> float | None:
    """That of the checkpoint's model; None where it was not evaluated. Raises as `read` does."""
    return (read(folder) or {}).get("loss")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
