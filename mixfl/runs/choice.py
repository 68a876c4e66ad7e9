"""Which model of a run is the best, and when waiting for a better one is over."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixfl.errors import MixflError, unknown
from mixfl.metrics import lower_is_better
from mixfl.settings import Settings

USUAL = ("valid/loss", "eval/loss")


def score(metric: str, value: float) -> float:
    """Lower is better."""
    return value if lower_is_better(metric) else -value


@dataclass(frozen=True)
class Choice:
    """By which metric models are compared."""

    by: str | None  # None: there is no such metric
    keep: bool = False  # the best model so far is saved
    patience: int = 0  # evaluations without a better one after which the run ends; 0: it does not

    @classmethod
    def of(cls, s: Settings, metrics: Collection[str]) -> "Choice":
        """`metrics`: those that evaluations report."""
        if s.best_by != "auto":
            by: str | None = s.best_by
            if s.best_by.removeprefix("min:").removeprefix("max:") not in metrics:
                raise unknown("metric in best_by:", s.best_by, metrics)
        else:
            by = next((m for m in USUAL if m in metrics), None)
        keep = s.keep_best or s.early_stop > 0
        if keep and by is None:
            raise MixflError(
                "keep_best and early_stop need a metric to choose by. The evaluation reports "
                f"{', '.join(sorted(metrics)) or 'none'}: set best_by, or let it return a loss."
            )
        return cls(by, keep, s.early_stop)

    def value(self, row: Mapping[str, Any]) -> float | None:
        key = None if self.by is None else self.by.removeprefix("min:").removeprefix("max:")
        return None if key is None else row.get(key)

    def best(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The first of the best rows; None if none has a number."""
        known = [
            (score(str(self.by), v), row) for row in rows if (v := self.value(row)) is not None
        ]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def ends(self, rows: Sequence[dict[str, Any]]) -> str:
        """Why a run with these rows ends now; "" if it does not."""
        best = self.best(rows)
        since = len(rows) - (0 if best is None else rows.index(best) + 1)
        if not self.patience or since < self.patience:
            return ""
        times = f"{since} evaluation{'s' if since > 1 else ''}"
        if best is None:
            return f"no {self.by} in {times} (early_stop)"
        value, where = self.value(best), best["round"]
        return f"no better {self.by} than {value:.4g} of round {where} in {times} (early_stop)"
