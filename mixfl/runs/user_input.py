"""What the user gives, on the command line or in a file. No JAX: mistakes show at once."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError
from mixfl.format_versions import RUN_FOLDER, check_format
from mixfl.tasks import read_toml

# Not keys of settings.
HEAD = ("task", "algorithm", "algorithm_from", "preset", "data", "version")
ALGORITHM_FILE = "algorithm.py"  # in a run folder: a copy of the file of the user's own algorithm


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration file: (task, algorithm, preset, data), and the keys."""
    content = read_toml(path)
    check_format(path, content.pop("format", None), RUN_FOLDER, "write such a file by hand")
    sections = [k for k, v in content.items() if isinstance(v, dict)]
    if sections:
        raise MixflError(f"{path}: expected keys with values, not sections ([{sections[0]}]).")
    head = {k: content.pop(k) for k in HEAD if k in content}
    for key, value in head.items():
        if not isinstance(value, str):
            raise MixflError(f"{path}: {key} = {value!r}: expected a text.")
    for key, value in content.items():
        if isinstance(value, str) and value.startswith("python:"):
            raise MixflError(
                f"{path}: {key} was a function in a Python program ({value}); repeat the run there."
            )
    if "algorithm_from" in head:
        head["algorithm"] = _own_algorithm(path, head.pop("algorithm_from"))
    return head, content


def _own_algorithm(config: Path, place: str) -> str:
    """The algorithm as path.py:name. If its file is no longer what it was, the copy of it that is
    next to the configuration."""
    if place.startswith("python:"):
        raise MixflError(
            f"{config}: its algorithm was defined in a Python program ({place}): repeat the run "
            "there, or put the algorithm into a file and give it as --algorithm path.py:name."
        )
    file, _, name = place.rpartition(":")
    copy = config.parent / ALGORITHM_FILE
    if not copy.is_file():
        return place
    same = Path(file).is_file() and Path(file).read_bytes() == copy.read_bytes()
    return place if same else f"{copy}:{name}"


def parse_assignments(
    assignments: Iterable[str], option: str = "--set", example: str = "client_lr=0.1"
) -> dict[str, Any]:
    """`key=value` from the command line; a value is read as TOML, or as text if it is not."""
    keys: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise MixflError(
                f"{option} {text}: expected key=value, for example {option} {example}."
            )
        key = key.strip()
        if key in keys:
            raise MixflError(f"{option} {key} is given twice.")
        try:
            keys[key] = tomllib.loads(f"v = {value}")["v"]
        except (ValueError, RecursionError):  # tomllib's own, and Python's limits
            keys[key] = value.strip()
    return keys


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`key=v1,v2,...`, with each value read as by --set."""
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key, several = key.strip(), [v.strip() for v in separated(values)]
        if not equals or not key or not all(several):
            raise MixflError(
                f"--over {text}: expected key=v1,v2,..., for example --over client_lr=0.1,0.3,1."
            )
        if key in grid:
            raise MixflError(f"--over {key} is given twice.")
        if key == "seed":
            raise MixflError("--over seed: use --trials instead.")
        grid[key] = [parse_assignments([f"{key}={v}"])[key] for v in several]
        if len(set(map(str, grid[key]))) < len(grid[key]):
            raise MixflError(f"--over {text}: a value is given twice.")
    if not grid:
        raise MixflError("what to sweep over? For example: --over client_lr=0.1,0.3,1")
    return grid


def separated(values: str) -> list[str]:
    """Cut at commas, but not at those within brackets: `cosine(0.1, 500),0.1` are two values."""
    parts, depth = [""], 0
    for character in values:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
