"""`mixfl doctor`: what it finds, and when it fails."""

import json
from pathlib import Path

import jax
from run_folders import cli

import mixfl
from mixfl.cli import doctor
from mixfl.measure import speed

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results.json"


def test_it_names_versions_machine_and_extras(monkeypatch, capsys):
    assert cli(monkeypatch, "doctor", "--quick") == 0
    said = capsys.readouterr().out
    assert mixfl.__version__ in said
    assert f"jax {jax.__version__}" in said
    for word in ("Python", "cores", "memory", "devices", "extra mlflow"):
        assert word in said
    assert "broken" not in said


def test_what_is_missing_is_broken_and_says_what_to_install(monkeypatch, capsys):
    found = doctor.version
    monkeypatch.setattr(doctor, "version", lambda p: None if p in ("optax", "wandb") else found(p))
    assert cli(monkeypatch, "doctor", "--quick") == 1
    said = capsys.readouterr().out
    assert "missing: optax" in said
    assert "pip install optax" in said


def test_an_extra_that_is_missing_is_no_fault(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor, "_requirements", lambda: (["jax", "numpy", "optax"], {"wandb": ["no-such-package"]})
    )
    assert cli(monkeypatch, "doctor", "--quick") == 0
    assert "pip install 'mixfl[wandb]'" in " ".join(capsys.readouterr().out.split())


def test_jax_that_does_not_work_is_broken(monkeypatch, capsys):
    def fails(*arguments):
        raise RuntimeError("no backend")

    monkeypatch.setattr(jax, "devices", fails)
    assert cli(monkeypatch, "doctor") == 1
    assert "no backend" in capsys.readouterr().out


def test_the_speed_is_told_next_to_the_recorded_one(monkeypatch, capsys):
    monkeypatch.setattr(speed, "measure", lambda: speed.Speed(100.0, speed.RECORDED_GFLOPS))
    assert cli(monkeypatch, "doctor") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "100 ms (recorded: 48.5 ms; expected here" in said
    slow = speed.Speed(1000.0, speed.RECORDED_GFLOPS)
    assert (slow.slow, speed.Speed(1000.0, speed.RECORDED_GFLOPS / 20).slow) == (True, False)
    monkeypatch.setattr(speed, "measure", lambda: slow)
    assert cli(monkeypatch, "doctor") == 0  # slow is not broken
    assert "look for other programs" in " ".join(capsys.readouterr().out.split())


def test_a_training_that_fails_is_broken(monkeypatch, capsys):
    def fails():
        raise ValueError("no round")

    monkeypatch.setattr(speed, "measure", fails)
    assert cli(monkeypatch, "doctor") == 1
    assert "ValueError: no round" in capsys.readouterr().out


def test_the_test_measures_rounds_and_products(monkeypatch):
    monkeypatch.setattr(speed, "SIDE", 8)
    monkeypatch.setattr(speed, "PRODUCT", 64)
    measured = speed.measure(0.0)
    assert measured.round_ms > 0
    assert measured.gflops > 0


def test_the_record_is_that_of_the_benchmark():
    (row,) = [
        r for r in json.loads(RESULTS.read_text())
        if (r["task"], r["engine"], r["algorithm"]) == ("smile", "mixfl", "fedavg")
    ]  # fmt: skip
    assert (row["S"], row["K"], row["B"]) == (speed.S, speed.K, speed.B)
    recorded = (speed.RECORDED_MS, speed.RECORDED_GFLOPS, speed.RECORDED_CORES)
    assert (row["ms_median"], row["sgemm_gflops"], row["cores"]) == recorded
