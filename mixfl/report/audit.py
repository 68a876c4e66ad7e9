"""The report of an audit: a page, Markdown, and a picture of what the attacker saw."""

from pathlib import Path

import numpy as np

from mixfl.measure.audit import SIGNIFICANCE, Audit
from mixfl.report.document import Document, Section, Table
from mixfl.report.save import save


def verdict(found: Audit) -> str:
    if found.holds:
        return (
            f"The attack proves epsilon >= {found.bound:.3f}, with {1 - SIGNIFICANCE:.0%} "
            f"confidence. The accountant's {found.epsilon:.3f} is not refuted."
        )
    return (
        f"The attack proves epsilon >= {found.bound:.3f}, with {1 - SIGNIFICANCE:.0%} confidence. "
        f"That is more than the accountant's {found.epsilon:.3f}: THE PROMISE IS BROKEN."
    )


def save_audit(found: Audit, out: Path, command: str) -> Path:
    """Writes report.html, report.md and audit.png. Returns the page's path."""
    rows = [[name.replace("_", " "), str(value)] for name, value in found.as_json().items()]
    text = (
        "Canaries are clients whose contribution is a secret direction. The attacker knows the "
        "directions and sees the trained model. Its score for a canary is how far the model moved "
        "that way; audit.png shows the scores. If canaries that took part have the same scores as "
        "those that did not, nothing can be learned about a client."
    )
    table = Table("What was attacked, and what came out", ["", "value"], rows, text=text)
    document = Document(
        f"Audit of {found.algorithm} with differential privacy",
        [("command", command), ("result", verdict(found))], [], [Section("Audit", [table])],
    )  # fmt: skip
    save(document, out / "report.html")
    save(document, out / "report.md", "md")
    draw(found, out / "audit.png")
    return out / "report.html"


def draw(found: Audit, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = np.concatenate([found.took_part, found.did_not])
    edges = np.linspace(every.min(), every.max(), 31).tolist()
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.hist(found.did_not, edges, alpha=0.6, label="canaries that did not take part")
    axes.hist(found.took_part, edges, alpha=0.6, label="canaries that took part")
    axes.set_xlabel("score: how far the model moved in a canary's direction (standard deviations)")
    axes.set_ylabel("canaries")
    axes.set_title(
        f"{found.algorithm}: epsilon ≥ {found.bound:.2f} by the attack, "
        f"≤ {found.epsilon:.2f} by the accountant",
        fontsize=10,
    )
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
