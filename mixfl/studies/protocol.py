"""The protocol of a study: what is run and judged, fixed before the runs, under a version.

The digest of a study covers its settings, presets, metrics, margins and trials, but not its texts,
what it shows and how long it takes. `digests.json` has the digest of each version of the library's
studies. A study that changes needs a new version:

    python -m mixfl.studies.protocol     # adds the digests of new versions

An entry that is there is never changed: then it stops and says which study needs another version.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError
from mixfl.runs.folder import write_whole
from mixfl.tasks import TASKS, find, read_toml

DIGESTS = Path(__file__).parent / "toml" / "digests.json"
SHOWN = ("title", "text", "data", "alone", "show", "version")  # no part of what is judged


def digest(content: Mapping[str, Any], path: Path) -> str:
    judged = {k: v for k, v in content.items() if k not in SHOWN}
    for scale in ("quick", "full"):
        if scale in judged:
            judged[scale] = _without(judged[scale], "round_ms")
    claims = content.get("claim", [])
    judged["claim"] = [{k: v for k, v in c.items() if k != "says"} for c in claims]
    text = json.dumps([judged, _presets(content)], sort_keys=True)
    named = _tasks(content).union(*(s["algorithms"] for s in content.get("series", [])))
    own = sorted({path.parent / name.split(":")[0] for name in named if ".py" in name})
    files = [file.read_bytes() for file in own if file.is_file()]
    return hashlib.sha256(b"\0".join([text.encode(), *files])).hexdigest()[:16]


def _without(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: _without(v, key) if isinstance(v, dict) else v for k, v in table.items() if k != key}


def _tasks(content: Mapping[str, Any]) -> set[str]:
    every = {content.get("task", ""), *(s.get("task", "") for s in content.get("series", []))}
    return every - {""}


def _presets(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the presets that the study's runs may begin with."""
    tables = [content.get(scale, {}) for scale in ("quick", "full")]
    tables += [t.get("real", {}) for t in tables]
    for series in content.get("series", []):
        of_it = [series, series.get("quick", {}), series.get("full", {})]
        tables += [*of_it, *(t.get("real", {}) for t in of_it)]
    names = {t["preset"] for t in tables if "preset" in t}
    return {
        f"{task} {name}": read_toml(presets[name])
        for task in sorted(_tasks(content) & set(TASKS))
        for presets in [find(task).presets]
        for name in sorted(names & set(presets))
    }


def recorded() -> dict[str, dict[str, str]]:
    """{study: {version: digest}}"""
    return json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}


def changed(studies: Iterable[tuple[str, int, str]], known: Mapping[str, Any]) -> list[str]:
    """What to say about studies (id, version, digest) that are not what their version was."""
    return [
        f"the study {id} is not what its version {version} was: give it version = "
        f"{max(map(int, known[id])) + 1}"
        for id, version, digest in studies
        if known.get(id, {}).get(str(version), digest) != digest
    ]


def present() -> list[tuple[str, int, str]]:
    """The library's studies as their files are now."""
    files = sorted(DIGESTS.parent.glob("*.toml"))
    contents = [(path, read_toml(path)) for path in files]
    return [(study_id(p), c.get("version", 1), digest(c, p)) for p, c in contents]


def study_id(path: Path) -> str:
    """Without the number that orders the files."""
    return path.stem.lstrip("0123456789_")


def record() -> None:
    known = recorded()
    if wrong := changed(present(), known):
        raise MixflError("; ".join(wrong))
    for id, version, digest in present():
        known.setdefault(id, {})[str(version)] = digest
    write_whole(DIGESTS, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())


if __name__ == "__main__":
    record()
