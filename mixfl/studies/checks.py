"""The kinds of checks that a claim is made of. Each works on one number per trial (results.py).

Trials with the same seed have the same cohorts. So differences are taken within a seed, and the
interval (Student's t, with what the looks cost) is that of the differences. A check is one of

    better   of = A, than = B     A's metric is better than B's         interval beyond 0
    often    of = [A, ...],       better at least in half of the cases  intervals beyond 0
             than = B
    close    of = A, than = B     at most `within` apart, either way    interval within
    apart    of = A, than = B     more than `within` apart              interval beyond
    reaches  of = A, than = B     at most `within` worse                interval beyond -within
    contrast of = A, less = B,    (A - B) is larger than (C - D) in size
             than = [C, D]
    falls_less of = [A, ...],     from the series `start` to the series `end` of an algorithm, the
             than = B             metric gets worse by less than B's   interval beyond 0
    above, below                  the metric, `limit`                   interval beyond the limit
    saving   what, how, limit     what `mixfl costs` says is saved at the clients
    order    of = [A, B, ...]     the largest `key` that converges rises from A on, in ratios

With each = [algorithms] in place of `of` and `than`, every further setting of an algorithm is
compared with its first. In place of `within`, a margin may be `part` of an `effect`, the gain of
one series over another. With any = true, one of `of` is enough; they share the error. A check says
agree, disagree or not decided.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mixfl.errors import unknown
from mixfl.metrics import lower_is_better
from mixfl.studies.results import Results
from mixfl.theory.intervals import Interval

AGREE, DISAGREE, OPEN = "agree", "disagree", "not decided"


class Checked(NamedTuple):
    verdict: str
    evidence: str
    trials: int = 0
    effect: Interval | None = None
    slack: float = math.inf  # from the mean to the nearest limit, in half-widths
    settled: bool = False  # more trials can't change the verdict
    computed: str = ""  # how, if not from runs


def run(check: Mapping[str, Any], results: Results) -> list[Checked]:
    kinds: dict[str, Callable] = {
        "better": better, "often": often, "close": within, "reaches": within, "apart": within,
        "contrast": contrast, "falls_less": falls_less, "above": beyond, "below": beyond,
        "order": order, "saving": saving,
    }  # fmt: skip
    if check.get("kind") not in kinds:
        raise unknown("kind of check", check.get("kind"), kinds)
    if "each" in check:
        checked = []
        for algorithm in check["each"]:
            first, *others = results.study.named(f"{algorithm} *")
            one = {**check, "of": [s.name for s in others], "than": first.name}
            checked += kinds[check["kind"]](one, results)
        return checked
    checked = kinds[check["kind"]](check, results)
    return [one_of(checked)] if check.get("any") else checked


def apart(check: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The check as several, each with what is judged by itself: a pair that is decided needs no
    more trials, whatever the others need."""
    if "each" in check:
        return [{**check, "each": [algorithm]} for algorithm in check["each"]]
    if check.get("kind") == "order":
        return [{**check, "of": pair} for pair in itertools.pairwise(check["of"])]
    if check.get("any") or check.get("kind") not in ("better", "close", "reaches", "apart"):
        return [check]
    each = [check[k] if isinstance(check[k], list) else [check[k]] for k in ("than", "of")]
    return [{**check, "of": of, "than": than} for than, of in itertools.product(*each)]


def one_of(checked: list[Checked]) -> Checked:
    """The check that agrees, if there is one."""
    first = {AGREE: 0, OPEN: 1, DISAGREE: 2}
    best = min(checked, key=lambda c: (first[c.verdict], -c.slack))
    others = "; ".join(c.evidence for c in checked if c is not best)
    return best._replace(
        evidence=f"{best.evidence} (one is enough; the other: {others})",
        settled=all(c.settled for c in checked),
    )


class Pair(NamedTuple):
    gain: np.ndarray  # of one over the other, per seed; NaN where a trial diverged
    one: np.ndarray
    other: np.ndarray
    words: str


def pairs(check, results) -> Iterator[Pair]:
    study, metric, at = results.study, check["metric"], check.get("at", "end")
    for other in study.named(check["than"]):
        for setting in study.named(check["of"]):
            a, b = values_of(results, [setting.name, other.name], metric, at)
            words = f"{place(metric, at)}: {setting.name} {results.say(a)}, "
            yield Pair(
                sign(metric) * (a - b), a, b, f"{words}{other.name} {results.say(b)}"
            )  # fmt: skip


def values_of(results, names, metric, at) -> list[np.ndarray]:
    """Of the seeds that all of them have."""
    each = [results.values(results.study.named(name)[0], metric, at) for name in names]
    count = min(map(len, each))
    return [values[:count] for values in each]


def sign(metric: str) -> int:
    return -1 if lower_is_better(metric) else 1


def place(metric: str, at: str) -> str:
    name = metric.removeprefix("eval/")
    where = {"end": "at the end", "early": "early", "curve": "over the curve", "largest": "largest"}
    return f"{name} {where[at]}"


def spread(difference: Interval) -> str:
    return f"{difference.mean:+.3g} [{difference.low:+.3g}, {difference.high:+.3g}]"


def slack(mean: float, d: Interval, *limits: float) -> float:
    half = (d.high - d.low) / 2
    distance = min(abs(mean - limit) for limit in limits)
    return distance / half if half > 0 else math.inf


def gone(verdict: str, words: str, count: int) -> Checked:
    """A trial diverged: more trials do not undo that."""
    return Checked(verdict, words, count, settled=True)


def above_0(d: Interval) -> str:
    return AGREE if d.low > 0 else DISAGREE if d.high < 0 else OPEN


def better(check, results) -> list[Checked]:
    checked = []
    for gain, a, b, words in pairs(check, results):
        failed = np.isnan(a).any(), np.isnan(b).any()
        if any(failed):
            verdict = OPEN if all(failed) else DISAGREE if failed[0] else AGREE
            checked.append(gone(verdict, words, len(gain)))
            continue
        d = results.interval(gain)
        verdict = above_0(d)
        same = check.get("same")  # closer than this is not better
        if verdict == OPEN and same and -same < d.low and d.high < same:
            verdict = DISAGREE
        words = f"{words}; better by {spread(d)}"
        checked.append(Checked(verdict, words, len(gain), d, slack(d.mean, d, 0)))
    return checked


def often(check, results) -> list[Checked]:
    each = better(check, results)
    verdicts = [c.verdict for c in each]
    helped, hurt = verdicts.count(AGREE), verdicts.count(DISAGREE)
    half = len(verdicts) / 2
    verdict = AGREE if helped >= half else DISAGREE if hurt > half else OPEN
    (other,) = results.study.named(check["than"])
    words = f"{place(check['metric'], check.get('at', 'end'))}, against {other.name}"
    said = f"better in {helped}, worse in {hurt} of {len(verdicts)} cases"
    fewest = min((c.trials for c in each), default=0)
    return [Checked(verdict, f"{words}: {said}", fewest, settled=all(c.settled for c in each))]


def within(check, results) -> list[Checked]:
    """close, apart and reaches."""
    kind, checked = check["kind"], []
    every = list(pairs(check, results))
    share = len(every) if check.get("any") else 1
    for gain, a, _, words in every:
        room, allowed = margin(check, results, len(gain))
        gain = gain[: len(room)]
        if np.isnan(gain).any() or np.isnan(room).any():
            bad = kind != "apart" and np.isnan(a).any()
            checked.append(gone(DISAGREE if bad else OPEN, words, len(gain)))
            continue
        # How far the gain is above the lower limit, and below the upper one.
        low, high = (results.interval(room + s * gain, share) for s in (1, -1))
        sides = [above_0(low)] + ([above_0(high)] if kind != "reaches" else [])
        inside = DISAGREE if DISAGREE in sides else OPEN if OPEN in sides else AGREE
        verdict = inside
        if kind == "apart":
            verdict = {AGREE: DISAGREE, DISAGREE: AGREE, OPEN: OPEN}[inside]
        d = results.interval(gain, share)
        either = "-" if kind == "reaches" else "±"
        said = f"{words}; better by {spread(d)}, allowed {either}{allowed}"
        near = [slack(low.mean, low, 0)] + ([slack(high.mean, high, 0)] if len(sides) > 1 else [])
        helps = ", helps" if d.low > 0 else ""
        checked.append(Checked(verdict, said + helps, len(gain), d, min(near)))
    return checked


def margin(check, results, count: int) -> tuple[np.ndarray, str]:
    """What is allowed, per seed: a number, or a part of an effect. And in words."""
    if "within" in check:
        return np.full(count, check["within"]), f"{check['within']:g}"
    effect = {"metric": check["metric"], "at": check.get("at", "end"), **check["effect"]}
    (pair,) = pairs(effect, results)
    gain = pair.gain[:count]
    where = f"{effect['of']} over {effect['than']}, {place(effect['metric'], effect['at'])}"
    words = f"{check['part']:g} of the effect ({gain.mean():+.3g}: {where})"
    return check["part"] * gain, words


def contrast(check, results) -> list[Checked]:
    """|of - less| is larger than |than[0] - than[1]|."""
    metric, at = check["metric"], check.get("at", "end")
    names = [check["of"], check["less"], *check["than"]]
    values = values_of(results, names, metric, at)
    words = f"{place(metric, at)}: " + ", ".join(
        f"{n} {results.say(v)}" for n, v in zip(names, values, strict=True)
    )
    a, b, c, d = values
    if np.isnan(values).any():
        return [gone(OPEN, words, len(a))]
    difference = results.interval(np.abs(a - b) - np.abs(c - d))
    words = f"{words}; differs more by {spread(difference)}"
    near = slack(difference.mean, difference, 0)
    return [Checked(above_0(difference), words, len(a), difference, near)]


def falls_less(check, results) -> list[Checked]:
    """How much a metric gets worse from `start` to `end`, in several algorithms and in one."""
    metric, at = check["metric"], check.get("at", "end")
    ends, checked = [check["start"], check["end"]], []
    for algorithm in check["of"]:
        names = [f"{a} {end}" for a in (algorithm, check["than"]) for end in ends]
        first, last, others_first, others_last = values_of(results, names, metric, at)
        own, other = (sign(metric) * d for d in (first - last, others_first - others_last))
        words = (
            f"{place(metric, at)}, worse from {ends[0]} to {ends[1]}: {algorithm} by "
            f"{results.say(own)}, {check['than']} by {results.say(other)}"
        )
        if np.isnan(own).any() or np.isnan(other).any():
            checked.append(gone(OPEN, words, len(own)))
            continue
        d = results.interval(other - own)
        words = f"{words}; less by {spread(d)}"
        checked.append(Checked(above_0(d), words, len(own), d, slack(d.mean, d, 0)))
    return checked


def beyond(check, results) -> list[Checked]:
    study, metric, at = results.study, check["metric"], check.get("at", "end")
    limit, upwards = check["limit"], 1 if check["kind"] == "above" else -1
    checked = []
    for setting in study.named(check["of"]):
        values = results.values(setting, metric, at)
        words = f"{place(metric, at)}: {setting.name} {results.say(values)}, limit {limit:g}"
        if np.isnan(values).any():
            checked.append(gone(OPEN, words, len(values)))
            continue
        # The largest value is taken over all trials, as in the paper.
        d = Interval(*[values.max()] * 3) if at == "largest" else results.interval(values)
        low, high = sorted((upwards * (d.low - limit), upwards * (d.high - limit)))
        verdict = above_0(Interval(0, low, high))
        checked.append(Checked(verdict, words, len(values), d, slack(d.mean, d, limit)))
    return checked


def order(check, results) -> list[Checked]:
    """Each of `of` stands a larger `key` than the one before it. Judged per trial, by the log2 of
    how many times as much it stands; apart by less than a step of the grid is not larger."""
    stands = [stood(check, results, name) for name in check["of"]]
    return [rises(check, a, b, results) for a, b in itertools.pairwise(stands)]


class Stood(NamedTuple):
    """The largest `key` up to which all runs of a trial converge."""

    name: str
    largest: np.ndarray  # [trials]; half of the smallest key tried if that diverges
    keys: np.ndarray  # tried, rising


def stood(check, results, name: str) -> Stood:
    """A run converges if it ends with a finite `metric`, below `limit`."""
    key = check["key"]
    settings = sorted(results.study.named(f"{name} {key}=*"), key=lambda s: float(s.keys[key]))
    every = [results.values(s, check["metric"], "end") for s in settings]
    count = min(map(len, every))
    good = np.array([values[:count] for values in every]) < check["limit"]  # NaN is not
    keys = np.array([float(s.keys[key]) for s in settings])
    steps = np.logical_and.accumulate(good, axis=0).sum(axis=0)
    return Stood(name, np.concatenate([keys[:1] / 2, keys])[steps], keys)


def rises(check, one: Stood, other: Stood, results) -> Checked:
    count = min(len(one.largest), len(other.largest))
    a, b = one.largest[:count], other.largest[:count]
    d = results.interval(np.log2(b / a))
    said = ", ".join(f"{s.name} {_span(v)}" for s, v in ((one, a), (other, b)))
    ratio = " to ".join(f"{2**x:.2f}" for x in dict.fromkeys((d.low, d.high)))
    words = (
        f"largest {check['key']} that converges: {said}; {other.name} stands {ratio} times as much"
    )
    if ((a == one.keys[-1]) & (b == other.keys[-1])).any():
        return Checked(OPEN, f"{words}; both stand all that was tried", count, d, settled=True)
    step = np.log2(np.concatenate([s.keys[1:] / s.keys[:-1] for s in (one, other)])).max()
    verdict = above_0(d)
    if verdict == OPEN and d.high < step and d.low > -step:
        verdict = DISAGREE
    return Checked(verdict, words, count, d, slack(d.mean, d, 0))


def _span(values: np.ndarray) -> str:
    return " to ".join(f"{v:g}" for v in dict.fromkeys((values.min(), values.max())))


def saving(check, results) -> list[Checked]:
    """The part of `what` that is saved against the baseline, rounded as in the paper."""
    from mixfl.measure.costs import savings

    checked = []
    for algorithm, what, how, part in savings(results.study.costs()):
        if what == check["what"] and how in check["how"]:
            verdict = AGREE if round(part, 3) >= check["limit"] else DISAGREE
            words = f"{algorithm} saves {part:.2%} of {what} ({how}), limit {check['limit']:.1%}"
            computed = "arithmetic" if how == "by formula" else "counted"
            saved, near = Interval(part, part, part), abs(part - check["limit"])
            checked.append(Checked(verdict, words, 0, saved, near, True, computed))
    return checked
