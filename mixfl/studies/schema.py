"""What a study's file may say and must say (docs/experiments.md): a slip is named before the first
run begins."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError, unknown

# By table: what it must have, what it may have.
STUDY = (("title",), ("text", "task", "data", "quick", "full", "series", "show", "claim", "bounds"))
SCALE = ((), ("preset", "trials", "round_ms", "keys", "real"))
SERIES = (("algorithms",), ("name", "task", "keys", "over", "zip", "trials"))
CLAIM = (("number", "says", "checks"), ())
SHOWS: Mapping[str, tuple] = {
    "curves": (("metrics",), ("series", "log", "panel_per")),
    "final": (("metric", "key"), ("series", "at", "log")),
    "table": (("metrics",), ("series",)),
    "largest": (("metrics",), ("series",)),
    "costs": (("tables",), ()),
    "bounds": (("table", "columns"), ()),
}
CHECKS: Mapping[str, tuple] = {
    "better": (("metric",), ("of", "than", "each", "at", "same")),
    "close": (("metric", "within"), ("of", "than", "each", "at")),
    "reaches": (("metric", "within"), ("of", "than", "each", "at")),
    "often": (("metric",), ("of", "than", "each", "at")),
    "contrast": (("metric", "of", "less", "than"), ("at",)),
    "above": (("metric", "of", "limit"), ("at",)),
    "below": (("metric", "of", "limit"), ("at",)),
    "order": (("metric", "key", "of", "limit"), ()),
    "saving": (("what", "how", "limit"), ()),
}


def check(content: Mapping[str, Any], path: Path, scales: tuple[str, ...]) -> None:
    """Of a study's file."""
    here = path.name
    _table(content, STUDY, here)
    for scale in scales:
        _scale(content.get(scale, {}), SCALE, f"[{scale}] of {here}")
    for series in _tables(content, "series", here):
        where = f"[[series]] of {here}"
        must, may = SERIES
        _table(series, (must, (*may, *scales)), where)
        for scale in scales:
            _scale(series.get(scale, {}), ((), (*may, "real")), f"{scale} in {where}")
    for show in _tables(content, "show", here):
        _kind(show, SHOWS, f"[[show]] of {here}", ("label", "title", "text"))
    for claim in _tables(content, "claim", here):
        _table(claim, CLAIM, f"[[claim]] of {here}")
        for one in _tables(claim, "checks", here):
            where = f"a check of claim {claim['number']} of {here}"
            _kind(one, CHECKS, where)
            pair = CHECKS[one["kind"]][1][:3] == ("of", "than", "each")
            if pair and not ("each" in one or {"of", "than"} <= set(one)):
                raise MixflError(f"{where} compares nothing: give `of` and `than`, or `each`.")


def _tables(content: Mapping[str, Any], key: str, where: str) -> list[dict]:
    found = content.get(key, [])
    if not isinstance(found, list) or not all(isinstance(t, dict) for t in found):
        raise MixflError(f"{key} of {where}: expected tables, [[{key}]].")
    return found


def _scale(found: Any, keys: tuple, where: str) -> None:
    _table(found, keys, where)
    if "real" in found:
        _table(found["real"], ((), tuple(k for k in keys[1] if k != "real")), f"real, {where}")


def _kind(found: Mapping[str, Any], kinds: Mapping[str, tuple], where: str, more=()) -> None:
    if found.get("kind") not in kinds:
        raise unknown(f"kind in {where}:", found.get("kind"), kinds)
    must, may = kinds[found["kind"]]
    label = ("label",) if "label" in more else ()
    _table(found, (("kind", *label, *must), (*more, *may)), where)


def _table(found: Any, keys: tuple, where: str) -> None:
    if not isinstance(found, dict):
        raise MixflError(f"{where}: expected a table, found {found!r}.")
    must, may = keys
    for key in must:
        if key not in found:
            raise MixflError(f"{where} has no `{key}`.")
    for key in found:
        if key not in (*must, *may):
            raise unknown(f"key in {where}:", key, (*must, *may))
