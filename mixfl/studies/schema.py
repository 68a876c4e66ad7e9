"""What a study's file must have and may have (docs/experiments.md).

Mistakes are reported before the first run begins.
"""

import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal

from msgspec import defstruct

from mixfl.errors import MixflError
from mixfl.validation import Count, NotNegative, check_tables


def table(name: str, must: Mapping[str, Any], may: Mapping[str, Any], **config) -> Any:
    """A type of table: the keys that it must have and may have, and their types."""
    fields: list[Any] = [*must.items(), *((key, type | None, None) for key, type in may.items())]
    return defstruct(name, fields, forbid_unknown_fields=True, kw_only=True, **config)


def tables(type: Any) -> Any:
    return GenericAlias(list, (type,))


def kinds(shared: tuple[dict, dict], **tables: tuple[dict, dict]) -> Any:
    """Types of tables that differ by their `kind`."""
    (must, may), each = shared, tables.items()
    types = [table(k, must | a, may | b, tag_field="kind", tag=k) for k, (a, b) in each]
    return functools.reduce(operator.or_, types)


NAMES, TEXTS, KEYS = str | list[str], list[str], dict[str, Any]
AT = {"at": Literal["end", "early", "curve", "largest"]}
SCALE = dict(preset=str, trials=Count, round_ms=NotNegative, keys=KEYS)
SCALED = table("scale", {}, {**SCALE, "real": table("real", {}, SCALE)})
CHANGES = dict(
    name=str, task=str, keys=KEYS, over=dict[str, list[Any]], zip=bool, trials=Count
)  # fmt: skip
CHANGED = table("changes", {}, {**CHANGES, "real": table("real", {}, CHANGES)})
SERIES = table("series", dict(algorithms=TEXTS), dict(**CHANGES, quick=CHANGED, full=CHANGED))
SHOW = kinds(
    (dict(label=str), dict(title=str, text=str)),
    curves=(dict(metrics=TEXTS), dict(series=NAMES, log=bool, panel_per=Literal["algorithm"])),
    final=(dict(metric=str, key=str), dict(series=NAMES, flat=NAMES, log=bool, **AT)),
    table=(dict(metrics=TEXTS), dict(series=NAMES)),
    largest=(dict(metrics=TEXTS), dict(series=NAMES)),
    costs=(dict(tables=list[int]), {}),
    bounds=(dict(table=int, columns=TEXTS), {}),
)
PAIR = dict(of=NAMES, than=str, each=TEXTS, **AT)
CHECK = kinds(
    ({}, {}),
    better=(dict(metric=str), dict(same=float, **PAIR)),
    close=(dict(metric=str, within=float), PAIR),
    reaches=(dict(metric=str, within=float), PAIR),
    often=(dict(metric=str), PAIR),
    contrast=(dict(metric=str, of=str, less=str, than=TEXTS), AT),
    falls_less=(dict(metric=str, of=TEXTS, than=str, start=str, end=str), AT),
    above=(dict(metric=str, of=NAMES, limit=float), AT),
    below=(dict(metric=str, of=NAMES, limit=float), AT),
    order=(dict(metric=str, key=str, of=TEXTS, limit=float), {}),
    saving=(dict(what=str, how=NAMES, limit=float), {}),
)
CLAIM = table("claim", dict(number=int | str, says=str, checks=tables(CHECK)), {})
STUDY = table(
    "study",
    dict(title=str),
    dict(
        text=str, task=str, data=str, alone=bool, quick=SCALED, full=SCALED, series=tables(SERIES),
        show=tables(SHOW), claim=tables(CLAIM), bounds=dict[str, float],
    ),
)  # fmt: skip


def check(content: Mapping[str, Any], path: Path) -> None:
    """Check the content of a study's file."""
    for claim in check_tables(content, STUDY, path.name).claim or ():
        for one in claim.checks:
            if hasattr(one, "each") and not one.each and not (one.of and one.than):
                raise MixflError(
                    f"a check of claim {claim.number} of {path.name} compares nothing: give `of` "
                    "and `than`, or `each`."
                )
