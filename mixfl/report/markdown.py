"""A document as Markdown: the verdicts, and numbers in place of the charts."""

import re
from collections.abc import Iterator, Sequence

from mixfl.report.document import Curves, Document, Finding, Section, Sweep, Table
from mixfl.report.means import final_table, remarks
from mixfl.report.style import metric_title
from mixfl.runs.wording import number

ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def markdown(document: Document) -> str:
    lines = [f"# {plain(document.title)}", ""]
    lines += [f"- {plain(k)}: {plain(v)}" for k, v in document.facts] + [""]
    if document.findings:
        header, rows = verdicts(document.findings)
        lines += ["## Verdicts", "", *table(header, rows), ""]
        for f in document.findings:
            lines += [f"- {plain(f.number)} ({plain(f.data)}): {plain(e)}" for e in f.evidence]
        lines.append("")
    lines += [f"- {plain(note)}" for note in document.notes] + [""]
    for section in document.sections:
        lines += [f"## {plain(section.title)}", "", plain(section.text), "", *_parts(section)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
    return text.encode(errors="replace").decode()


def verdicts(findings: Sequence[Finding]) -> tuple[list[str], list[list[str]]]:
    """A table of them: header and rows."""
    header = ["#", "claim", "data", "verdict", "effect", "interval", "trials", "setting", "version"]
    rows = [
        [f.number, f.says, f.data, f.verdict, f.effect, f.interval, f.trials, f.setting,
         str(f.version)]
        for f in findings
    ]  # fmt: skip
    return header, rows


def plain(text: str) -> str:
    """The text on one line, escaped so that Markdown shows it unchanged."""
    marked = re.sub(r"([\\`*_{}\[\]#|~$!])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^([-+]|\d+[.)])(?=\s|$)", r"\\\1", marked.translate(ENTITIES))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [[plain(cell) for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return ["| " + " | ".join(line) + " |" for line in lines]


def _parts(section: Section) -> Iterator[str]:
    tables = [part for part in section.parts if isinstance(part, Table)]
    for part in section.parts:
        notes: list[str] = []
        if isinstance(part, Curves):
            shown = final_table(part.title, part.series, part.metrics, costs=False)
            notes = remarks(part.series)
            if any(_holds(other, shown) for other in tables):
                continue
        else:
            shown = _sweep(part) if isinstance(part, Sweep) else part
        yield from (_title(part), "", plain(part.text), "", *table(shown.header, shown.rows), "")
        yield from (f"- {plain(note)}" for note in notes)
        yield ""


def _holds(table: Table, other: Table) -> bool:
    """Whether the table has the other's rows and columns."""
    names = [[row[0] for row in t.rows] for t in (table, other)]
    return names[0] == names[1] and set(other.header) <= set(table.header)


def _title(part: Curves | Sweep | Table) -> str:
    return f"### {plain(part.title)}" + (f" ({plain(part.label)})" if part.label else "")


def _sweep(part: Sweep) -> Table:
    """One row per value of the key, one column per line."""
    values = sorted({p.x for line in part.lines for p in line.points})
    rows = []
    for x in values:
        cells = [f"{x:g}"]
        for line in part.lines:
            point = next((p for p in line.points if p.x == x), None)
            if point is None:
                cells.append("-")
            elif point.mean is None:
                cells.append(point.note or "diverged")
            else:
                half = "" if point.high is None else f" ± {number(point.high - point.mean)}"
                cells.append(number(point.mean) + half + (f" ({point.note})" if point.note else ""))
        rows.append(cells)
    header = [part.x, *(f"{line.name}: {metric_title(part.y)}" for line in part.lines)]
    return Table(part.title, header, rows)
