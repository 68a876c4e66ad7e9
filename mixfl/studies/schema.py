"""What a study's file must have and may have (docs/experiments.md).

Mistakes are reported before the first run begins.
"""

import functools
import itertools
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
SCALE = dict(preset=str, trials=Count | list[Count], round_ms=NotNegative, keys=KEYS)
SCALED = table("scale", {}, {**SCALE, "real": table("real", {}, SCALE)})
CHANGES = dict(
    name=str, task=str, preset=str, keys=KEYS, over=dict[str, list[Any]], zip=bool, trials=Count
)  # fmt: skip
CHANGED = table("changes", {}, {**CHANGES, "real": table("real", {}, CHANGES)})
SERIES = table("series", dict(algorithms=TEXTS), dict(**CHANGES, quick=CHANGED, full=CHANGED))
SHOW = kinds(
    (dict(label=str), dict(title=str, text=str)),
    curves=(dict(metrics=TEXTS), dict(series=NAMES, log=bool, panel_per=Literal["algorithm"])),
    maxima=(dict(metrics=TEXTS), dict(series=NAMES, log=bool)),
    final=(dict(metric=str, key=str), dict(series=NAMES, flat=NAMES, log=bool, **AT)),
    table=(dict(metrics=TEXTS), dict(series=NAMES)),
    largest=(dict(metrics=TEXTS), dict(series=NAMES)),
    costs=(dict(tables=list[int]), {}),
    bounds=(dict(table=int, columns=TEXTS), {}),
)
PAIR = dict(of=NAMES, than=NAMES, each=TEXTS, **AT)
EFFECT = table("effect", dict(of=str, than=str), dict(metric=str, **AT))
MARGIN = dict(within=float, part=float, effect=EFFECT)
CHECK = kinds(
    ({}, {}),
    better=(dict(metric=str), dict(same=float, **PAIR)),
    close=(dict(metric=str), PAIR | MARGIN),
    apart=(dict(metric=str), PAIR | MARGIN),
    reaches=(dict(metric=str), PAIR | MARGIN | dict(any=bool)),
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
        version=Count, new_data=bool, text=str, task=str, data=str, alone=bool, quick=SCALED,
        full=SCALED, series=tables(SERIES),
        show=tables(SHOW), claim=tables(CLAIM), bounds=dict[str, float],
    ),
)  # fmt: skip


def check(content: Mapping[str, Any], path: Path) -> None:
    """Check the content of a study's file."""
    read = check_tables(content, STUDY, path.name)
    for scale in (read.quick, read.full):
        for part in (scale, scale and scale.real):
            check_looks(part.trials if part else None, path)
    for claim in read.claim or ():
        for one in claim.checks:
            where = f"a check of claim {claim.number} of {path.name}"
            if hasattr(one, "each") and not one.each and not (one.of and one.than):
                raise MixflError(
                    f"{where} compares nothing: give `of` and `than`, or `each`."
                )  # fmt: skip
            if hasattr(one, "within"):
                parts = one.part is not None, one.effect is not None
                if parts[0] != parts[1] or parts[0] == (one.within is not None):
                    raise MixflError(
                        f"{where} needs a margin: `within`, or a `part` of an `effect`."
                    )


def check_looks(trials: Any, path: Path) -> None:
    looks = trials if isinstance(trials, list) else [trials or 1]
    if not looks or any(a >= b for a, b in itertools.pairwise(looks)):
        raise MixflError(
            f"{path.name}: trials = {looks}: expected a number, or numbers that rise, such as "
            "[5, 10, 15, 20]."
        )
