"""Reports of runs: intervals, grouping, damaged folders, and that names never become markup."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mixfl.errors import MixflError
from mixfl.report.document import (
    Curves,
    Document,
    Finding,
    Line,
    Point,
    Section,
    Series,
    Sweep,
    Table,
    Trial,
)  # fmt: skip
from mixfl.report.from_runs import curves, document
from mixfl.report.markdown import markdown, plain
from mixfl.report.means import cap, final, mean
from mixfl.report.page import page
from mixfl.report.page.render import render
from mixfl.report.style import COLORS, ON_DARK, styles

HOSTILE = "</script><script>alert(1)</script><b onclick='x()'>`|&amp;\u2028{{data}}"


def rows(losses, every=10, **more):
    return [{"round": every * (i + 1), "eval/loss": v, **more} for i, v in enumerate(losses)]


def series(*losses, name="a", algorithm="pt", **more):
    trials = [Trial(f"t{k}", {}, "", rows(v, **more)) for k, v in enumerate(losses)]
    return Series(name, algorithm, trials)


def write_run(path, algorithm="pt", seed=0, losses=(1.0, 0.5), status="finished", **keys):
    path.mkdir(parents=True)
    config = {"task": "smile", "algorithm": algorithm, "seed": seed, **keys}
    lines = [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in config.items()]
    (path / "config.toml").write_text("\n".join(lines))
    content = "".join(json.dumps(row) + "\n" for row in rows(losses))
    (path / "metrics.jsonl").write_text(content)
    (path / "status.json").write_text(json.dumps({"status": status, "round": 12}))
    return path


def shown(text):
    """What the page's script reads."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


# Numbers


def test_the_band_is_students_interval_of_the_trials():
    trials = np.random.default_rng(0).normal(size=(4, 3))
    average = mean(series(*trials), "eval/loss")
    for i, column in enumerate(trials.T):
        low, high = stats.t.interval(0.95, 3, column.mean(), stats.sem(column))
        got = (average.mean[i], average.low[i], average.high[i])
        assert got == pytest.approx((column.mean(), low, high))
    assert mean(series(trials[0]), "eval/loss").low == []


def test_a_mean_is_over_the_rounds_that_all_trials_have():
    average = mean(series([1, 2, 3], [3, 4], []), "eval/loss")
    assert (average.rounds, average.mean) == ([10, 20], [2, 3])
    assert mean(series([]), "eval/loss") is None
    odd = [{"round": 1, "x": v} for v in (None, "1", True, float("nan"), [1], 10**400)]
    assert mean(Series("a", "pt", [Trial("t", {}, "", odd)]), "x") is None


def test_bytes_and_seconds_add_up_over_the_rounds_between_rows():
    costs = {"comm/down_bytes": 100, "comm/up_bytes": 20, "time/round_ms": 50}
    given = rows([1, 1, 1], **costs)
    given[1]["time/round_ms"] = None  # as in the row before
    given[2] |= {"comm/up_bytes": 0, "time/round_ms": 100}
    average = mean(Series("a", "pt", [Trial("t", {}, "", given)]), "eval/loss")
    assert average.bytes == [1200, 2400, 3400]
    assert average.seconds == pytest.approx([0.5, 1.0, 2.0])
    assert mean(series([1, 2]), "eval/loss").bytes == []


def test_final_values_say_how_trials_ended():
    assert final(series([2.0, 1.0]), "eval/loss") == "1.0000"
    assert final(series([1.0], [2.0]), "eval/loss") == "1.5000 ± 6.3531"
    assert final(series([]), "eval/loss") == "-"
    begun = Trial("t", {}, "", rows([9.0]), "running")
    ended = Trial("u", {}, "", rows([1.0]))
    bad = Trial("v", {}, "", rows([1.0]), "diverged at round 12")
    assert final(Series("a", "pt", [begun, ended]), "eval/loss") == "1.0000 (1 of 2 trials)"
    assert final(Series("a", "pt", [begun]), "eval/loss") == "9.0000 (unfinished)"
    said = final(Series("a", "pt", [ended, bad]), "eval/loss")
    assert said == "diverged at round 12 (1 of 2 trials)"


def test_only_a_loss_far_above_the_others_is_cut_off():
    means = [mean(series([0.9, v]), "eval/loss") for v in (0.2, 0.3, 5.0)]
    limit, words = cap("eval/loss", ["a", "b", "c"], means)
    assert limit == pytest.approx(1.2 * 0.9)
    assert words == "off the scale: c, 5.00 at the end"
    means[2] = mean(series([0.9, 9e23]), "eval/loss")
    _, words = cap("eval/loss", ["a", "b", "c" * 90], means)
    assert words == f"off the scale: {'c' * 36}…, 9.0e+23 at the end"
    assert cap("eval/loss", ["a", "b"], means[:2]) is None
    assert cap("eval/auc", ["a", "b", "c"], means) is None


def test_lines_of_one_algorithm_can_be_told_apart():
    assert COLORS.keys() == ON_DARK.keys()
    (one,) = styles(["1wgt"])
    assert (one.light, one.marker) == (COLORS["1wgt"], "")
    several = styles(["oracle"] * 4 + ["pt"])
    for kind in ("light", "dark"):
        looks = [(getattr(s, kind), s.dashes, s.marker) for s in several]
        assert len(set(looks)) == 5
    assert len({s.dashes for s in several[:4]}) == len({s.marker for s in several[:4]}) == 4
    assert several[4].light == COLORS["pt"]


# Pages


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        self.text += data


def everything(word):
    """A document with this word wherever a word can be."""
    trials = [
        Trial(f"{word}{k}", {word: word, "algorithm": word, "nan": float("nan")}, word,
              [{"round": 1, word: 1.0 + k}, {"round": 2, word: 2.0 + k}], word)
        for k in range(2)
    ]  # fmt: skip
    line = Line(word, word, [Point(1, 2.0, 1.0, 3.0, word), Point(2, None)])
    parts = [
        Curves(word, [word], [Series(word, word, trials)], word, word),
        Sweep(word, word, word, [line], word, word),
        Table(word, [word, word], [[word, word]], word, word),
    ]
    finding = Finding(word, word, word, word, [word])
    return Document(word, [(word, word)], [finding], [Section(word, parts, word)], [word])


def test_nothing_given_becomes_markup():
    harmless, hostile = Tags(page(everything("word"))), Tags(page(everything(HOSTILE)))
    assert hostile.tags == harmless.tags
    assert hostile.attributes == harmless.attributes
    assert HOSTILE in hostile.text
    data = shown(page(everything(HOSTILE)))
    assert data["title"] == data["figures"][0]["lines"][0]["name"] == HOSTILE
    assert data["runs"][0]["command"] == HOSTILE
    assert data["runs"][0]["metrics"][HOSTILE] == [1, 2]


def test_nothing_given_becomes_markup_in_a_diagnosis():
    def diagnosis(word):
        return render(
            "diagnosis.html.j2", name=word, verdict=word, target=word, picture="AAAA",
            rows=[(word,) * 4], sections=[(word, [word])],
        )  # fmt: skip

    harmless, hostile = Tags(diagnosis("word")), Tags(diagnosis(HOSTILE))
    assert hostile.tags == harmless.tags
    assert hostile.attributes == harmless.attributes
    assert hostile.text.count(HOSTILE) == 10


def test_the_page_asks_for_nothing():
    text = page(everything("word"))
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\';' in text
    own = text.replace((Path(page.__code__.co_filename).parent / "vendor" /
                        "plotly-basic.min.js").read_text(), "")  # fmt: skip
    assert not re.search(r"<(link|img|iframe|script)[^>]+(src|href)=\"(?!data:)", own)
    assert re.findall(r"https?://[^\"' ]+", own) == ["http://www.w3.org/2000/svg"]  # a name only
    assert "fetch(" not in own
    assert "innerHTML =" not in own


def test_a_large_document_is_below_5_mb():
    rng = np.random.default_rng(0)
    metrics = [f"eval/part{k}/loss" for k in range(12)]

    def trial(s, k, n):
        values = rng.normal(size=(n, 12))
        rows = [{"round": i, **dict(zip(metrics, v, strict=True))} for i, v in enumerate(values)]
        return Trial(f"runs/{s}/seed{k}", {f"key{i}": i for i in range(40)}, "mixfl run", rows)

    def size(n):
        several = [Series(f"s{s}", "pt", [trial(s, k, n) for k in range(3)]) for s in range(50)]
        text = page(Document("", [], [], [Section("", [Curves("", metrics, several)])]))
        last = shown(text)["runs"][0]["metrics"]["round"][-1]
        assert last == n - 1  # whatever is thinned, the end is there
        return len(text.encode())

    assert size(40) < 5e6
    assert size(200) < 5e6


def test_names_that_are_not_unicode_can_be_written():
    for written in (page, markdown):
        assert "a?b" in written(everything("a\udcffb")).encode().decode()


def test_markdown_shows_names_as_they_are():
    assert plain("a|b `c` <d> *e* [f](g)\nh") == r"a\|b \`c\` &lt;d&gt; \*e\* \[f\](g) h"
    assert plain("- x") == r"\- x"
    text = markdown(everything(HOSTILE))
    assert "<" not in text
    assert not re.search(r"(?<!\\)`", text)
    from markdown_it import MarkdownIt  # comes with rich

    kinds = [
        [token.type for token in MarkdownIt("commonmark").enable("table").parse(markdown(d))]
        for d in (everything("word"), everything(HOSTILE))
    ]
    assert kinds[0] == kinds[1]


def test_markdown_has_the_verdicts_and_the_numbers():
    line = Line("PT", "pt", [Point(0.1, 0.5, 0.4, 0.6), Point(1, None, note="2 of 3 diverged")])
    parts = [
        Curves("Loss", ["eval/loss"], [series([2.0, 1.0], [2.0, 3.0], name="PT")]),
        Sweep("Rates", "client_lr", "eval/auc", [line]),
    ]
    finding = Finding("3", "PT is best.", "smile", "disagree", ["2wgt 0.9, pt 0.8"])
    text = markdown(Document("T", [("scale", "quick")], [finding], [Section("S", parts)]))
    for part in (
        "| 3 | PT is best. | smile | disagree |", "2wgt 0.9, pt 0.8", "| PT | 2.0000 ± 12.7062 |",
        "| 0.1 | 0.5000 ± 0.1000 |", "| 1 | 2 of 3 diverged |", "scale: quick",
    ):  # fmt: skip
        assert part in text


# From folders


def test_runs_are_grouped_by_all_but_the_seed(tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path / f"pt{seed}", seed=seed, losses=(1.0, seed), devices=seed)
        write_run(tmp_path / f"w{seed}", "1wgt", seed, central_batch=25, client_lr=0.1)
    write_run(tmp_path / "w9", "1wgt", 9, central_batch=100, client_lr=0.1)
    write_run(tmp_path / "w10", "1wgt", 9, client_lr=0.1)
    write_run(tmp_path / "other", data="/data/celeba")
    first, second = document([tmp_path]).sections
    assert {first.title, second.title} == {"smile", "smile, /data/celeba"}
    section = first if first.title == "smile" else second
    counts = {s.name: len(s.trials) for s in section.parts[0].series}
    name = "1-way Gradient Transfer, central_batch ="
    assert counts == {"Parallel Training": 3, f"{name} 25": 3, f"{name} 100": 1, f"{name} unset": 1}
    table = section.parts[-1]
    assert table.rows[0][:2] == ["Parallel Training", "1.0000 ± 2.4841"]


def test_a_run_that_is_there_twice_counts_once(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    report = document([tmp_path, tmp_path / "a"])
    assert len(report.trials()) == 1
    assert len(report.notes) == 1
    assert "same configuration and seed" in report.notes[0]


def test_unfinished_diverged_and_damaged_runs_are_reported(tmp_path):
    write_run(tmp_path / "good")
    write_run(tmp_path / "bad", seed=1, status="diverged")
    write_run(tmp_path / "begun", seed=2, losses=(), status="running")
    torn = write_run(tmp_path / "torn", seed=3)
    (torn / "status.json").write_text("{")
    (torn / "metrics.jsonl").write_bytes(b'{"round": 10, "eval/loss": 1.0}\n\xff\xfe\n{"rou')
    (write_run(tmp_path / "broken", seed=4) / "config.toml").write_text("task = ")
    (write_run(tmp_path / "nameless", seed=5) / "config.toml").write_text("x = 1")
    report = document([tmp_path])
    states = {Path(t.name).name: t.status for t in report.trials()}
    assert states == {
        "good": "finished", "bad": "diverged at round 12", "begun": "running", "torn": "unknown"
    }  # fmt: skip
    named = [("broken" in n, "nameless" in n) for n in report.notes]
    assert named == [(True, False), (False, True)]
    assert "diverged at round 12" in page(report)
    assert "diverged at round 12" in markdown(report)


def test_folders_without_runs_are_an_error(tmp_path):
    with pytest.raises(MixflError, match="holds no run"):
        document([tmp_path])
    with pytest.raises(MixflError, match="does not exist"):
        document([tmp_path / "x"])
    (tmp_path / "config.toml").write_text("[")
    with pytest.raises(MixflError, match="no run can be read"):
        document([tmp_path])
    with pytest.raises(MixflError, match="is a file"):
        document([tmp_path / "config.toml"])


def test_commands_can_be_pasted(tmp_path):
    write_run(tmp_path / "a $(b); 'c'")
    (trial,) = document([tmp_path]).trials()
    code = "import sys; print(sys.argv[3])"
    echo = trial.command.replace("mixfl", f"{sys.executable} -c '{code}'", 1)
    said = subprocess.run(["sh", "-c", echo], capture_output=True, text=True).stdout
    assert said.strip() == str(tmp_path / "a $(b); 'c'" / "config.toml")


def test_curves_of_a_metric(tmp_path):
    write_run(tmp_path / "a")
    assert curves([tmp_path]).metrics == ["eval/loss"]
    with pytest.raises(MixflError, match="Did you mean 'eval/loss'"):
        curves([tmp_path], ["eval/lss"])
    write_run(tmp_path / "b", data="elsewhere")
    with pytest.raises(MixflError, match="one task"):
        curves([tmp_path])


# Commands

PROGRAM = """
import sys
from mixfl.cli import main
try:
    main()
finally:
    print("loaded", sorted({"jax", "matplotlib"} & set(sys.modules)), file=sys.stderr)
"""


def mixfl(*words, cwd):
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_report_command(tmp_path):
    write_run(tmp_path / "runs/a")
    done = mixfl("report", "runs", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Report: runs/report.html\n")
    assert "loaded []" in done.stderr
    assert shown((tmp_path / "runs/report.html").read_text())["runs"][0]["name"] == "runs/a"
    done = mixfl("report", "runs", "--format", "md", cwd=tmp_path)
    assert done.stdout.startswith("# Runs of smile\n")
    assert mixfl("report", "runs", "--out", "new/r.md", cwd=tmp_path).returncode == 0
    assert (tmp_path / "new/r.md").read_text() == done.stdout


def test_plot_command(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"runs/a{seed}", seed=seed, losses=(1.0 + seed, 0.5))
    begins = {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}
    for ending, magic in begins.items():
        out = tmp_path / f"p.{ending}"
        done = mixfl("plot", "runs", "--out", out, cwd=tmp_path)
        assert done.returncode == 0
        assert "loaded ['matplotlib']" in done.stderr
        assert out.read_bytes().startswith(magic)
    svg = (tmp_path / "p.svg").read_text()
    assert "Parallel Training" in svg
    assert 'id="FillBetweenPolyCollection_1"' in svg  # the band


BAD = {
    "report nowhere": "does not exist", "report empty": "holds no run",
    "report runs --out empty": "is a folder", "report runs --format pdf": "--format",
    "report": "DIR", "report runs --out runs/a/config.toml/x": "can't be written",
    "plot runs": "--out", "plot runs --out x.gif": ".pdf, .svg, .png",
    "plot runs --out x.png --metric eval/lss": "Did you mean 'eval/loss'",
    "plot begun --out x.png": "no metrics",
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_mistakes_get_a_message(words, tmp_path):
    write_run(tmp_path / "runs/a")
    write_run(tmp_path / "begun/a", losses=())
    (tmp_path / "empty").mkdir()
    done = mixfl(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert BAD[words] in done.stderr
    assert "Traceback" not in done.stderr


def test_the_report_of_private_runs_says_what_was_spent(tmp_path):
    spent = [{"privacy/epsilon": e, "privacy/delta": 1e-6} for e in (1.5, 2.25)]
    keys = dict(dp_noise_multiplier=1.25, dp_clip="adaptive", dp_sampling="poisson")
    for name, more in (("a", {}), ("b", {"dp_seed": 3, "dp_scale": 200})):
        write_run(tmp_path / name, seed=0, **keys, **more)
        kept = [row | one for row, one in zip(rows((1.0, 0.5)), spent, strict=True)]
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    (section,) = document([tmp_path]).sections
    *_, chart, table, _ = section.parts
    assert chart.metrics == ["privacy/epsilon"]
    assert mean(chart.series[0], "privacy/epsilon").mean == [1.5, 2.25]
    assert [row[1:6] for row in table.rows] == [
        ["2.25", "1e-06", "1.25", "adaptive", "poisson"]
    ] * 2
    remarks = sorted(row[6] for row in table.rows)
    assert remarks == [
        "", "NOT PRIVATE: the noise comes from dp_seed, simulates 200 times the clients"
    ]  # fmt: skip
    write_run(tmp_path / "plain")
    (section,) = document([tmp_path / "plain"]).sections
    assert not any("rivacy" in part.title for part in section.parts)
