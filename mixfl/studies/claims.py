"""Decides claims from the runs' metrics. A claim is a list of checks, each on one number per trial.

Trials with the same seed have the same cohorts. So differences are taken within a seed, and the
95 % interval (Student's t) is that of the differences. A check is one of

    better   of = A, than = B     A's metric is better than B's         interval beyond 0
    often    of = [A, ...],       better at least in half of the cases  intervals beyond 0
             than = B
    close    of = A, than = B     at most `within` apart, either way    interval within
    reaches  of = A, than = B     at most `within` worse                interval beyond -within
    contrast of = A, less = B,    (A - B) is larger than (C - D) in size
             than = [C, D]
    falls_less of = [A, ...],     from the series `start` to the series `end` of an algorithm, the
             than = B             metric gets worse by less than B's   interval beyond 0
    above, below                  the metric, `limit`                   interval beyond the limit
    saving   what, how, limit     what `mixfl costs` says is saved at the clients
    order    of = [A, B, ...]     the largest `key` that converges rises from A on

With each = [algorithms] in place of `of` and `than`, every further setting of an algorithm is
compared with its first. A check says agree, disagree or not decided. A claim agrees if all of its
checks agree, and disagrees if one disagrees. Metrics are means over a part of the curve (`at`):
`end`, the last fifth of the evaluations; `early`, the first fifth; `curve`, all; `largest`, the
maximum from round 10 on.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mixfl.errors import MixflError, unknown
from mixfl.metrics import lower_is_better
from mixfl.report.document import Finding
from mixfl.studies.dissimilarity import FIRST
from mixfl.studies.study import Setting, Study
from mixfl.studies.trials import Done
from mixfl.theory.intervals import Interval, interval

AGREE, DISAGREE, OPEN = "agree", "disagree", "not decided"


class Checked(NamedTuple):
    verdict: str
    evidence: str


class Results:
    """The trials of a study, as numbers."""

    def __init__(self, study: Study, ended: Mapping[str, Done]):
        self.study, self.ended = study, ended

    def values(self, setting: Setting, metric: str, at: str) -> np.ndarray:
        """[trials], NaN where a trial diverged."""
        return np.array([self._value(self.ended[t.folder], metric, at) for t in setting.trials])

    def diverged(self, setting: Setting) -> list[int]:
        ends = [self.ended[t.folder] for t in setting.trials]
        return [d.round for d in ends if d.status == "diverged"]

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


def decide(study: Study, ended: Mapping[str, Done]) -> list[Finding]:
    results = Results(study, ended)
    findings = []
    for claim in study.claims:
        checked = [c for check in claim["checks"] for c in run(check, results)]
        verdicts = [c.verdict for c in checked]
        verdict = AGREE
        if DISAGREE in verdicts:
            verdict = DISAGREE
        elif OPEN in verdicts:
            verdict = OPEN
        lines = [f"{c.evidence}: {c.verdict}" for c in checked]
        findings.append(Finding(str(claim["number"]), claim["says"], study.data, verdict, lines))
    return findings


def run(check: Mapping[str, Any], results: Results) -> list[Checked]:
    kinds: dict[str, Callable] = {
        "better": better, "often": often, "close": close, "reaches": reaches, "contrast": contrast,
        "falls_less": falls_less, "above": beyond, "below": beyond, "order": order,
        "saving": saving,
    }  # fmt: skip
    if check.get("kind") not in kinds:
        raise unknown("kind of check", check.get("kind"), kinds)
    if "each" not in check:
        return kinds[check["kind"]](check, results)
    checked = []
    for algorithm in check["each"]:
        first, *others = results.study.named(f"{algorithm} *")
        one = {**check, "of": [s.name for s in others], "than": first.name}
        checked += kinds[check["kind"]](one, results)
    return checked


def pairs(check, results):
    """For each setting of `of`: its gain over `than` per seed, the values of both, and both in
    words. Values are NaN where a trial diverged."""
    study, metric, at = results.study, check["metric"], check.get("at", "end")
    (other,) = study.named(check["than"])
    sign = -1 if lower_is_better(metric) else 1
    for setting in study.named(check["of"]):
        a, b = (results.values(s, metric, at) for s in (setting, other))
        words = f"{place(metric, at)}: {setting.name} {say(a)}, {other.name} {say(b)}"
        count = min(len(a), len(b))
        gain = sign * (a[:count] - b[:count])
        yield gain, (a, b), words


def place(metric: str, at: str) -> str:
    name = metric.removeprefix("eval/")
    where = {"end": "at the end", "early": "early", "curve": "over the curve", "largest": "largest"}
    return f"{name} {where[at]}"


def say(values: np.ndarray) -> str:
    if np.isnan(values).any():
        return f"diverged in {int(np.isnan(values).sum())} of {len(values)} trials"
    mean, low, high = interval(values)
    return f"{mean:.4g} ± {(high - low) / 2:.2g}" if len(values) > 1 else f"{mean:.4g}"


def spread(difference: Interval) -> str:
    return f"{difference.mean:+.3g} [{difference.low:+.3g}, {difference.high:+.3g}]"


def better(check, results) -> list[Checked]:
    checked = []
    for gain, (a, b), words in pairs(check, results):
        if np.isnan(a).any() != np.isnan(b).any():
            checked.append(Checked(DISAGREE if np.isnan(a).any() else AGREE, words))
            continue
        if np.isnan(gain).any():
            checked.append(Checked(OPEN, words))
            continue
        d = interval(gain)
        verdict = AGREE if d.low > 0 else DISAGREE if d.high < 0 else OPEN
        same = check.get("same")  # closer than this is not better
        if verdict == OPEN and same and -same < d.low and d.high < same:
            verdict = DISAGREE
        checked.append(Checked(verdict, f"{words}; better by {spread(d)}"))
    return checked


def often(check, results) -> list[Checked]:
    verdicts = [c.verdict for c in better(check, results)]
    helped, hurt = verdicts.count(AGREE), verdicts.count(DISAGREE)
    half = len(verdicts) / 2
    verdict = AGREE if helped >= half else DISAGREE if hurt > half else OPEN
    (other,) = results.study.named(check["than"])
    words = f"{place(check['metric'], check.get('at', 'end'))}, against {other.name}"
    said = f"better in {helped}, worse in {hurt} of {len(verdicts)} cases"
    return [Checked(verdict, f"{words}: {said}")]


def close(check, results) -> list[Checked]:
    return within(check, results, both=True)


def reaches(check, results) -> list[Checked]:
    return within(check, results, both=False)


def within(check, results, both: bool) -> list[Checked]:
    checked, limit = [], check["within"]
    for gain, (a, _), words in pairs(check, results):
        if np.isnan(gain).any():
            checked.append(Checked(DISAGREE if np.isnan(a).any() else OPEN, words))
            continue
        d = interval(gain)
        high = d.high if both else -np.inf
        out = d.high < -limit or (both and d.low > limit)
        verdict = AGREE if -limit <= d.low and high <= limit else DISAGREE if out else OPEN
        allowed = f"allowed {'±' if both else '-'}{limit:g}" + (", helps" if d.low > 0 else "")
        checked.append(Checked(verdict, f"{words}; better by {spread(d)}, {allowed}"))
    return checked


def contrast(check, results) -> list[Checked]:
    """|of - less| is larger than |than[0] - than[1]|."""
    study, metric, at = results.study, check["metric"], check.get("at", "end")
    names = [check["of"], check["less"], *check["than"]]
    values = [results.values(study.named(n)[0], metric, at) for n in names]
    words = f"{place(metric, at)}: " + ", ".join(
        f"{n} {say(v)}" for n, v in zip(names, values, strict=True)
    )
    if np.isnan(values).any():
        return [Checked(OPEN, words)]
    a, b, c, d = values
    difference = interval(np.abs(a - b) - np.abs(c - d))
    verdict = AGREE if difference.low > 0 else DISAGREE if difference.high < 0 else OPEN
    return [Checked(verdict, f"{words}; differs more by {spread(difference)}")]


def falls_less(check, results) -> list[Checked]:
    """How much a metric gets worse from `start` to `end`, in several algorithms and in one."""
    study, metric, at = results.study, check["metric"], check.get("at", "end")
    sign = -1 if lower_is_better(metric) else 1

    def fall(algorithm: str) -> np.ndarray:
        names = (f"{algorithm} {check[part]}" for part in ("start", "end"))
        first, last = (results.values(study.named(n)[0], metric, at) for n in names)
        return sign * (first - last)

    other, checked = fall(check["than"]), []
    for algorithm in check["of"]:
        own = fall(algorithm)
        words = (
            f"{place(metric, at)}, worse from {check['start']} to {check['end']}: {algorithm} by "
            f"{say(own)}, {check['than']} by {say(other)}"
        )
        if np.isnan(own).any() or np.isnan(other).any():
            checked.append(Checked(OPEN, words))
            continue
        d = interval(other - own)
        verdict = AGREE if d.low > 0 else DISAGREE if d.high < 0 else OPEN
        checked.append(Checked(verdict, f"{words}; less by {spread(d)}"))
    return checked


def beyond(check, results) -> list[Checked]:
    study, metric, at = results.study, check["metric"], check.get("at", "end")
    limit, sign = check["limit"], 1 if check["kind"] == "above" else -1
    checked = []
    for setting in study.named(check["of"]):
        values = results.values(setting, metric, at)
        words = f"{place(metric, at)}: {setting.name} {say(values)}, limit {limit:g}"
        if np.isnan(values).any():
            checked.append(Checked(OPEN, words))
            continue
        # The largest value is taken over all trials, as in the paper.
        d = Interval(*[values.max()] * 3) if at == "largest" else interval(values)
        low, high = sorted((sign * (d.low - limit), sign * (d.high - limit)))
        checked.append(Checked(AGREE if low > 0 else DISAGREE if high < 0 else OPEN, words))
    return checked


def order(check, results) -> list[Checked]:
    """The largest value of `key` at which all trials converge, that is, end with `metric` below
    `limit`."""
    study, key, metric = results.study, check["key"], check["metric"]
    largest: list[float] = []
    words = []
    for name in check["of"]:
        good = []
        for setting in study.named(f"{name}*"):
            values = results.values(setting, metric, "end")
            if not np.isnan(values).any() and values.max() < check["limit"]:
                good.append(float(setting.keys[key]))
        largest.append(max(good, default=0.0))
        top = max(float(s.keys[key]) for s in study.named(f"{name}*"))
        every = " (all tried)" if largest[-1] == top else ""
        words.append(f"{name} up to {largest[-1]:g}{every}")
    steps = list(itertools.pairwise(largest))
    verdict = OPEN
    if all(a < b for a, b in steps):
        verdict = AGREE
    elif any(a > b for a, b in steps):
        verdict = DISAGREE
    return [Checked(verdict, f"largest {key} that converges: {', '.join(words)}")]


def saving(check, results) -> list[Checked]:
    """The part of `what` that is saved against the baseline, rounded as in the paper."""
    from mixfl.measure.costs import savings

    checked = []
    for algorithm, what, how, part in savings(results.study.costs()):
        if what == check["what"] and how in check["how"]:
            verdict = AGREE if round(part, 3) >= check["limit"] else DISAGREE
            words = f"{algorithm} saves {part:.2%} of {what} ({how}), limit {check['limit']:.1%}"
            checked.append(Checked(verdict, words))
    return checked
