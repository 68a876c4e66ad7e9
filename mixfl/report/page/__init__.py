"""A document as one HTML file that needs nothing else: no network, no server."""

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mixfl.report.document import (
    Curves,
    Document,
    Finding,
    Section,
    Sweep,
    Table,
    Trial,
)  # fmt: skip
from mixfl.report.means import Mean, cap, mean, remarks, value
from mixfl.report.style import Style, metric_title, styles

HERE = Path(__file__).parent
# Nothing may be loaded or sent, whatever a run is called.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
RAW_NUMBERS = 150_000  # of all runs; more are thinned
DRAWN_NUMBERS = 150_000  # of all charts
VERDICTS = {"agree": "✓", "disagree": "✕", "not decided": "?"}


def page(document: Document) -> str:
    figures = _figures(document)
    data = {
        "title": document.title,
        "facts": document.facts,
        "findings": [f.__dict__ for f in document.findings],
        "figures": figures,
        **_runs(document.trials()),
    }
    text = (HERE / "page.html").read_text()
    parts = {
        "policy": escape(POLICY),
        "title": escape(document.title),
        "facts": "".join(
            f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in document.facts
        ),
        "findings": _findings(document.findings),
        "notes": _list(document.notes, "notes"),
        "contents": _contents(document.sections),
        "sections": "".join(
            _section(i, section, figures) for i, section in enumerate(document.sections)
        ),
        "thinned": f" (every {data['every']}th row)" if data["every"] > 1 else "",
        "count": str(len(data["runs"])),
        "style": (HERE / "page.css").read_text(),
        "plot": (HERE / "plot.js").read_text(),
        "script": (HERE / "page.js").read_text(),
        "plotly": (HERE / "vendor" / "plotly-basic.min.js").read_text(),
        "data": _json(data),
    }
    filled = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], text)
    return filled.encode(errors="replace").decode()  # folders' names need not be Unicode


def _json(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for c in "<>&\u2028\u2029":
        text = text.replace(c, f"\\u{ord(c):04x}")
    return text


# What is written as HTML


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    counts = [(v, sum(f.verdict == v for f in findings)) for v in VERDICTS]
    rows = "".join(
        f'<tr><td class="number">{escape(f.number)}</td><td>{escape(f.says)}{_evidence(f)}</td>'
        f'<td class="set">{escape(f.data)}</td><td>{_badge(f.verdict)}</td></tr>'
        for f in findings
    )
    said = " ".join(f"<span>{_badge(v)} {n}</span>" for v, n in counts if n)
    return (
        f'<section id="verdicts"><h2>Verdicts</h2><p class="counts">{said}</p>'
        '<table class="verdicts"><thead><tr><th>#</th><th>Claim</th><th>Data</th><th>Verdict</th>'
        f"</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _badge(verdict: str) -> str:
    kind = verdict if verdict in VERDICTS else "not decided"
    sign = f'<span aria-hidden="true">{VERDICTS[kind]}</span>'
    return f'<span class="badge {kind.replace(" ", "-")}">{sign}{escape(verdict)}</span>'


def _evidence(finding: Finding) -> str:
    if not finding.evidence:
        return ""
    return f"<details><summary>Evidence</summary>{_list(finding.evidence, 'evidence')}</details>"


def _list(lines: Iterable[str], kind: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def _contents(sections: Sequence[Section]) -> str:
    items = "".join(
        f'<li><a href="#s{i}">{escape(section.title)}</a><ul>'
        + "".join(
            f'<li><a href="#s{i}p{k}">{escape(part.title)}</a></li>'
            for k, part in enumerate(section.parts)
        )
        + "</ul></li>"
        for i, section in enumerate(sections)
    )
    return f'{items}<li><a href="#runs">Runs and data</a></li>'


def _section(i: int, section: Section, figures: Sequence[dict[str, Any]]) -> str:
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    parts = "".join(_part(f"s{i}p{k}", part, figures) for k, part in enumerate(section.parts))
    return f'<section id="s{i}"><h2>{escape(section.title)}</h2>{text}{parts}</section>'


def _part(place: str, part: Curves | Sweep | Table, figures: Sequence[dict[str, Any]]) -> str:
    label = f' <span class="label">{escape(part.label)}</span>' if part.label else ""
    head = f"<h3>{escape(part.title)}{label}</h3>" + (
        f'<p class="text">{escape(part.text)}</p>' if part.text else ""
    )
    if isinstance(part, Table):
        return f'<div class="part" id="{place}">{head}{_table(part)}</div>'
    number = next(n for n, figure in enumerate(figures) if figure["place"] == place)
    notes = _list(figures[number]["notes"], "remarks")
    return (
        f'<figure class="part" id="{place}" data-figure="{number}">{head}'
        '<div class="controls"></div><div class="legend"></div>'
        f'<div class="chart" role="img" aria-label="{escape(part.title)}"></div>{notes}</figure>'
    )


# Also 0.98 ± 0.01, 213 MB, and what stands in place of a number.
NUMERIC = re.compile(r"[-+±]?[0-9.,]+(\W.*)?|-?|diverged.*", re.I)


def _table(table: Table) -> str:
    kinds = [
        ' class="n"' if all(NUMERIC.fullmatch(cell) for cell in column) else ""
        for column in zip_longest(*table.rows, fillvalue="")
    ]

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>"
            for kind, cell in zip_longest(kinds, row, fillvalue="")
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    return (
        '<div class="wide"><table><thead><tr>'
        f"{cells(table.header, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"
    )


# What the script draws


def _figures(document: Document) -> list[dict[str, Any]]:
    charts = [
        (f"s{i}p{k}", part)
        for i, section in enumerate(document.sections)
        for k, part in enumerate(section.parts)
        if not isinstance(part, Table)
    ]
    lines = sum(len(p.series) * len(p.metrics) for _, p in charts if isinstance(p, Curves))
    most = max(30, min(400, DRAWN_NUMBERS // (6 * max(lines, 1))))  # points of a line
    return [
        {"place": place, "title": part.title, "label": part.label}
        | (_curves(part, most) if isinstance(part, Curves) else _sweep(part))
        for place, part in charts
    ]


def _curves(part: Curves, most: int) -> dict[str, Any]:
    names = [s.name for s in part.series]
    means = [[mean(s, m) for s in part.series] for m in part.metrics]
    panels = []
    for metric, of_series in zip(part.metrics, means, strict=True):
        end, words = cap(metric, names, of_series) or (None, "")
        panels.append({"metric": metric, "title": metric_title(metric), "cap": end, "words": words})
    looks = styles([s.algorithm for s in part.series])
    return {
        "kind": "curves",
        "log": part.log,
        "panels": panels,
        "notes": remarks(part.series),
        "lines": [
            {
                "name": s.name,
                "runs": [t.name for t in s.trials],
                **_look(look),
                "panels": [_drawn(of_series[k], most) for of_series in means],
            }
            for k, (s, look) in enumerate(zip(part.series, looks, strict=True))
        ],
    }


def _drawn(m: Mean | None, most: int) -> dict[str, Any] | None:
    if m is None:
        return None
    kept = _kept(len(m.rounds), -(-len(m.rounds) // most))
    return {key: [_short(column[i]) for i in kept] for key, column in m.__dict__.items() if column}


def _sweep(part: Sweep) -> dict[str, Any]:
    looks = styles([line.algorithm for line in part.lines])
    notes = [
        f"{line.name}, {part.x} = {p.x:g}: {p.note or 'diverged'}"
        for line in part.lines
        for p in line.points
        if p.note or p.mean is None
    ]
    return {
        "kind": "sweep",
        "log": part.log,
        "x": part.x,
        "panels": [{"metric": part.y, "title": metric_title(part.y), "cap": None, "words": ""}],
        "log_x": part.log_x and all(p.x > 0 for line in part.lines for p in line.points),
        "notes": notes,
        "lines": [
            {
                "name": line.name,
                **_look(look),
                "points": [
                    [_short(v) for v in (p.x, p.mean, p.low, p.high)] + [p.note]
                    for p in sorted(line.points, key=lambda p: p.x)
                ],
            }
            for line, look in zip(part.lines, looks, strict=True)
        ],
    }


def _look(style: Style) -> dict[str, Any]:
    width = 2
    dash = ",".join(f"{width * d:g}px" for d in style.dashes)
    return {"light": style.light, "dark": style.dark, "dash": dash or "solid"} | (
        {"marker": style.marker} if style.marker else {}
    )


# The runs


def _runs(trials: Sequence[Trial]) -> dict[str, Any]:
    keys = {t.name: _metrics(t) for t in trials}
    numbers = sum(len(t.rows) * (len(keys[t.name]) + 1) for t in trials)
    every = -(-numbers // RAW_NUMBERS) or 1
    return {
        "every": every,
        "runs": [
            {
                "name": t.name,
                "status": t.status,
                "algorithm": str(t.config.get("algorithm", "")),
                "seed": str(t.config.get("seed", "")),
                "command": t.command,
                "config": "\n".join(f"{k} = {_value(v)}" for k, v in t.config.items()),
                "metrics": {
                    key: [_short(value(t.rows[i], key)) for i in _kept(len(t.rows), every)]
                    for key in ("round", *keys[t.name])
                },
            }
            for t in trials
        ],
    }


def _metrics(trial: Trial) -> list[str]:
    keys = dict.fromkeys(k for row in trial.rows for k in row if k != "round")
    return [k for k in keys if any(value(row, k) is not None for row in trial.rows)]


def _value(found: Any) -> str:
    return json.dumps(found, ensure_ascii=False, default=str)


def _kept(count: int, every: int) -> list[int]:
    """Every so many, and the last."""
    kept = list(range(0, count, max(every, 1)))
    return kept if not kept or kept[-1] == count - 1 else [*kept, count - 1]


def _short(number: float | None) -> float | int | None:
    if number is None or number != number or abs(number) == float("inf"):
        return None
    if abs(number) < 1e15 and float(number).is_integer():
        return int(number)
    return float(f"{number:.6g}")
