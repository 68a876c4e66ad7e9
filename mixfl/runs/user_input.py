"""What the user says, on the command line or in a file. Needs no JAX: mistakes show at once."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError
from mixfl.tasks import read_toml

HEAD = ("task", "algorithm", "preset", "data", "version")  # what is no key of a setting


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration file: (task, algorithm, preset, data), and the keys."""
    content = read_toml(path)
    if isinstance(nested := next((v for v in content.values() if isinstance(v, dict)), None), dict):
        raise MixflError(f"{path}: expected keys with values, not sections (found {nested}).")
    head = {k: content.pop(k) for k in HEAD if k in content}
    for key, value in head.items():
        if not isinstance(value, str):
            raise MixflError(f"{path}: {key} = {value!r}: expected a text.")
    for key, value in content.items():
        if isinstance(value, str) and value.startswith("python:"):
            raise MixflError(
                f"{path}: {key} was a function in a Python program ({value}); repeat the run there."
            )
    return head, content


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`key=value` from the command line; a value is read as TOML, otherwise as text."""
    found: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise MixflError(f"--set {text}: expected key=value, for example --set client_lr=0.1.")
        key = key.strip()
        if key in found:
            raise MixflError(f"--set {key} is given twice.")
        try:
            found[key] = tomllib.loads(f"v = {value}")["v"]
        except (ValueError, RecursionError):  # tomllib's own, and Python's limits
            found[key] = value.strip()
    return found


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`key=v1,v2,...`, each value as --set reads it."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key, several = key.strip(), [v.strip() for v in values.split(",")]
        if not equals or not key or not all(several):
            raise MixflError(
                f"--over {text}: expected key=v1,v2,..., for example --over client_lr=0.1,0.3,1."
            )
        if key in found:
            raise MixflError(f"--over {key} is given twice.")
        if key == "seed":
            raise MixflError("--over seed: that is what --trials is for.")
        found[key] = [parse_assignments([f"{key}={v}"])[key] for v in several]
        if len(set(map(str, found[key]))) < len(found[key]):
            raise MixflError(f"--over {text}: a value is given twice.")
    if not found:
        raise MixflError("what to sweep over? For example: --over client_lr=0.1,0.3,1")
    return found
