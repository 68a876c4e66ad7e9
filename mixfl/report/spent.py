"""What private runs have spent, round by round, and what they promise."""

from collections.abc import Sequence
from typing import Any

from mixfl.report.document import Curves, Series, Table, Trial
from mixfl.report.means import value

EPSILON, DELTA = "privacy/epsilon", "privacy/delta"
TEXT = (
    "Epsilon is what all rounds so far have spent together. At the given delta, the promise is to "
    "each client, for all of its data (docs/privacy.md)."
)


def parts(series: Sequence[Series]) -> list[Curves | Table]:
    """Nothing if no run is private."""
    private = [s for s in series if any(DELTA in row for t in s.trials for row in t.rows)]
    if not private:
        return []
    header = ["", "epsilon", "delta", "noise multiplier", "clip norm", "sampling", "remark"]
    table = Table("Privacy at the end", header, [[s.name, *_row(s)] for s in private], text=TEXT)
    spent = any(
        value(row, EPSILON) is not None for s in private for t in s.trials for row in t.rows
    )
    return [*([Curves("Privacy spent", [EPSILON], private)] if spent else []), table]


def _row(series: Series) -> list[str]:
    ends = [t.rows[-1] for t in series.trials if t.rows]
    finite = [e for e in (value(row, EPSILON) for row in ends) if e is not None]
    config = series.trials[0].config
    epsilon = f"{max(finite):.4g}" if len(finite) == len(ends) else "no limit"
    keys = ("dp_noise_multiplier", "dp_clip", "dp_sampling")
    return [epsilon, _short(ends[0].get(DELTA)), *(_short(config.get(k)) for k in keys),
            remark(series.trials[0])]  # fmt: skip


def remark(trial: Trial) -> str:
    """Why a run keeps no promise, if it does not."""
    config, why = trial.config, []
    if config.get("dp_seed") is not None:
        why.append("the noise comes from dp_seed")
    if config.get("dp_scale", 1) > 1:
        why.append(f"simulates {config['dp_scale']} times the clients")
    if config.get("dp_noise_multiplier") == 0:
        why.append("no noise")
    return f"NOT PRIVATE: {', '.join(why)}" if why else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
