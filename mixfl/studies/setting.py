"""How the settings of a study at a scale differ from the paper's, which are those of scale `full`.

Verdicts at other settings are marked with it. Compared are the keys of the runs, without those that
only describe synthetic data or how often it is evaluated.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mixfl.algorithms import recipe
from mixfl.runs.plan import chosen_keys
from mixfl.settings import KEYS
from mixfl.tasks import find

MODEL = {"hidden", "embedding", "inputs", "embedding_scale", "spreadout", "margin", "mixture"}
ASIDE = {"eval_every", "validation", "client_eval", "cohort_chunk", "central_chunk", "measure"}


def departures(
    content: Mapping[str, Any], series: Mapping[str, Any], algorithm: str, scale: str,
    real: Callable[[str], str | None],
) -> list[str]:  # fmt: skip
    """Of a series, in words, such as "client_lr 0.02 (0.01)", the paper's value in brackets.
    `real`: the data of a task, if there is any."""
    found = [] if real(series.get("task", content.get("task", ""))) else ["synthetic data"]
    if scale != "full" and "full" in content and ".py" not in algorithm:
        here, paper = (_keys(content, series, algorithm, s, real) for s in (scale, "full"))
        found += [
            f"{k} {_say(here.get(k))} ({_say(paper.get(k))})"
            for k in sorted({*here, *paper})
            if here.get(k) != paper.get(k)
        ]
    return found


def scaled(table: Mapping[str, Any], scale: str, real: str | None) -> dict[str, Any]:
    """The changes for the scale, and for real data if there is any."""
    at = dict(table.get(scale, {}))
    more = at.pop("real", {})
    return at | more if real is not None else at


def _keys(content, series, algorithm, scale: str, real) -> dict[str, Any]:
    task = series.get("task", content["task"])
    at = scaled(content, scale, real(task))
    one = {**series, **scaled(series, scale, real(task))}
    if ".py" in task:
        return {}
    used = {*recipe(algorithm).uses, *find(task).options}
    given = {k: v for k, v in {**at.get("keys", {}), **one.get("keys", {})}.items() if k in used}
    preset = one.get("preset", at.get("preset"))
    keys = chosen_keys(task, algorithm, preset, {}, given) | dict(one.get("over", {}))
    data = set(find(task).options) - MODEL
    every = {k: KEYS[k].default for k in used & set(KEYS)} | find(task).options | keys
    return {k: v for k, v in every.items() if k in used - data - ASIDE}


def _say(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_say, value))
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
