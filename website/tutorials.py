"""Tutorials: notebooks in docs/tutorials, run in a kernel and shown as pages of the site.

The repository has them without outputs. What a run gave is kept in build/tutorials until the
notebook or the package changes, so that CI runs each of them once, in its tests.
"""

import base64
import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "tutorials"
KEPT = ROOT / "build" / "tutorials"
SECONDS = 1800  # of a cell: ends what hangs


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """The notebook with its outputs, from its last run if that is still true."""
    kept = _kept(path)
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    # DRAFT=1, while writing: notebooks that have not been run are shown without outputs.
    return nbformat.read(path, as_version=4) if os.environ.get("DRAFT") == "1" else execute(path)


def execute(path: Path) -> Any:
    """Runs a notebook, in an empty folder. An error in a cell is an error here."""
    notebook, kept = nbformat.read(path, as_version=4), _kept(path)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=SECONDS, startup_timeout=SECONDS,
            resources={"metadata": {"path": folder}},
        )  # fmt: skip
        client.execute(env=_environment())
    KEPT.mkdir(parents=True, exist_ok=True)
    for old in KEPT.glob(f"{path.stem}-*.ipynb"):
        old.unlink()
    nbformat.write(notebook, kept)
    return notebook


def _environment() -> dict[str, str]:
    """This tree's mixfl, in Python and as a command."""
    before = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([before] if before else [])]),
    }


def _kept(path: Path) -> Path:
    return KEPT / f"{path.stem}-{_digest(path)}.ipynb"


def _digest(path: Path) -> str:
    """Of what the outputs depend on."""
    digest = hashlib.sha256(path.read_bytes())
    for file in sorted([*(ROOT / "mixfl").rglob("*.py"), *(ROOT / "mixfl").rglob("*.toml")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


# Pages


def page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts, pictures = [], {}
    stem = name.removesuffix(".ipynb")
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", cell.source))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for at, output in enumerate(cell.outputs):
            picture = f"{number}-{at}.png"
            parts.append(_shown(output, f"{stem}/{picture}"))
            if "image/png" in output.get("data", {}):
                pictures[picture] = base64.b64decode(output.data["image/png"])
    title, _, rest = "\n\n".join(part for part in parts if part).partition("\n")
    made = f"[:material-download: notebook]({name}){{ .md-button download='{name}' }}"
    return f"{title}\n\n{made}\n\n{rest}\n", pictures


def _shown(output: Any, picture: str) -> str:
    if output.output_type == "stream":
        return f"```text\n{_plain(output.text)}\n```" if output.text.strip() else ""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![What this cell draws]({picture})"
    if "text/html" in data:
        return f'<div class="output">\n{_one_block(data["text/html"])}\n</div>'
    if "text/plain" in data:
        return f"```text\n{_plain(data['text/plain'])}\n```"
    return ""


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip().replace("```", "'''")


def _one_block(html: str) -> str:
    """Markdown ends a block of HTML at an empty line."""
    return re.sub(r"\n\s*\n", "\n", html)
