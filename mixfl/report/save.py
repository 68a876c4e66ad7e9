"""Reports and plots as files."""

from collections.abc import Sequence
from pathlib import Path

from mixfl.errors import MixflError
from mixfl.report.document import Curves, Document, Sweep
from mixfl.runs.folder import write_whole

PLOTS = (".pdf", ".svg", ".png")


def save(document: Document, out: Path, format: str = "html") -> None:
    """`format` is html or md."""
    _prepare(out)
    if format == "md":
        from mixfl.report.markdown import markdown as written
    else:
        from mixfl.report.page import page as written
    write_whole(out, written(document).encode())


def save_plot(curves: Curves, out: Path) -> None:
    if out.suffix not in PLOTS:
        raise MixflError(f"--out {out}: expected a file that ends with {', '.join(PLOTS)}.")
    _prepare(out)
    from mixfl.report import plots  # matplotlib is slow to import

    plots.draw(curves, out)


def save_sweeps(sweeps: Sequence[Sweep], out: Path) -> None:
    _prepare(out)
    from mixfl.report import plots

    plots.sweeps(sweeps, out)


def _prepare(out: Path) -> None:
    if out.is_dir():
        raise MixflError(f"--out {out} is a folder: give a file name.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MixflError(f"--out {out} can't be written: {error.strerror}.") from None
