"""Decides claims from the runs' metrics. A claim is a list of checks (checks.py).

A claim agrees if all of its checks agree, and disagrees if one disagrees. While it is not decided,
the series of its checks that are not decided get more trials, up to the study's last look. Metrics
are means over a part of the curve (`at`): `end`, the last fifth of the evaluations; `early`, the
first fifth; `curve`, all; `largest`, the maximum from round 10 on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mixfl.report.document import Finding
from mixfl.studies.checks import AGREE, DISAGREE, OPEN, Checked, apart, run
from mixfl.studies.results import Results
from mixfl.studies.study import Setting, Study
from mixfl.studies.trials import Done


class Judged(NamedTuple):
    finding: Finding
    lacks: frozenset[str]  # the series of which more trials could decide it


def decide(study: Study, ended: Mapping[str, Done]) -> list[Finding]:
    return [j.finding for j in judged(study, ended)]


def undecided(study: Study, ended: Mapping[str, Done]) -> set[str]:
    """The series that more trials could help to decide."""
    return {name for j in judged(study, ended) for name in j.lacks}


def judged(study: Study, ended: Mapping[str, Done]) -> list[Judged]:
    every = []
    for claim in study.claims:
        checked: list[Checked] = []
        asked, lacks = set(), set()
        for check in claim["checks"]:
            for one in apart(check):
                results = Results(study, ended)
                outcome = run(one, results)
                checked += outcome
                asked |= results.asked
                if any(c.verdict == OPEN for c in outcome):
                    lacks |= results.asked
        verdicts = [c.verdict for c in checked]
        verdict = AGREE
        if DISAGREE in verdicts:
            verdict = DISAGREE
        elif OPEN in verdicts:
            verdict = OPEN
        settled = any(c.verdict == OPEN and c.settled for c in checked)
        if verdict != OPEN or settled:
            lacks = set()
        of_it = [s for s in study.settings if s.name in asked]
        found = finding(study, claim, verdict, checked, of_it)
        own = {s.data for s in of_it}
        if own and all(own):  # series with a task of their own
            found = replace(found, data="; ".join(sorted(own)))
        every.append(Judged(found, frozenset(lacks)))
    return every


def finding(
    study: Study, claim, verdict: str, checked: Sequence[Checked], of_it: Sequence[Setting]
) -> Finding:
    """With the effect of the check that decides: of those with the claim's verdict, the one that is
    nearest to a limit."""
    deciding = min((c for c in checked if c.verdict == verdict), key=lambda c: c.slack)
    effect = deciding.effect
    return Finding(
        str(claim["number"]), claim["says"], study.data, verdict,
        [f"{c.evidence}: {c.verdict}" for c in checked],
        f"{effect.mean:+.3g}" if effect else "",
        f"[{effect.low:+.3g}, {effect.high:+.3g}]" if effect and effect.low < effect.high else "",
        str(deciding.trials or ""), setting(study, checked, of_it), study.version,
    )  # fmt: skip


def setting(study: Study, checked: Sequence[Checked], of_it: Sequence[Setting]) -> str:
    """Whether it is the paper's, for the series that the claim compares."""
    computed = {c.computed for c in checked}
    if computed == {"arithmetic"}:
        return "arithmetic"
    if computed == {"counted"}:
        return "the paper's" if study.real else "other: synthetic data"
    departs = dict.fromkeys(words for one in of_it for words in one.departs)
    return f"other: {'; '.join(departs)}" if departs else "the paper's"
