"""What the zoo's rows say: is what was asked reached, and where does the time go?"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.zoo.models import ASKED_TORCH

ENGINES = ("fedjax", "pfl", "flower", "torch")  # the bare loop is a yardstick, not an engine
START_S, WARM_S, MEMORY = 10, 2, 2  # asked: at most so many seconds, and times the bare loop's MB
LOOP, COMPILED, READING = "the whole loop", "the compiled round alone", "reading alone"


def judged(rows: Sequence[Mapping], asked: float) -> list[dict]:
    """The rows, with what was asked of mixfl and whether it is reached (`asked`)."""
    bare = next((r.get("peak_mb") for r in rows if r["engine"] == "scan"), None)
    result = []
    for row in map(dict, rows):
        if row["engine"] in ("mixfl", "mixfl-torch") and row["algorithm"] == "fedavg":
            others = ("torch",) if row["engine"] == "mixfl-torch" else ENGINES
            wanted = ASKED_TORCH if row["engine"] == "mixfl-torch" else asked
            row["asked"] = _judged(row, others, wanted, bare)
        result.append(row)
    return result


def _judged(row: Mapping, others: Sequence[str], wanted: float, bare: float | None) -> dict:
    if row["ms_median"] is None:
        return {}
    ratios = {name: r for name, r in row["ratio_to"].items() if name in others}
    verdict: dict[str, Any] = {"times": wanted}
    differs = [name for name in row.get("no_ratio", {}) if name in others]
    if ratios and not differs:
        verdict["fastest"] = min(ratios, key=ratios.__getitem__)
        verdict["reached"] = ratios[verdict["fastest"]] >= wanted
    if differs:
        verdict["differs"] = differs
    verdict["start"] = row["start_s"] <= START_S
    if "warm_s" in row:
        verdict["warm"] = row["warm_s"] <= WARM_S
    if bare:
        verdict["memory"] = round(row["peak_mb"] / bare, 2)
    return verdict


def lines(rows: Sequence[Mapping]) -> list[str]:
    """Remarks on one model."""
    return [
        f"{row['task']}, {row['engine']}: {text}"
        for row in rows
        if row.get("asked")
        for text in (_speed(row), _start(row), where(row))
        if text
    ]


def _speed(row: Mapping) -> str:
    a = row["asked"]
    if "differs" in a:
        return f"no verdict: the results of {', '.join(a['differs'])} differ"
    if "fastest" not in a:
        return "no verdict: no other engine ran"
    ratio = row["ratio_to"][a["fastest"]]
    return (
        f"{ratio:.3g} times as fast as {a['fastest']}, asked: {a['times']:g}{short(a['reached'])}"
    )


def short(reached: bool) -> str:
    return "" if reached else " (SHORT)"


def _start(row: Mapping) -> str:
    a = row["asked"]
    text = f"first round after {row['start_s']:.1f} s, asked: {START_S}{short(a['start'])}"
    if "warm" in a:
        text += f"; with compiled programs {row['warm_s']:.1f} s, asked: {WARM_S}{short(a['warm'])}"
    if "memory" in a:
        text += f"; memory {a['memory']:.2g} times the bare loop's, asked: {MEMORY}"
        text += short(a["memory"] <= MEMORY)
    return text


def where(row: Mapping) -> str:
    """One line: where the time of a round goes."""
    if "parts" not in row:
        return f"where the time goes is unknown: {row.get('parts_failed', 'not measured')}"
    ms, kinds, largest = (row["parts"][k] for k in ("ms", "kinds", "largest"))
    text = (
        f"a round takes {ms[LOOP]:.3g} ms, its compiled program {ms[COMPILED]:.3g} and reading, "
        f"meanwhile, {ms[READING]:.3g}. "
    )
    if row["share_of_limit"]:
        at_least = row["share_of_limit"] * row["ms_median"]
        text += f"The plain path's products take {at_least:.3g} ms at the rate of sgemm. "
    shares = ", ".join(f"{name} {share:.0%}" for name, share in kinds.items() if share >= 0.005)
    longest = ", ".join(f"{name} {share:.0%}" for name, share in largest.items())
    return f"{text}Operations: {shares or 'none'}. The longest: {longest or 'none'}."


def markdown(rows: Sequence[Mapping]) -> list[str]:
    """Two tables, of speed and of start-up and memory, and a list of where the time goes."""
    models = list(dict.fromkeys(r["task"] for r in rows))
    by = {(r["task"], r["engine"], r["algorithm"]): r for r in rows}
    names = ["fedjax", "pfl", "flower", "torch", "scan"]
    lines = [
        "| model | mixfl | fedjax | pfl | Flower + Ray | PyTorch loop | bare loop | share of the "
        "limit | mixfl, PyTorch module | PyTorch loop |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in models:
        jax, torch = (by[model, e, "fedavg"] for e in ("mixfl", "mixfl-torch"))
        share = jax["share_of_limit"]
        cells = [
            _ms(jax),
            *(_times(jax, n) for n in names),
            "-" if share is None else f"{share:.2f}",
        ]
        lines.append(f"| {model} | {' | '.join(cells)} | {_ms(torch)} | {_times(torch, 'torch')} |")
    lines += [
        "",
        "| model | first round | with compiled programs | peak memory | PyTorch module: first "
        "round | with compiled programs | peak memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in models:
        cells = [c for e in ("mixfl", "mixfl-torch") for c in _startup(by[model, e, "fedavg"])]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    lines.append("")
    for model in models:
        lines.append(f"- {model}: {where(by[model, 'mixfl', 'fedavg'])}")
    return lines


def _ms(row: Mapping) -> str:
    ms = row["ms_median"]
    return "-" if ms is None else f"{ms:.0f} ms" if ms >= 1000 else f"{ms:.3g} ms"


def _times(row: Mapping, other: str) -> str:
    """How many times as long the other takes; bold where that is less than asked."""
    if other in row["ratio_to"]:
        a, text = row.get("asked", {}), f"{row['ratio_to'][other]:.2g}"
        return f"**{text}**" if a.get("fastest") == other and not a["reached"] else text
    return "differs" if other in row.get("no_ratio", {}) else "-"


def _startup(row: Mapping) -> list[str]:
    if row["ms_median"] is None:
        return ["-"] * 3
    warm = f"{row['warm_s']:.1f} s" if "warm_s" in row else "-"
    return [f"{row['start_s']:.1f} s", warm, f"{row['peak_mb']} MB"]
