"""The benchmark's arithmetic and its refusals, and that its loops compute what mixfl does. No
peers, and nothing that depends on how fast the machine is."""

import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import engines, growth, mixfl_worker, report, scan_worker, trials_worker, workloads
from benchmarks.engines import OutsideLoad, Worker, WorkerFailed
from benchmarks.peers import protocol
from benchmarks.report import Measured

START = {"w": np.zeros(3, np.float32)}
MODELS = {
    "smile": {"side": 5, "hidden": 3},
    "movie": {"movies": 60, "embedding": 4, "margin": 0.9, "spreadout": 0.01},
    "text": {"vocabulary": 12, "embedding": 3, "hidden": 4, "length": 6},
}


def tiny(task: str) -> workloads.Size:
    return replace(
        workloads.SIZES[task], S=4, K=2, B=3, clients=6, per_client=8, central=20,
        model=MODELS[task],
    )  # fmt: skip


def measured(engine, ms, w=(1, 2, 3), **more):
    return Measured(engine, ms=ms, params={"w": np.array(w, np.float32)}, **more)


@pytest.mark.parametrize("task", workloads.SIZES)
def test_bare_loops_agree_with_mixfl(task, tmp_path):
    folder = tmp_path / task
    workloads.write(tiny(task), folder, rounds=3)
    loops = [scan_worker.Engine(), scan_worker.Engine(rows=True)][: 2 if task == "movie" else 1]
    models = []
    for engine in [mixfl_worker.Engine(), *loops]:
        engine.init(folder)
        engine.run(1)
        engine.run(1)
        models.append(engine.parameters())
    start = protocol.Workload(folder).params
    for other in models[1:]:
        assert report.difference(models[0], other, start) < 1e-3
        assert report.difference(start, other, start) > 0.99  # and they moved


def test_agreement_is_judged_by_the_change():
    start = {"w": np.full(3, 1000.0)}
    a, b = {"w": start["w"] + 0.1}, {"w": start["w"] + 0.2}
    assert report.difference(a, b, start) == pytest.approx(0.5)
    assert report.difference(a, {"v": a["w"]}, start) == float("inf")
    assert report.difference({"w": a["w"] * np.nan}, b, start) == float("inf")


def test_ratio_and_layout_of_rows():
    rows = report.rows(
        "smile",
        [
            measured("mixfl", [9, 10, 11, 30], flops=1e9, first_s=2.01),
            Measured("mixfl", "2wgt", ms=[20.0]),
            measured("fedjax", [100, 105, 110]),
            Measured("pfl", failed="pfl can't be installed: no wheel"),
        ],
        START,
        limit=1e12,
    )
    mixfl, two_way, fedjax, pfl = rows
    assert mixfl["ratio_to"] == {"fedjax": 10.0}
    assert (mixfl["ms_median"], mixfl["share_of_limit"]) == (10.5, pytest.approx(0.095, abs=1e-3))
    assert mixfl["ms_spread"] == pytest.approx((15.75 - 9.75) / 2)
    assert mixfl["compile_s"] == 2.0
    assert fedjax["ratio_to"] == {}  # to itself there is none, and mixfl is no peer
    assert two_way["ratio_to"] == {}
    assert "no_ratio" not in two_way  # another algorithm: nothing to compare with
    assert pfl["ms_median"] is None
    assert "no wheel" in pfl["why_not"]
    keys = {"task", "engine", "algorithm", "ms_median", "ms_spread", "ratio_to", "share_of_limit"}
    assert all(keys <= set(row) for row in json.loads(json.dumps(rows)))
    header, cells = report.table(rows)
    assert all(len(line) == len(header) for line in cells)
    assert cells[0][header.index("x fedjax")] == "10"
    assert any("no wheel" in line for line in report.notes(rows))


def test_ratios_are_to_the_same_algorithm():
    rows = report.rows(
        "smile",
        [
            measured("mixfl", [10]), measured("mixfl", [20], algorithm="2wgt"),
            measured("torch", [30]), measured("torch", [80], algorithm="2wgt"),
        ],
        START, limit=None,
    )  # fmt: skip
    assert [r["ratio_to"] for r in rows] == [{"torch": 3.0}, {"torch": 4.0}, {}, {}]


def test_no_ratio_where_results_differ():
    ours, theirs = measured("mixfl", [10.0]), measured("fedjax", [100.0], w=(1, 2, 3.1))
    row = report.rows("smile", [ours, theirs], START, None)[0]
    assert row["ratio_to"] == {}
    assert "differ" in row["no_ratio"]["fedjax"]
    assert "differs" in report.table([row, {**row, "engine": "fedjax"}])[1][0]
    theirs.params = {"w": np.array([1, 2, 3.001], np.float32)}
    assert report.rows("smile", [ours, theirs], START, None)[0]["ratio_to"] == {"fedjax": 10.0}


def test_exponent_of_a_power():
    x = [1, 2, 4, 8]
    assert growth.exponent(x, [3 * v**1.5 for v in x]) == pytest.approx(1.5)
    assert growth.exponent(x, [7.0] * 4) == pytest.approx(0)


@pytest.mark.parametrize("task", growth.BASES)
def test_growth_changes_one_number(task):
    for what in ("S", "K", "B", "population", "parameters"):
        values = [value for value, _ in growth.sizes(growth.BASES[task], what)]
        assert all(b > a for a, b in itertools.pairwise(values))
        for _, size in growth.sizes(growth.BASES[task], what):
            assert size.per_client >= size.K * size.B
            assert size.clients >= size.S


WORKER = """
import time
import numpy as np
from benchmarks.peers import protocol
now = 0.0
time.perf_counter = lambda: now
class Engine:
    def init(self, folder): print("noise"); self.n = 0
    def run(self, rounds):
        if rounds > 5: raise ValueError("too many")
        if rounds == 0: raise SystemExit("gone")
        global now
        now += 1.5 * rounds
        self.n += rounds
    def parameters(self): return {"n": np.array(self.n)}
protocol.serve(Engine())
"""


def test_worker_answers_and_tells_what_went_wrong():
    worker = Worker([sys.executable, "-c", WORKER])
    try:
        worker.ask("init", folder="")
        assert worker.run(2) == 3.0  # by its clock
        with pytest.raises(WorkerFailed, match="too many"):
            worker.run(6)
        assert worker.parameters()["n"] == 2
        assert worker.peak_mb() > 1
        with pytest.raises(WorkerFailed, match="gone"):
            worker.run(0)
    finally:
        worker.close()


def ticks(monkeypatch, *states):
    """/proc/stat as one state after the other: user nice system idle iowait irq softirq steal."""
    now = iter(states)
    real = Path.read_text

    def read(path, *given, **more):
        if str(path) != "/proc/stat":
            return real(path, *given, **more)
        return f"cpu  {' '.join(map(str, next(now)))} 0 0\ncpu0 1 2 3\n"

    monkeypatch.setattr(Path, "read_text", read)


@pytest.mark.parametrize(
    ("own", "worker", "share"),
    [
        ((0, 0), (0, 0), 0.5),  # 30 user, 10 system, 6 interrupts, 4 stolen; 45 idle, 5 waiting
        ((100, 120), (0, 0), 0.3),
        ((100, 120), (7, 17), 0.2),
        ((100, 150), (0, 0), 0.0),
        ((100, 160), (0, 0), 0.0),  # ticks are counted at different moments
    ],
)
def test_load_of_others_is_what_is_busy_without_us(monkeypatch, own, worker, share):
    counted = {os.getpid(): iter(own), -1: iter(worker)}
    monkeypatch.setattr(engines, "_ticks", lambda pid: next(counted[pid]))
    monkeypatch.setattr(engines, "tagged", lambda tag: [-1])
    before = np.array([1000, 10, 300, 5000, 70, 5, 6, 8])
    ticks(monkeypatch, before, before + [28, 2, 10, 45, 5, 2, 4, 4])
    with OutsideLoad() as load:
        pass
    assert load.share == pytest.approx(share)


def test_ticks_are_of_user_and_system_and_of_ended_children(monkeypatch):
    line = "77 (a (b) c) S " + " ".join(["1"] * 10) + " 100 20 3000 400 " + " ".join(["1"] * 30)
    monkeypatch.setattr(Path, "read_text", lambda path: line)
    assert engines._ticks(77) == 3520


def test_own_ticks_are_the_processor_time_of_the_process():
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    before, first = time.process_time(), engines._ticks(os.getpid())
    while time.process_time() < before + 0.3:
        sum(range(10**5))
    spent = (engines._ticks(os.getpid()) - first) / os.sysconf("SC_CLK_TCK")
    assert spent == pytest.approx(time.process_time() - before, abs=0.06)


def test_plot(tmp_path):
    rows = report.rows("smile", [measured("mixfl", [1.0]), measured("fedjax", [9.0])], START, None)
    report.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.slow
def test_trials_side_by_side_are_those_made_alone():
    """Every way of `benchmarks.trials` trains the same models."""
    by_way = {}
    for way in trials_worker.WAYS:
        engine = trials_worker.Engine("movie", "0,1", way)
        engine.init()
        engine.run(1)
        engine.run(1)
        by_way[way] = [protocol.flat(model) for model in engine.models()]
    start = protocol.flat(engine.simulators[0].init().x)
    for way, models in by_way.items():
        for model, alone in zip(models, by_way["alone"], strict=True):
            assert report.difference(model, alone, start) < 1e-3, way
    first, second = by_way["alone"]
    assert report.difference(first, second, start) > 0.1
