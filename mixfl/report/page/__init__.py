"""A document as one HTML file that needs no network and no server."""

import re
from collections.abc import Sequence
from typing import Any

from mixfl.report.document import Document, Table
from mixfl.report.page.render import render
from mixfl.report.page.script_data import figure, points_per_line, runs

SIGNS = {"agree": "✓", "disagree": "✕", "not decided": "?"}
# Also 0.98 ± 0.01, 213 MB, and text in place of a number.
NUMERIC = re.compile(r"[-+±]?[0-9.,]+(\W.*)?|-?|diverged.*", re.I)


def page(document: Document) -> str:
    sections, figures = _sections(document)
    data = {
        "title": document.title,
        "facts": document.facts,
        "findings": [f.__dict__ for f in document.findings],
        "figures": figures,
        **runs(document.trials()),
    }
    return render(
        "report.html.j2", document=document, sections=sections, data=data, signs=SIGNS
    )  # fmt: skip


def _sections(document: Document) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The sections for the template, and the figures for the script, referred to by number."""
    sections: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    most = points_per_line(document)
    for i, section in enumerate(document.sections):
        parts: list[dict[str, Any]] = []
        for k, part in enumerate(section.parts):
            about = {"id": f"s{i}p{k}", "title": part.title, "label": part.label, "text": part.text}
            if isinstance(part, Table):
                parts.append(about | _table(part))
            else:
                drawn = figure(part, most)
                parts.append(about | {"figure": len(figures), "notes": drawn["notes"]})
                figures.append({"place": about["id"], **drawn})
        sections.append(
            {"id": f"s{i}", "title": section.title, "text": section.text, "parts": parts}
        )
    return sections, figures


def _table(table: Table) -> dict[str, Any]:
    """The table with all rows padded to one length, and which columns hold numbers."""
    width = max(map(len, (table.header, *table.rows)))
    rows = [_padded(row, width) for row in table.rows]
    numeric = [bool(rows) and all(NUMERIC.fullmatch(row[i]) for row in rows) for i in range(width)]
    return {"header": _padded(table.header, width), "rows": rows, "numeric": numeric}


def _padded(row: Sequence[str], width: int) -> list[str]:
    return [*row, *[""] * (width - len(row))]
