"""What all displays of progress share: which metrics are shown, numbers and times in words."""

from collections.abc import Mapping
from typing import Any

# Shown while training, in this order, if a problem reports them.
SHOWN = ("eval/loss", "eval/auc", "eval/accuracy", "eval/central/accuracy", "eval/recall@10")


def shown_keys(row: Mapping[str, Any]) -> list[str]:
    keys = [k for k in SHOWN if row.get(k) is not None]
    return keys or [k for k in row if k.startswith(("eval/", "train/")) and row[k] is not None][:2]


def summary(row: dict[str, Any]) -> str:
    return "  ".join(f"{k.removeprefix('eval/')} {number(row[k])}" for k in shown_keys(row))


def number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
