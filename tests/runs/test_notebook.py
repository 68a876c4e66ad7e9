"""Training in a notebook: progress and curves in the cell, results that show themselves, the stop
button."""

import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import tiny_problem

import mixfl
from mixfl.runs.html import curves, summary
from mixfl.runs.sinks.notebook import in_notebook

FEW = dict(rounds=4, eval_every=2, cohort_size=2)


class Cell:
    """What IPython would show: each output, as it is now."""

    def __init__(self):
        self.outputs = []

    def display(self, shown, display_id):
        assert display_id
        self.outputs.append([shown])
        return SimpleNamespace(update=self.outputs[-1].append)


@pytest.fixture
def cell(monkeypatch):
    """A kernel, as far as mixfl looks at it."""
    cell = Cell()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())
    display.display = cell.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return cell


def test_a_notebook_is_told_from_a_terminal(cell, monkeypatch):
    assert in_notebook()
    sys.modules["IPython"].get_ipython = lambda: SimpleNamespace()  # IPython on a terminal
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_looking_for_a_notebook_imports_nothing():
    code = (
        "import sys, mixfl.runs.sinks.terminal as t; t.reporter(); print('IPython' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


def test_training_draws_a_bar_and_curves(cell):
    result = mixfl.train(tiny_problem.problem, "2wgt", **FEW)
    (shown,) = cell.outputs
    last = shown[-1]._repr_html_()
    assert "4 of 4 rounds" in last
    assert "finished" in last
    assert repr(shown[-1]) == "2wgt: round 4 of 4"
    lines = re.findall(r'<polyline points="([^"]+)"', last)
    assert [len(line.split()) for line in lines] == [2] * len(lines) != []
    value = next(v for k, v in result.metrics[-1].items() if k == "eval/loss")
    assert f"loss {value:.4f}" in last


def test_two_trainings_in_a_cell_have_an_output_each(cell):
    for algorithm in ("fedavg", "pt"):
        mixfl.train(tiny_problem.problem, algorithm, **FEW)
    first, second = (output[-1]._repr_html_() for output in cell.outputs)
    assert "<b>fedavg</b>" in first
    assert "<b>pt</b>" in second


def test_no_progress_if_none_is_wanted(cell):
    mixfl.train(tiny_problem.problem, "fedavg", **FEW, progress=False)
    assert cell.outputs == []


def test_an_error_is_named(cell):
    with pytest.raises(mixfl.Diverged):
        mixfl.train(tiny_problem.problem, "fedavg", rounds=1, client_lr=1e38, clip="off")
    assert "Diverged" in cell.outputs[0][-1]._repr_html_()


def test_a_run_that_is_resumed_draws_its_earlier_rows_too(cell, tmp_path):
    class Stop:
        def on_round(self, event):
            if event.round == 2:
                raise RuntimeError("gone")

    keys = FEW | dict(out=tmp_path / "run", checkpoint_every=1)
    with pytest.raises(RuntimeError, match="gone"):
        mixfl.train(tiny_problem.problem, "fedavg", **keys, callbacks=[Stop()])
    mixfl.train(tiny_problem.problem, "fedavg", **keys, resume=True)
    (line, *_) = re.findall(r'<polyline points="([^"]+)"', cell.outputs[1][-1]._repr_html_())
    assert len(line.split()) == 2


def test_results_and_loaded_runs_show_themselves(tmp_path):
    result = mixfl.train(tiny_problem.problem, "2wgt", **FEW, out=tmp_path / "run")
    for thing in (result, mixfl.load(tmp_path / "run")):
        html = thing._repr_html_()
        assert "<b>2wgt</b>: round 4 of 4" in html
        assert "<polyline" in html
        assert "comm/up_bytes" in html


def test_names_are_shown_literally():
    rows = [{"round": 1, "eval/<b>x": 1.0}, {"round": 2, "eval/<b>x": None}]
    html = summary({"algorithm": "<script>", "rounds": 2}, rows[:1], ["<i>"])
    assert not re.search(r"<script>|<b>x|<i>", html)
    assert "&lt;b&gt;x" in html
    assert summary({"algorithm": "pt"}, []).endswith("no round has been evaluated</div>")
    assert "<svg" not in curves(rows, 2)  # the last row has no number to show


# A real kernel

LONG = """
import tiny_problem, mixfl
result = mixfl.train(tiny_problem.problem, "fedavg", rounds=1_000_000, eval_every=1, cohort_size=2)
"""
AFTER = """
import sys
result = sys.last_value.result
assert result.metrics[-1]["round"] >= 1 and result.params["w"].shape == (4,)
result
"""


@pytest.mark.system
def test_the_stop_button_keeps_what_was_done(monkeypatch):
    start = pytest.importorskip("jupyter_client.manager").start_new_kernel
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    manager, client = start()
    try:
        client.execute(LONG)
        while True:  # until a curve has been drawn
            message = client.get_iopub_msg(timeout=300)
            assert message["msg_type"] != "error", message["content"]
            if "<polyline" in message["content"].get("data", {}).get("text/html", ""):
                break
        manager.interrupt_kernel()
        while (message := client.get_iopub_msg(timeout=300))["msg_type"] != "error":
            pass
        assert message["content"]["ename"] == "Interrupted"
        (said,) = message["content"]["traceback"]
        assert "sys.last_value.result" in said
        while message["content"].get("execution_state") != "idle":
            message = client.get_iopub_msg(timeout=300)
        client.execute(AFTER)
        shown = {}
        while message["msg_type"] != "execute_result":
            message = client.get_iopub_msg(timeout=300)
            assert message["msg_type"] != "error", message["content"]
        shown = message["content"]["data"]
        assert "<polyline" in shown["text/html"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
