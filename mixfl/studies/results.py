"""The trials of a study, as numbers: one per trial, from a part of its curve."""

from collections.abc import Mapping

import numpy as np

from mixfl.errors import MixflError, unknown
from mixfl.studies.dissimilarity import FIRST
from mixfl.studies.study import Setting, Study
from mixfl.studies.trials import Done
from mixfl.theory.intervals import ERROR, Interval, sequential


class Results:
    def __init__(self, study: Study, ended: Mapping[str, Done]):
        self.study, self.ended = study, ended
        self.asked: set[str] = set()  # settings whose values were asked for

    def values(self, setting: Setting, metric: str, at: str) -> np.ndarray:
        """[trials], NaN where a trial diverged."""
        self.asked.add(setting.name)
        return np.array([self._value(self.ended[t.folder], metric, at) for t in setting.trials])

    def interval(self, values: np.ndarray, share: int = 1) -> Interval:
        """The interval that the study's looks allow; `share`: how many checks share its error."""
        return sequential(values, self.study.looks, ERROR / share)

    def say(self, values: np.ndarray) -> str:
        if np.isnan(values).any():
            return f"diverged in {int(np.isnan(values).sum())} of {len(values)} trials"
        mean, low, high = self.interval(values)
        return f"{mean:.4g} ± {(high - low) / 2:.2g}" if len(values) > 1 else f"{mean:.4g}"

    def _value(self, done: Done, metric: str, at: str) -> float:
        if done.status == "diverged":
            return np.nan
        rows = [(r["round"], r[metric]) for r in done.rows if r.get(metric) is not None]
        if not rows:
            raise MixflError(f"{done.folder} has no {metric}.")
        return part(np.array(rows, float), at)


def part(rows: np.ndarray, at: str) -> float:
    """The mean (or maximum) over a part of rows [evaluations, (round, value)]."""
    fifth = max(1, round(len(rows) / 5))
    if at == "end":
        return float(rows[-fifth:, 1].mean())
    if at == "early":
        return float(rows[:fifth, 1].mean())
    if at == "curve":
        return float(rows[:, 1].mean())
    if at == "largest":
        late = rows[rows[:, 0] >= FIRST]
        return float((late if len(late) else rows)[:, 1].max())
    raise unknown("part of a curve", at, ("end", "early", "curve", "largest"))
