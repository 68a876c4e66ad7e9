"""The page of `mixfl watch` in a browser, with runs that grow, stop, go on and die."""

import contextlib
import signal
import subprocess
import sys

import pytest
import slow_problem
from browsing import browser  # noqa: F401 (a fixture)
from playwright.sync_api import expect
from watched import a_run, add_rows, served

from mixfl.runs.folder import locked

PATIENCE = 180_000  # ms, on a machine that has other work
HOSTILE = "<img src=x onerror=alert(1)> %{x}"


@pytest.fixture
def opened(browser):  # noqa: F811
    """Watches a folder and opens its page. At the end, nothing may have been complained of or asked
    elsewhere."""
    complaints: list = []

    def open_page(folder, width=1200, ready=True, **more):
        server = stack.enter_context(served(folder))
        context = browser.new_context(viewport={"width": width, "height": 900}, **more)
        stack.callback(context.close)
        tab = context.new_page()
        tab.set_default_timeout(PATIENCE)
        tab.on("console", lambda m: complaints.append(m.text))
        tab.on("pageerror", lambda e: complaints.append(str(e)))
        tab.on("dialog", lambda d: (complaints.append(d.message), d.dismiss()))
        own = "http://{}:{}/".format(*server.server_address)
        tab.on("request", lambda r: r.url.startswith(own) or complaints.append(r.url))
        tab.goto(server.address)
        if ready:
            tab.locator(".rows .row").first.wait_for()
        return tab

    expect.set_options(timeout=PATIENCE)
    open_page.complaints = complaints
    with contextlib.ExitStack() as stack:
        yield open_page
    assert complaints == []


def row(tab, name):
    return tab.locator(f'.rows .row[data-run="{name}"]')


def state(tab, name, expected):
    expect(row(tab, name).locator(".badge")).to_have_text(expected)


def points(tab, line=0):
    """Rounds of a line, as Plotly has them."""
    return tab.evaluate(
        "(k) => [...(document.querySelector('.chart').data.filter((t) => t.text)[k]?.x || [])]",
        line,
    )


def until(tab, condition):
    for _ in range(PATIENCE // 100):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(100)
    pytest.fail(f"never true: {condition}")


LAST = "document.querySelector('.chart').data?.filter((t) => t.text)[0]?.x.at(-1)"


@pytest.fixture
def process(tmp_path):
    """Starts `mixfl run`, a run that would take long, in a process of its own."""
    started = []

    def start(out, rounds, *more):
        words = ["run", f"{slow_problem.__file__}:problem", "--algorithm", "fedavg", "--rounds",
                 str(rounds), "--set", "devices=1", "--out", str(out), *more]  # fmt: skip
        code = "from mixfl.cli import main; main()"
        begun = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        started.append(begun)
        return begun

    yield start
    for begun in started:
        begun.kill()
        begun.wait()


def test_a_run_grows_is_stopped_goes_on_dies_and_finishes(opened, process, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    tab = opened(runs, ready=False)
    expect(tab.locator("#empty")).to_be_visible()
    first = process(runs / "mine", 400)
    state(tab, "mine", "▶running")
    until(tab, f"{LAST} >= 3")
    seen = points(tab)[-1]
    until(tab, f"{LAST} > {seen}")  # it grows
    expect(row(tab, "mine").locator(".left")).not_to_have_text("")
    row(tab, "mine").locator(".name button").click()
    details = tab.locator("#details")
    expect(details.locator(".progress")).to_contain_text("left")
    expect(details.locator(".log")).to_contain_text(f"begins: process {first.pid}")

    details.get_by_role("button", name="Stop and save").click()
    assert first.poll() is None  # it asks first, and goes on asking while the run grows
    progress = details.locator(".progress").inner_text()
    expect(details.locator(".progress")).not_to_have_text(progress)
    details.get_by_role("button", name="Really stop?").click()
    assert first.wait(PATIENCE) == 130
    state(tab, "mine", "■stopped")
    expect(details.locator(".log")).to_contain_text("stopped on request after round")
    expect(details.locator("pre.command")).to_contain_text("--resume")
    stopped = points(tab)[-1]

    second = process(runs / "mine", 400, "--resume")
    state(tab, "mine", "▶running")
    expect(details.locator(".log")).to_contain_text("goes on from round")
    until(tab, f"{LAST} > {stopped}")
    second.kill()
    second.wait()
    state(tab, "mine", "✕died")
    expect(details.locator(".message")).to_contain_text("ended without a word")

    stopped = points(tab)[-1]
    third = process(runs / "mine", 400, "--resume")
    state(tab, "mine", "▶running")
    until(tab, f"{LAST} > {stopped}")
    third.send_signal(signal.SIGTERM)
    assert third.wait(PATIENCE) == 130
    state(tab, "mine", "■stopped")


def test_a_run_that_finishes(opened, process, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    tab = opened(runs, ready=False)
    process(runs / "short", 3)
    state(tab, "short", "✓finished")
    until(tab, f"{LAST} === 3")
    assert points(tab) == [1, 2, 3]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """500 runs of a sweep, one of which is running."""
    folder = tmp_path_factory.mktemp("many")
    for i in range(500):
        over = {"status": "finished", "round": 50} if i % 5 else {"status": "failed", "round": 9}
        keys = {"seed": i % 10, "client_lr": [0.1, 0.3, 1.0][i % 3]}
        a_run(folder / f"sweep/run{i:03d}", over if i != 250 else {"status": "running"}, **keys)
    with locked(folder / "sweep/run250"):
        yield folder


def test_500_runs(opened, many):
    tab = opened(many)
    expect(tab.locator("#count")).to_contain_text("500 runs; 8 in the chart")
    assert tab.locator(".rows .row").count() < 60
    expect(tab.locator(".legend")).to_contain_text("run250")  # what runs is shown first
    tab.get_by_role("button", name="run", exact=True).click()
    expect(tab.locator(".rows .row").first).to_be_visible()
    rows = tab.locator(".rows")
    rows.evaluate("(e) => { e.scrollTop = e.scrollHeight; }")
    row(tab, "sweep/run499").wait_for()
    assert tab.locator(".rows .row").count() < 60
    tab.locator("#filter").fill("client_lr=0.3 seed=7")
    expect(tab.locator("#count")).to_contain_text("17 of 500 runs")
    tab.locator("#filter").fill("")
    tab.get_by_role("button", name="failed").click()
    expect(tab.locator("#count")).to_contain_text("99 of 500 runs")
    add_rows(many / "sweep/run250", 6, 9)
    until(tab, "document.querySelector('.chart').data.some((t) => t.x?.at(-1) === 9)")


def test_runs_are_ticked_compared_and_shown_on_a_log_axis(opened, tmp_path):
    for k, lr in enumerate((0.1, 0.3)):
        over = {"status": "finished", "round": 50}
        a_run(tmp_path / f"run{k}", over, client_lr=lr, seed=k, devices=k)
    tab = opened(tmp_path)
    differences = tab.locator("#differences")
    expect(differences.locator("summary")).to_contain_text("2 shown runs: seed, client_lr")
    differences.locator("summary").click()
    assert [t.split() for t in differences.locator("tbody tr").all_inner_texts()] in (
        [["run0", "0", "0.1"], ["run1", "1", "0.3"]],
        [["run1", "1", "0.3"], ["run0", "0", "0.1"]],
    )
    row(tab, "run0").locator("input").uncheck()
    expect(tab.locator(".legend button")).to_have_count(1)
    expect(differences).to_be_hidden()
    tab.locator("#log").click()
    until(tab, "document.querySelector('.chart').layout.yaxis.type === 'log'")
    tab.locator("#more").select_option("time/round_ms")
    until(tab, "document.querySelector('.chart').layout.yaxis3")
    row(tab, "run1").locator(".name button").click()
    marked = tab.locator("#details tr.differs td:first-child")
    expect(marked).to_have_text(["seed", "client_lr"])
    tab.keyboard.press("Escape")
    expect(tab.locator("#details")).to_be_hidden()


def test_a_run_that_explodes_does_not_hide_the_others(opened, tmp_path):
    for k in range(3):
        a_run(tmp_path / f"good{k}", {"status": "finished", "round": 5})
    bad = a_run(tmp_path / "bad", {"status": "diverged", "round": 5}, rows=0)
    (bad / "metrics.jsonl").write_text('{"round": 1, "eval/loss": 1e29}\n')
    tab = opened(tmp_path)
    until(tab, "document.querySelector('.chart').layout?.yaxis.range[1] === 1.5")
    expect(tab.locator(".chart .annotation").filter(has_text="beyond: bad")).to_be_visible()


def test_names_stay_text(opened, tmp_path):
    path = a_run(tmp_path / HOSTILE.replace("/", ""), {"status": "failed", "message": HOSTILE},
                 client_opt=HOSTILE)  # fmt: skip
    (path / "log.jsonl").write_text('{"time": 0, "kind": "note", "text": "<b>bold</b>"}\n')
    tab = opened(tmp_path)
    tab.locator(".rows .row .name button").click()
    expect(tab.locator("#details .message")).to_have_text(HOSTILE)
    expect(tab.locator("#details .log")).to_contain_text("<b>bold</b>")
    assert (
        tab.evaluate("document.querySelectorAll('main img, aside img, main b, aside b').length")
        == 0
    )


def test_phone_and_dark(opened, many):
    tab = opened(many, width=360, is_mobile=True, has_touch=True, color_scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert tab.locator(".rows .row").count() < 60
    tab.evaluate("scrollTo(0, document.body.scrollHeight)")
    expect(tab.locator(".rows .row").last).to_be_visible()
    tab.locator(".rows .row .name button").last.click()
    expect(tab.locator("#details h3").first).to_be_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_server_that_ends_is_noticed(opened, tmp_path):
    a_run(tmp_path / "run", {"status": "finished"})
    tab = opened(tmp_path)
    expect(tab.locator("#live")).to_have_text("live")
    tab.route("**/api/**", lambda route: route.fulfill(status=403, body="no"))
    expect(tab.locator("#live")).to_have_text("no")
    tab.unroute("**/api/**")
    tab.route("**/api/**", lambda route: route.abort())
    expect(tab.locator("#live")).to_have_text("not connected")
    tab.unroute("**/api/**")
    expect(tab.locator("#live")).to_have_text("live")
    assert {c.partition(":")[0] for c in opened.complaints} == {"Failed to load resource"}
    opened.complaints.clear()
