"""Claims decided by figures: agree, disagree or not decided."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mixfl.errors import MixflError
from mixfl.studies import claims
from mixfl.studies.checks import apart
from mixfl.studies.claims import AGREE, DISAGREE, OPEN
from mixfl.studies.results import Results, part
from mixfl.studies.study import Setting, Study
from mixfl.studies.trials import Done, Trial


def results(tmp_path, figures, metric="eval/loss", keys=None):
    """Of {name: values of the trials}; None is a diverged trial, a list a whole curve."""
    settings, ended = [], {}
    for name, values in figures.items():
        algorithm, *_ = name.split()
        trials = [Trial("smile", algorithm, f"{name}/seed{i}", name) for i in range(len(values))]
        settings.append(Setting(name, algorithm, (keys or {}).get(name, {}), trials))
        for trial, value in zip(trials, values, strict=True):
            folder = tmp_path / trial.folder
            folder.mkdir(parents=True)
            curve = value if isinstance(value, list) else [value] * 10
            rows = [{"round": 5 * (i + 1), metric: v} for i, v in enumerate(curve)]
            if value is not None:
                (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
            status = "diverged" if value is None else "finished"
            ended[trial.folder] = Done(trial, folder, status, 7)
    study = Study("made", "Made", "", "smile", "made up", settings, [], [])
    return Results(study, ended)


def verdicts(check, outcomes):
    return [c.verdict for c in claims.run(check, outcomes)]


CLEAR = {"a": [1.0, 1.1, 1.05], "b": [2.0, 2.1, 2.04]}
NOISY = {"a": [1.0, 3.0, 2.0], "b": [2.5, 1.5, 2.3]}
SAME = {"a": [1.0, 1.1, 1.2], "b": [1.001, 1.099, 1.2]}
GONE = {"a": [1.0, 1.0, 1.0], "b": [None, None, 2.0]}


@pytest.mark.parametrize(
    ("figures", "better", "worse", "close", "reaches"),
    [
        (CLEAR, AGREE, DISAGREE, DISAGREE, AGREE),
        (NOISY, OPEN, OPEN, OPEN, OPEN),
        (SAME, OPEN, OPEN, AGREE, AGREE),
        (GONE, AGREE, DISAGREE, OPEN, OPEN),
    ],
)
def test_verdicts(tmp_path, figures, better, worse, close, reaches):
    outcomes = results(tmp_path, figures)
    loss = {"metric": "eval/loss", "of": "a", "than": "b"}
    assert verdicts({"kind": "better", **loss}, outcomes) == [better]
    assert verdicts({"kind": "better", **loss, "of": "b", "than": "a"}, outcomes) == [worse]
    assert verdicts({"kind": "close", **loss, "within": 0.01}, outcomes) == [close]
    assert verdicts({"kind": "reaches", **loss, "within": 0.01}, outcomes) == [reaches]


def test_one_that_diverged_is_not_close_to_one_that_did_not(tmp_path):
    outcomes = results(tmp_path, GONE)
    check = {"metric": "eval/loss", "of": "b", "than": "a", "within": 5}
    assert verdicts({"kind": "close", **check}, outcomes) == [DISAGREE]


def test_higher_is_better_for_accuracies(tmp_path):
    outcomes = results(tmp_path, CLEAR, "eval/accuracy")
    check = {"kind": "better", "metric": "eval/accuracy", "of": "b", "than": "a"}
    assert verdicts(check, outcomes) == [AGREE]


def test_differences_are_taken_within_a_seed(tmp_path):
    """The trials differ by far more than the two do: only pairs can tell."""
    seeds = np.array([0.0, 10.0, 20.0])
    outcomes = results(tmp_path, {"a": list(seeds), "b": list(seeds + [0.1, 0.11, 0.09])})
    check = {"kind": "better", "metric": "eval/loss", "of": "a", "than": "b"}
    assert verdicts(check, outcomes) == [AGREE]


def test_better_is_claimed_wrongly_in_2_5_of_100_cases(tmp_path):
    """Where there is no difference: that is what a 95 % interval promises."""
    rng = np.random.default_rng(0)
    wrong = 0
    for i in range(400):
        a, b = rng.normal(size=(2, 3))
        outcomes = results(tmp_path / str(i), {"a": list(a), "b": list(b)})
        wrong += verdicts(
            {"kind": "better", "metric": "eval/loss", "of": "a", "than": "b"}, outcomes
        ) == [AGREE]
    assert 2 <= wrong <= 20


def test_parts_of_a_curve():
    rows = np.array([[5 * (i + 1), i] for i in range(10)], float)
    assert part(rows, "early") == 0.5
    assert part(rows, "end") == 8.5
    assert part(rows, "curve") == 4.5
    assert part(np.array([[5, 9.0], [10, 2.0], [20, 3.0]]), "largest") == 3.0
    with pytest.raises(MixflError, match="unknown part"):
        part(rows, "middle")


def test_limits(tmp_path):
    outcomes = results(tmp_path, CLEAR)
    check = {"metric": "eval/loss", "of": "a"}
    assert verdicts({"kind": "above", **check, "limit": 0.5}, outcomes) == [AGREE]
    assert verdicts({"kind": "below", **check, "limit": 0.5}, outcomes) == [DISAGREE]
    assert verdicts({"kind": "below", **check, "limit": 1.06}, outcomes) == [OPEN]
    assert verdicts({"kind": "below", **check, "limit": 1.2, "at": "largest"}, outcomes) == [AGREE]


def test_contrasts(tmp_path):
    figures = {"a": [3.0, 3.1], "b": [1.0, 1.1], "c": [2.0, 2.0], "d": [1.9, 1.91]}
    outcomes = results(tmp_path, figures)
    check = {"kind": "contrast", "metric": "eval/loss", "of": "a", "less": "b", "than": ["c", "d"]}
    assert verdicts(check, outcomes) == [AGREE]
    check = {**check, "of": "c", "less": "d", "than": ["a", "b"]}
    assert verdicts(check, outcomes) == [DISAGREE]


def test_what_falls_less(tmp_path):
    figures = {
        "a inf": [0.9, 0.91, 0.92], "a e=1": [0.85, 0.87, 0.86], "b inf": [0.6, 0.62, 0.61],
        "b e=1": [0.4, 0.41, 0.42], "c inf": [0.5, 0.5, 0.5], "c e=1": [0.6, 0.61, 0.6],
    }  # fmt: skip
    outcomes = results(tmp_path, figures, "eval/auc")
    check = {"kind": "falls_less", "metric": "eval/auc", "start": "inf", "end": "e=1"}
    (checked,) = claims.run({**check, "of": ["a"], "than": "b"}, outcomes)
    assert checked.verdict == AGREE
    assert "a by 0.05" in checked.evidence
    assert verdicts({**check, "of": ["b"], "than": "a"}, outcomes) == [DISAGREE]
    assert verdicts({**check, "of": ["a"], "than": "a"}, outcomes) == [OPEN]
    # One that gets better falls least, whatever its level.
    assert verdicts({**check, "of": ["c", "b"], "than": "a"}, outcomes) == [AGREE, DISAGREE]


RATES = ("1", "2", "4", "8")


def rates(tmp_path, **stands):
    """Of each series, the runs of two trials that stand so many of the RATES, given as numbers."""
    figures = {
        f"{name} lr={rate}": [1.0 if i < n else [None, 9.0][i % 2] for n in counts]
        for name, counts in stands.items()
        for i, rate in enumerate(RATES)
    }
    keys = {name: {"lr": float(name[-1])} for name in figures}
    return results(tmp_path, figures, keys=keys)


ORDER = {"kind": "order", "metric": "eval/loss", "key": "lr", "limit": 3.0}


def test_the_order_in_which_algorithms_diverge(tmp_path):
    outcomes = rates(tmp_path, a=[1, 0, 1], b=[2, 1, 2], c=[3, 3, 3], d=[4, 4, 4])
    first, second, third = claims.run({**ORDER, "of": ["a", "b", "c", "d"]}, outcomes)
    assert [first.verdict, second.verdict, third.verdict] == [AGREE, OPEN, AGREE]
    assert "largest lr that converges: a 0.5 to 1, b 1 to 2; b stands 2.00 times" in first.evidence
    assert first.effect.mean == 1.0  # twice as much
    assert verdicts({**ORDER, "of": ["c", "a"]}, outcomes) == [DISAGREE]


def test_rates_that_are_alike_do_not_rise(tmp_path):
    outcomes = rates(tmp_path, a=[2, 2, 3], b=[2, 2, 3], c=[4, 4, 3], d=[4, 4, 4])
    assert verdicts({**ORDER, "of": ["a", "b"]}, outcomes) == [DISAGREE]
    (both,) = claims.run({**ORDER, "of": ["c", "d"]}, outcomes)
    assert both.verdict == OPEN  # the grid ends too early
    assert both.settled
    assert "both stand all that was tried" in both.evidence


def test_a_rate_above_one_that_diverges_does_not_count(tmp_path):
    """A run that happens to stand a larger rate than one that diverged is no evidence."""
    figures = {
        "a lr=1": [1.0, 1.0], "a lr=2": [9.0, 9.0], "a lr=4": [1.0, 1.0],
        "b lr=1": [1.0, 1.0], "b lr=2": [1.0, 1.0], "b lr=4": [9.0, 9.0],
    }  # fmt: skip
    keys = {name: {"lr": float(name[-1])} for name in figures}
    assert verdicts({**ORDER, "of": ["a", "b"]}, results(tmp_path, figures, keys=keys)) == [AGREE]


def test_pairs_in_order_are_decided_one_by_one():
    assert [one["of"] for one in apart({**ORDER, "of": ["a", "b", "c"]})] == [
        ("a", "b"), ("b", "c")
    ]  # fmt: skip


def test_every_setting_of_an_algorithm_is_compared_with_its_first(tmp_path):
    figures = {"pt k=1": [2.0, 2.1], "pt k=2": [1.0, 1.1], "pt k=4": [3.0, 3.1]}
    outcomes = results(tmp_path, figures)
    check = {"kind": "reaches", "metric": "eval/loss", "each": ["pt"], "within": 0.1}
    checked = claims.run(check, outcomes)
    assert [c.verdict for c in checked] == [AGREE, DISAGREE]
    assert checked[0].evidence.endswith("helps")
    assert not checked[1].evidence.endswith("helps")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"pt k=2": [1.0, 1.1], "pt k=4": [3.0, 3.1]}, AGREE),  # one of two
        ({"pt k=2": [3.0, 3.1], "pt k=4": [3.0, 3.1]}, DISAGREE),
        ({"pt k=2": [3.0, 3.1], "pt k=4": [2.2, 1.9]}, OPEN),
        ({"pt k=2": [None, 1.0], "pt k=4": [None, 1.0]}, DISAGREE),
    ],
)
def test_what_often_is_better(tmp_path, values, verdict):
    outcomes = results(tmp_path, {"pt k=1": [2.0, 2.1], **values})
    check = {"kind": "often", "metric": "eval/loss", "each": ["pt"]}
    assert verdicts(check, outcomes) == [verdict]


def test_a_claim_needs_all_of_its_checks(tmp_path):
    outcomes = results(tmp_path, {**CLEAR, "c": [1.0, 3.0, 2.0]})
    good = {"kind": "better", "metric": "eval/loss", "of": "a", "than": "b"}
    bad, open_ = {**good, "of": "b", "than": "a"}, {**good, "of": "c", "than": "a"}
    for checks, verdict in (([good], AGREE), ([good, open_], OPEN), ([good, open_, bad], DISAGREE)):
        claim = {"number": 1, "says": "so", "checks": checks}
        made = Study(**{**vars(outcomes.study), "claims": [claim]})
        (finding,) = claims.decide(made, outcomes.ended)
        assert finding.verdict == verdict
        assert len(finding.evidence) == len(checks)


def test_a_series_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MixflError, match="unknown series of the study made 'x'"):
        claims.run(
            {"kind": "above", "metric": "m", "of": "x", "limit": 1}, results(tmp_path, CLEAR)
        )
    with pytest.raises(MixflError, match="unknown kind of check 'nearly'"):
        claims.run({"kind": "nearly"}, results(tmp_path / "b", CLEAR))


def test_what_is_apart(tmp_path):
    outcomes = results(tmp_path, {**CLEAR, "c": [1.001, 1.099, 1.05]})
    check = {"kind": "apart", "metric": "eval/loss", "than": "a", "within": 0.1}
    assert verdicts({**check, "of": ["b", "c"]}, outcomes) == [AGREE, DISAGREE]


def test_a_margin_may_be_a_part_of_an_effect(tmp_path):
    """a is better than b by 1, c worse than a by 0.1: a tenth of the effect."""
    outcomes = results(tmp_path, {**CLEAR, "c": [1.1, 1.21, 1.15]})
    check = {"kind": "reaches", "metric": "eval/loss", "of": "c", "than": "a"}
    effect = {"of": "a", "than": "b"}
    for part_of_it, verdict in ((0.2, AGREE), (0.1, OPEN), (0.05, DISAGREE)):
        with_part = {**check, "part": part_of_it, "effect": effect}
        assert verdicts(with_part, outcomes) == [verdict]
        assert verdicts({**with_part, "kind": "close"}, outcomes) == [verdict]


def test_one_of_several_is_enough_and_shares_the_error(tmp_path):
    outcomes = results(tmp_path, {**CLEAR, "c": [1.001, 1.099, 1.05]})
    check = {"kind": "reaches", "metric": "eval/loss", "than": "a", "within": 0.1, "any": True}
    (checked,) = claims.run({**check, "of": ["b", "c"]}, outcomes)
    assert checked.verdict == AGREE
    assert "one is enough" in checked.evidence
    assert verdicts({**check, "of": ["b", "b"]}, outcomes) == [DISAGREE]
    (alone,) = claims.run({**check, "of": ["c"]}, outcomes)
    widths = [c.effect.high - c.effect.low for c in (checked, alone)]
    assert widths[0] > 1.3 * widths[1]


def test_several_are_compared_with_several(tmp_path):
    outcomes = results(tmp_path, {**CLEAR, "c": [3.0, 3.1, 3.05]})
    check = {"kind": "better", "metric": "eval/loss", "of": "a", "than": ["b", "c"]}
    assert verdicts(check, outcomes) == [AGREE, AGREE]


def test_series_with_different_numbers_of_trials_are_compared_by_shared_seeds(tmp_path):
    outcomes = results(tmp_path, {"a": [1.0, 1.1, 9.0], "b": [2.0, 2.101]})
    (checked,) = claims.run(
        {"kind": "better", "metric": "eval/loss", "of": "a", "than": "b"}, outcomes
    )
    assert (checked.verdict, checked.trials) == (AGREE, 2)


def test_a_diverged_trial_is_not_undone_by_more(tmp_path):
    figures = {"a": [None, 1.0], "b": [None, 1.0], "c": [1.0, 3.0], "d": [2.0, 2.5]}
    outcomes = results(tmp_path, figures)
    checks = [
        {"kind": "better", "metric": "eval/loss", "of": a, "than": b} for a, b in ("ab", "cd")
    ]
    for check, lacks in zip(checks, (set(), {"c", "d"}), strict=True):
        claim = {"number": 1, "says": "so", "checks": [check]}
        made = Study(**{**vars(outcomes.study), "claims": [claim]})
        assert claims.decide(made, outcomes.ended)[0].verdict == OPEN
        assert claims.undecided(made, outcomes.ended) == lacks


def test_only_the_pairs_that_are_not_decided_need_more_trials(tmp_path):
    figures = {
        "a": [1.0, 1.1, 1.05],
        "b": [2.0, 2.1, 2.05],
        "c": [1.0, 1.3, 1.0],
        "d": [9.0, 9.1, 9.0],
    }
    outcomes = results(tmp_path, figures)
    checks = [
        {"kind": "better", "metric": "eval/loss", "of": "a", "than": ["b", "c"]},
        {"kind": "better", "metric": "eval/loss", "of": "b", "than": "d"},
    ]
    claim = {"number": 1, "says": "so", "checks": checks}
    made = Study(**{**vars(outcomes.study), "claims": [claim]})
    (found,) = claims.decide(made, outcomes.ended)
    assert [line.rsplit(": ", 1)[1] for line in found.evidence] == [AGREE, OPEN, AGREE]
    assert claims.undecided(made, outcomes.ended) == {"a", "c"}


def test_the_effect_shown_is_that_of_the_check_that_decides(tmp_path):
    outcomes = results(tmp_path, {**CLEAR, "c": [1.5, 1.61, 1.54]})
    claim = {
        "number": 1, "says": "so",
        "checks": [{"kind": "better", "metric": "eval/loss", "of": "a", "than": ["b", "c"]}],
    }  # fmt: skip
    settings = [replace(s, departs=[f"rounds of {s.name}"]) for s in outcomes.study.settings]
    made = Study(**{**vars(outcomes.study), "claims": [claim], "settings": settings})
    (finding,) = claims.decide(made, outcomes.ended)
    assert finding.effect == "+0.5"
    assert finding.trials == "3"
    # Of the series that it compares alone.
    assert finding.setting == "other: rounds of a; rounds of b; rounds of c"
    claim["checks"][0]["than"] = "b"
    assert claims.decide(made, outcomes.ended)[0].setting == "other: rounds of a; rounds of b"
    made = Study(**{**vars(made), "settings": outcomes.study.settings})
    assert claims.decide(made, outcomes.ended)[0].setting == "the paper's"


@pytest.mark.parametrize("how", ["by formula", "counted"])
def test_arithmetic_is_marked(how, monkeypatch):
    from mixfl.measure import costs

    saved = [("pt", "communication", h, p) for h, p in (("by formula", 0.96), ("counted", 0.93))]
    monkeypatch.setattr(costs, "savings", lambda counted: saved)
    monkeypatch.setattr(Study, "costs", lambda self: None)
    check = {"kind": "saving", "what": "communication", "how": [how], "limit": 0.939}
    claim = {"number": 9, "says": "so", "checks": [check]}
    (finding,) = claims.decide(Study("m", "M", "", "movie", "movie", [], [], [claim]), {})
    expected = {"by formula": ("agree", "arithmetic"), "counted": ("disagree", "other")}[how]
    assert (finding.verdict, finding.setting.split(":")[0]) == expected
