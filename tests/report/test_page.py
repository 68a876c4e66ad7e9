"""The report's page in a browser: it asks for nothing, its switches work, names stay text."""

import csv
import io
import json

import pytest
from browsing import browser  # noqa: F401 (a fixture)

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
)
from mixfl.report.page import page as written
from mixfl.report.style import COLORS, ON_DARK

HOSTILE = "<img src=x onerror=alert(1)><b>bold</b> %{x} </script><script>alert(1)</script>"


def rows(level, bytes=120):
    costs = {"comm/down_bytes": bytes, "comm/up_bytes": bytes, "time/round_ms": 50}
    return [
        {"round": 10 * i, "eval/loss": level / i, "eval/auc": 1 - level / (9 * i), **costs}
        for i in range(1, 6)
    ]


def a_document(word="word"):
    def series(algorithm, level, bytes=120):
        trials = [
            Trial(f"{algorithm}/{word}{k}", {"algorithm": algorithm, "seed": k, "note": word},
                  f"mixfl run {word}", rows(level + k / 10, bytes))
            for k in range(3)
        ]  # fmt: skip
        return Series(f"{algorithm} {word}", algorithm, trials)

    several = [series("pt", 1.0), series("2wgt", 2.0), series("oracle", 3.0, 0)]
    points = [Point(0.1, 0.5, 0.4, 0.6), Point(1, 0.7, 0.6, 0.8), Point(10, None, note=word)]
    parts = [
        Curves(f"Curves {word}", ["eval/loss", "eval/auc"], several),
        Sweep("Sweep", word, "eval/loss", [Line(word, "pt", points)]),
        Table("Table", ["a", word], [[word, "1.0 ± 0.1"]]),
    ]
    findings = [Finding("1", word, "smile", v, [word]) for v in ("agree", "not decided")]
    return Document(f"Report {word}", [("fact", word)], findings, [Section("Section", parts)])


@pytest.fixture
def opened(browser, tmp_path):  # noqa: F811
    """Opens a page; at the end, nothing may have been complained of or asked for."""
    contexts, complaints = [], []

    def open_page(document=None, width=1200, **more):
        file = tmp_path / "report.html"
        file.write_text(written(document or a_document()))
        context = browser.new_context(viewport={"width": width, "height": 900}, **more)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: complaints.append(m.text))
        tab.on("pageerror", lambda e: complaints.append(str(e)))
        tab.on("dialog", lambda d: (complaints.append(d.message), d.dismiss()))
        tab.on(
            "request",
            lambda r: (
                r.url == file.as_uri()
                or r.url.startswith(("data:", "blob:"))
                or complaints.append(r.url)
            ),
        )
        tab.goto(file.as_uri())
        for figure in tab.locator("figure").all():
            figure.scroll_into_view_if_needed()
            figure.locator(".main-svg").first.wait_for()
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def plot(tab, figure=0):
    """What Plotly has: per line its name, x, y, whether it is seen, and color; and the layout."""
    return tab.evaluate(
        """(k) => {
          const area = document.querySelectorAll(".chart")[k];
          const lines = area.data.filter((t) => t.text).map((t) => ({
            name: t.name, x: [...t.x], y: [...t.y], visible: t.visible, color: t.line.color }));
          const { xaxis, yaxis } = area._fullLayout;
          const bands = area.data.filter((t) => t.fill === "toself").length;
          return { lines, bands, y: yaxis.type, x: xaxis.type, width: area.layout.width };
        }""",
        figure,
    )


def hover(tab):
    """What is shown when the mouse is on the first panel."""
    chart = tab.locator(".chart").first
    chart.locator(".nsewdrag").first.hover()
    chart.locator(".nsewdrag").first.hover(position={"x": 90, "y": 90})  # a mouse that moves
    chart.locator(".hoverlayer text").first.wait_for()
    return chart.locator(".hoverlayer").text_content()


def test_curves_are_drawn_and_the_legend_hides_an_algorithm(opened):
    tab = opened()
    chart = plot(tab)
    assert [line["name"] for line in chart["lines"]] == ["pt word", "2wgt word", "oracle word"] * 2
    assert chart["lines"][0]["y"] == pytest.approx([1.1 / i for i in range(1, 6)], rel=1e-5)
    assert chart["bands"] == 6
    drawn = tab.locator(".chart").first.locator(".scatterlayer .trace path.js-line")
    before = drawn.count()
    legend = tab.locator("figure").first.locator(".legend")
    legend.get_by_role("button", name="2wgt").click()
    hidden = [line["name"] for line in plot(tab)["lines"] if line["visible"] == "legendonly"]
    assert hidden == ["2wgt word"] * 2
    assert drawn.count() == before - 4  # a line and a band in each of two panels
    legend.get_by_role("button", name="2wgt").click()
    assert drawn.count() == before


def test_x_and_log_can_be_switched(opened):
    tab = opened()
    figure = tab.locator("figure").first
    assert (plot(tab)["y"], plot(tab)["lines"][0]["x"]) == ("linear", [10, 20, 30, 40, 50])
    figure.get_by_text("bytes", exact=True).click()
    chart = plot(tab)
    assert chart["lines"][0]["x"] == [2400, 4800, 7200, 9600, 12000]
    assert {line["name"] for line in chart["lines"]} == {"pt word", "2wgt word"}
    assert "oracle word" in figure.locator("p.remarks").inner_text()
    figure.get_by_text("seconds", exact=True).click()
    assert plot(tab)["lines"][0]["x"] == pytest.approx([0.5, 1, 1.5, 2, 2.5])
    figure.get_by_role("button", name="log y").click()
    assert plot(tab)["y"] == "log"
    figure.get_by_role("button", name="log y").click()
    assert plot(tab)["y"] == "linear"


def test_hovering_shows_values(opened):
    tab = opened()
    said = hover(tab)
    assert "2wgt word" in said
    assert " to " in said


def test_a_sweep_has_a_log_axis_and_marks_what_diverged(opened):
    tab = opened()
    chart = plot(tab, 1)
    assert chart["x"] == "log"
    assert chart["lines"][0]["x"] == [0.1, 1]
    assert tab.locator(".chart").nth(1).locator(".annotation", has_text="✕").count() == 1
    assert "word = 10: word" in tab.locator("figure").nth(1).locator("ul.remarks").inner_text()


def test_names_stay_text(opened):
    tab = opened(a_document(HOSTILE))
    tab.locator("#all-runs > summary").click()
    tab.locator("#all-runs details summary").first.click()
    assert HOSTILE in tab.locator("pre.config").first.inner_text().replace('\\"', '"')
    assert tab.locator("pre.command").first.inner_text() == f"mixfl run {HOSTILE}"
    assert tab.locator("h1").inner_text() == f"Report {HOSTILE}"
    assert tab.locator(".legend button").first.inner_text() == f"pt {HOSTILE}"
    assert tab.evaluate("document.querySelectorAll('img, b, .chart a').length") == 0
    axis = tab.locator(".chart").nth(1).locator(".xtitle")
    assert axis.text_content() == HOSTILE
    assert HOSTILE in hover(tab)


def test_dark_by_the_system_and_by_the_button(opened):
    ground = "getComputedStyle(document.body).backgroundColor"
    tab = opened(color_scheme="dark")
    dark = tab.evaluate(ground)
    assert dark != "rgb(255, 255, 255)"
    assert plot(tab)["lines"][2]["color"] == ON_DARK["oracle"]
    tab.get_by_role("button", name="Switch to light").click()
    assert tab.evaluate(ground) == "rgb(255, 255, 255)"
    assert plot(tab)["lines"][2]["color"] == COLORS["oracle"]
    tab.reload()  # it is kept
    assert tab.evaluate(ground) == "rgb(255, 255, 255)"
    tab = opened()
    assert tab.evaluate(ground) == "rgb(255, 255, 255)"
    tab.get_by_role("button", name="Switch to dark").click()
    assert tab.evaluate(ground) == dark


@pytest.mark.parametrize("word", ["word", "a" * 200])
def test_a_phone_need_not_scroll_sideways(opened, word):
    tab = opened(a_document(word), width=360, is_mobile=True, has_touch=True)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert plot(tab)["width"] <= 360
    tab.locator("#all-runs > summary").click()
    tab.locator("#all-runs details summary").first.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def test_paper_is_light_and_has_the_evidence(opened):
    tab = opened(color_scheme="dark")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert plot(tab)["lines"][2]["color"] == COLORS["oracle"]
    assert tab.locator(".verdicts details[open]").count() == 2
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert plot(tab)["lines"][2]["color"] == ON_DARK["oracle"]
    assert tab.locator(".verdicts details[open]").count() == 0
    assert tab.pdf(format="A4").startswith(b"%PDF")


def saved(tab, button):
    with tab.expect_download() as download:
        button.click()
    return download.value.suggested_filename, download.value.path().read_bytes()


def test_data_and_figures_can_be_saved(opened):
    tab = opened(a_document('a,"b"'))
    name, content = saved(tab, tab.locator("#csv"))
    assert name == "Report-a-b.csv"
    rows = list(csv.DictReader(io.StringIO(content.decode(), newline="")))
    assert len(rows) == 9 * 5
    assert rows[0]["run"] == 'pt/a,"b"0'
    assert (rows[1]["round"], float(rows[1]["eval/loss"])) == ("20", 0.5)
    name, content = saved(tab, tab.locator("#json"))
    assert name == "Report-a-b.json"
    assert json.loads(content)["runs"][0]["metrics"]["round"] == [10, 20, 30, 40, 50]
    for k in range(2):
        figure = tab.locator("figure").nth(k)
        name, content = saved(tab, figure.get_by_role("button", name="SVG"))
        assert name.endswith(".svg")
        assert content.startswith(b"<svg")
        assert b'a,"b"' in content  # the legend is in it
        name, content = saved(tab, figure.get_by_role("button", name="PNG"))
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20]) == 2000
