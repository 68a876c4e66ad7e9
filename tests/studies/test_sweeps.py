"""Many runs at once: none is lost, none is made twice, settings are chosen on validation data."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_problem

from mixfl.errors import MixflError
from mixfl.runs.plan import plan
from mixfl.runs.user_input import parse_over
from mixfl.studies import sweep as sweeping
from mixfl.studies.compare import Outcome, planned_trials
from mixfl.studies.progress import Board
from mixfl.studies.trials import Done, Trial, check_failed, done, make
from mixfl.studies.worker_process import Worker
from mixfl.theory.intervals import interval

MIXFL = Path(sys.executable).with_name("mixfl")
TINY = f"{tiny_problem.__file__}:problem"
SUPPORT = str(Path(tiny_problem.__file__).parent)
SWEEP = [
    str(MIXFL), "sweep", TINY, "--algorithm", "1wgt,pt", "--over", "client_lr=0.1,0.4,3e38",
    "--trials", "2", "--rounds", "12", "--set", "checkpoint_every=2", "--set", "eval_every=4",
]  # fmt: skip


def swept(out, *more, check=True):
    ended = subprocess.run([*SWEEP, "--out", str(out), *more], capture_output=True, text=True)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert not check or ended.returncode == 0, ended.stderr
    return ended


def table(text: str) -> str:
    """What is printed from the table on, without the folder's name."""
    return text[text.index("trials of each setting") :].split("Runs:")[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep") / "whole"
    return out, swept(out).stdout


def test_diverged_settings_are_results(whole):
    out, said = whole
    assert said.count("diverged at round 1") >= 2
    rows = json.loads((out / sweeping.RESULTS).read_text())["settings"]
    assert len(rows) == 6
    for row in rows:
        assert (row["trials"] == 0) == (row["keys"]["client_lr"] > 1)
        assert len(row["diverged_at"]) + row["trials"] == 2
    (best,) = (r for r in rows if r["chosen"])
    losses = [r["metrics"]["eval/loss"]["mean"] for r in rows if r["trials"]]
    assert best["metrics"]["eval/loss"]["mean"] == min(losses)


def test_finished_and_diverged_trials_are_never_made_again(whole):
    out, said = whole
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    again = swept(out, "--resume")
    assert table(again.stdout) == table(said)
    assert "0 to make" in again.stdout
    after = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    changed = {p.name for p in after if after[p] != before.get(p)}
    assert changed <= {sweeping.RESULTS, "report.html"}


def test_the_same_folder_for_other_settings_is_refused(whole):
    out, _ = whole
    ended = swept(out, "--resume", "--set", "cohort_size=3", check=False)
    assert ended.returncode == 2
    assert "cohort_size was 5, now 3" in ended.stderr
    ended = swept(out, check=False)
    assert ended.returncode == 2
    assert "--resume" in ended.stderr


def recorded(out) -> int:
    """Lines of metrics of all its runs."""
    return sum(len(file.read_text().splitlines()) for file in out.glob("*/*/*/metrics.jsonl"))


def kill_after(lines: int, out) -> None:
    """Starts the sweep, and kills its first process once so many more lines are recorded; its
    workers see to themselves."""
    before = recorded(out)
    process = subprocess.Popen(
        [*SWEEP, "--out", str(out), "--resume"], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        while recorded(out) < before + lines:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_sweep_killed_and_restarted_ends_with_the_same_table(tmp_path, whole, kills):
    chance, out = random.Random(3), tmp_path / "killed"
    for _ in range(kills):  # 24 lines in all, if nothing was lost
        kill_after(chance.randint(0, 2), out)
    end = swept(out, "--resume")
    assert table(end.stdout) == table(whole[1])
    for folder in sorted(p.parent for p in whole[0].rglob("metrics.jsonl")):
        other = out / folder.relative_to(whole[0])
        kept = [
            [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")}
             for line in (f / "metrics.jsonl").read_text().splitlines()]
            for f in (folder, other)
        ]  # fmt: skip
        assert kept[0] == kept[1]


@pytest.mark.slow
def test_interrupted_it_says_how_to_go_on(tmp_path, whole):
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        [*SWEEP, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if "diverged" in line or "loss" in line:  # the first of twelve is over
            break
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error
    assert "--resume goes on" in error
    assert table(swept(out, "--resume").stdout) == table(whole[1])


def tiny_trials(n, **keys):
    return [
        Trial(TINY, "fedavg", f"seed{i}", f"{i}", keys={"rounds": 4, "seed": i, **keys})
        for i in range(n)
    ]


@pytest.mark.slow
def test_two_commands_may_work_on_the_same_results(tmp_path):
    trials = tiny_trials(4)
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "import test_sweeps as t; from pathlib import Path\n"
        "ended = t.make(t.tiny_trials(4), Path(sys.argv[1]), 2, t.Board())\n"
        "print([d.status for d in ended])"
    )
    here = str(Path(__file__).parent)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "r"), here, SUPPORT],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in both:
        out, error = process.communicate()
        assert process.returncode == 0, error
        assert out.strip() == str(["finished"] * 4)
    assert all(done(t, tmp_path / "r").status == "finished" for t in trials)


def test_a_mistake_in_a_trial_stops_the_others_and_is_named(tmp_path):
    trials = [*tiny_trials(2), *tiny_trials(1, cohort_size=1000)]
    with pytest.raises(MixflError, match="cohort_size = 1000, but the population"):
        make([*trials[:2], Trial(TINY, "fedavg", "bad", "bad", keys=trials[2].keys)], tmp_path,
             2, Board())  # fmt: skip


# Processes that die or hang

UNLUCKY = f"""
import dataclasses, os, pathlib, signal, sys, time
sys.path.insert(0, {str(Path(tiny_problem.__file__).parent)!r})
import tiny_problem
log = pathlib.Path(__file__).with_name("attempts")  # a line for each

def made(times, what):
    calls = iter(range(1000))

    def evaluate(params):
        if next(calls) == 3:
            with log.open("a") as file:
                file.write(f"{{os.getpid()}}\\n")
            if len(log.read_text().splitlines()) <= times:
                what()
        return tiny_problem.evaluate(params)

    return dataclasses.replace(tiny_problem.problem, evaluate=evaluate)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def full():
    raise MemoryError

def hang():
    while True:
        time.sleep(1)

once = lambda: made(1, kill)
always = lambda: made(100, kill)
full_once = lambda: made(1, full)
hanging = lambda: made(100, hang)
"""


class Noting(Board):
    def __init__(self):
        self.notes, self.ended = [], []

    def note(self, message):
        self.notes.append(message)

    def over(self, done):
        super().over(done)
        self.ended.append(done.trial.folder)


def made_beside_others(which, folder, jobs=2, hung=0.0):
    """An unlucky trial before two others: how they ended, what was said, and the attempts."""
    (folder / "unlucky.py").write_text(UNLUCKY)
    keys = {"rounds": 6, "checkpoint_every": 1, "eval_every": 1}
    unlucky = Trial(f"{folder}/unlucky.py:{which}", "fedavg", "u", "unlucky", keys=keys)
    board = Noting()
    ended = make([unlucky, *tiny_trials(2)], folder / "out", jobs, board, hung=hung)
    attempts = (folder / "attempts").read_text().split()
    return ended, board, attempts


@pytest.mark.parametrize("which", ["once", "full_once"])
def test_a_trial_killed_for_memory_is_made_again_alone(which, tmp_path):
    ended, board, attempts = made_beside_others(which, tmp_path)
    assert [d.status for d in ended] == ["finished"] * 3
    assert len(set(attempts)) == 2  # two processes
    assert board.ended[-1] == "u"  # when the others were over
    (note,) = (n for n in board.notes if "tried again" in n)
    assert "unlucky: " in note
    assert ("killed by signal 9" in note) == (which == "once")
    whole = make([Trial(TINY, "fedavg", "w", "w", keys=ended[0].trial.keys)], tmp_path, 1, Board())
    model = (tmp_path / "w" / "model.safetensors").read_bytes()
    assert (ended[0].folder / "model.safetensors").read_bytes() == model
    assert whole[0].status == "finished"


@pytest.mark.parametrize(
    ("which", "hung", "words"),
    [
        ("always", 0.0, "killed by signal 9"),
        # Long enough for the others to start in, on a busy machine.
        pytest.param("hanging", 90.0, "no progress for 90 s", marks=pytest.mark.slow),
    ],
)
def test_a_trial_that_dies_or_hangs_again_has_failed_and_the_others_are_made(
    which, hung, words, tmp_path
):
    ended, _, attempts = made_beside_others(which, tmp_path, hung=hung)
    assert [d.status for d in ended] == ["failed", "finished", "finished"]
    assert len(set(attempts)) == 2
    assert words in ended[0].reason
    status = json.loads((ended[0].folder / "status.json").read_text())
    assert status["status"] == "failed"
    assert words in status["message"]
    with pytest.raises(MixflError, match=f"1 of 3 runs failed .unlucky: .*{words}.*--resume"):
        check_failed(ended)


SAYING = """
import json, sys, time
sys.stdin.readline()
for line in {lines}:
    print(json.dumps(line), flush=True)
time.sleep({seconds})
"""


@pytest.mark.parametrize(
    ("lines", "seconds", "hung", "told", "answer"),
    [
        ([{"round": 1}, {"round": 2}], 1000, 3, [1, 2], {"died": "it made no progress for 3 s"}),
        ([{"round": 1}, {"finished": True}], 1000, 0, [1], {"finished": True}),
        ([{"round": 1}], 0, 0, [1], {"died": "its process was ended with code 0"}),
    ],
)
def test_a_worker_that_says_nothing_more(lines, seconds, hung, told, answer, tmp_path):
    worker, rounds = Worker(None, 1, hung), []
    worker.command = [sys.executable, "-c", SAYING.format(lines=lines, seconds=seconds)]
    worker.replace()
    try:
        found = worker.run(tiny_trials(1)[0], tmp_path, rounds.append, rounds.append)
    finally:
        worker.close()
    assert rounds == told
    ((key, words),) = answer.items()
    assert str(found[key]).startswith(str(words))


def test_a_sweep_shows_what_failed_and_ends_with_an_error(tmp_path):
    (tmp_path / "unlucky.py").write_text(UNLUCKY)
    ended = subprocess.run(
        [str(MIXFL), "sweep", f"{tmp_path}/unlucky.py:always", "--algorithm", "pt", "--over",
         "client_lr=0.1", "--trials", "1", "--rounds", "6", "--set", "eval_every=1", "--jobs", "1",
         "--out", str(tmp_path / "o")], capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert "1 of 1 runs failed" in ended.stderr
    assert "Traceback" not in ended.stderr
    (row,) = json.loads((tmp_path / "o" / sweeping.RESULTS).read_text())["settings"]
    assert (row["failed"], row["trials"], row["chosen"]) == (1, 0, False)
    assert "client_lr = 0.1" in ended.stdout


def test_a_setting_of_which_a_trial_failed_is_shown_and_not_chosen():
    found = [setting(0.1, [2, 2], [0, 0]), setting(0.2, [1], [0])]
    found[1].outcome.failed = 1
    assert sweeping.choose(found, None).best is found[0]
    assert found[1].outcome.cell("eval/loss") == "1 of 2 failed"


def test_workers_leave_with_their_parent(tmp_path):
    parent = subprocess.Popen(
        [*SWEEP, "--rounds", "100000", "--out", str(tmp_path / "o")], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.time() + 60
    while not (workers := children(parent.pid)) and time.time() < deadline:
        time.sleep(0.1)
    assert workers
    parent.kill()
    parent.wait()
    while any(map(alive, workers)) and time.time() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


def children(pid: int) -> list[int]:
    """Each belongs to the thread that began it."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(p) for children in found for p in children.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_intervals_cover_the_mean_in_95_of_100_cases():
    rng = np.random.default_rng(0)
    for n in (3, 5, 10):
        drawn = rng.normal(2.0, 3.0, (4000, n))
        covered = np.mean([low <= 2.0 <= high for _, low, high in map(interval, drawn)])
        assert abs(covered - 0.95) < 0.012, (n, covered)


def test_trials_of_all_algorithms_have_the_same_cohorts_and_batches():
    plans = [plan(TINY, a) for a in ("fedavg", "pt", "1wgt", "2wgt")]
    several = planned_trials(plans, 3, {})
    seeds = {p.recipe.id: [t.keys["seed"] for t in several if t.algorithm == p.recipe.id]
             for p in plans}  # fmt: skip
    assert set(map(tuple, seeds.values())) == {(0, 1, 2)}
    fed = [
        [(piece.clients[0][0].batches.mask, piece.clients[0][0].batches.data["x"])
         for piece in s.feeder.pieces(s.at(7), 7)]
        for s in (p.simulator() for p in plans)
    ]  # fmt: skip
    for other in fed[1:]:
        assert all(np.array_equal(a, b) for x, y in zip(fed[0], other, strict=True)
                   for a, b in zip(x, y, strict=True))  # fmt: skip


# Choosing


@pytest.mark.slow
def test_a_sweep_of_a_task_chooses_on_validation_data(tmp_path):
    small = dict(image_size=8, clients=40, per_client=6, hidden=4, cohort_size=5, eval_every=2)
    ended = subprocess.run(
        [str(MIXFL), "sweep", "smile", "--preset", "demo", "--algorithm", "pt", "--rounds", "4",
         "--over", "client_lr=0.0001,0.1", "--trials", "2", "--out", str(tmp_path / "s"),
         *(word for k, v in small.items() for word in ("--set", f"{k}={v}"))],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "chosen on validation data, by valid/auc" in ended.stdout
    content = json.loads((tmp_path / "s" / sweeping.RESULTS).read_text())
    assert content["chosen_by"] == "valid/auc"
    means = {r["chosen"]: r["metrics"]["valid/auc"]["mean"] for r in content["settings"]}
    assert means[True] >= means[False]


def setting(lr, valid, test, diverged=()):
    trials = [
        [{"round": 1, "valid/loss": v, "eval/loss": t}] for v, t in zip(valid, test, strict=True)
    ]
    return sweeping.Setting("pt", {"client_lr": lr}, Outcome("pt", trials, list(diverged)))


def test_settings_are_chosen_on_validation_data():
    found = [setting(0.1, [2, 2], [0.5, 0.5]), setting(0.2, [1, 1.2], [3, 5])]
    choice = sweeping.choose(found, None)
    assert choice == sweeping.Choice("valid/loss", True, found[1])
    words = "\n".join(sweeping.verdict(found, choice))
    assert "chosen on validation data, by valid/loss: pt, client_lr = 0.2" in words
    assert "on test data: loss 4.0000" in words


def test_a_setting_of_which_one_trial_diverged_is_not_chosen():
    found = [setting(0.1, [2, 2], [0, 0]), setting(0.2, [1], [0], diverged=[7])]
    assert sweeping.choose(found, None).best is found[0]
    assert "1 of 2 diverged at round 7" in found[1].outcome.cell("eval/loss")
    assert sweeping.choose(found[1:], None).best is None


def test_what_to_choose_by_can_be_said():
    found = [setting(0.1, [2, 2], [0, 0])]
    assert sweeping.choose(found, "loss").metric == "valid/loss"
    with pytest.raises(MixflError, match="There are: loss"):
        sweeping.choose(found, "accuracy")


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (["client_lr"], "expected key=v1,v2"),
        (["client_lr=1,,2"], "expected key=v1,v2"),
        (["client_lr=1,1.0,1"], "given twice"),
        (["a=1", "a=2"], "given twice"),
        (["seed=1,2"], "--trials"),
        ([], "what to sweep over"),
    ],
)
def test_what_to_sweep_over_is_checked(over, words):
    with pytest.raises(MixflError, match=words):
        parse_over(over)


def test_values_are_read_as_set_reads_them():
    assert parse_over(["client_lr=0.1,1", "server_opt=adam,sgd"]) == {
        "client_lr": [0.1, 1], "server_opt": ["adam", "sgd"]
    }  # fmt: skip


@pytest.mark.parametrize("task", ["smile", "text", "movie"])
def test_validation_data_is_apart_from_training_and_test_data(task):
    small = {
        "smile": dict(image_size=8, clients=20, per_client=6, hidden=4),
        "text": dict(clients=20, per_client=4, articles=2000, length=20, embedding=4, hidden=4),
        "movie": dict(users=60, movies=50, per_user=20, embedding=4),
    }[task]
    split = plan(task, "fedavg", preset="demo", given={**small, "validation": True}).problem
    plain = plan(task, "fedavg", preset="demo", given=small).problem
    assert plain.validate is None
    x = split.init(__import__("jax").random.key(0))
    assert set(split.validate(x)) == set(split.evaluate(x))
    train, whole = (len(p.populations[0].clients) for p in (split, plain))
    # The movie task has its validation users set aside always, as the paper has.
    assert train == whole if task == "movie" else train < whole

    def rows(examples):
        """Of a judge, its data."""
        if isinstance(examples, dict):  # movie: arrays
            return {
                a.tobytes()
                for a in np.concatenate(
                    [np.asarray(examples["context"]), np.asarray(examples["movie"])[:, None]], 1
                )
            }
        return {a.tobytes() for a in next(iter(examples.all().values()))}  # fmt: skip

    judged = {
        name: rows(judge.splits["federated"] if task == "text" else judge.examples)
        for name, judge in (("valid", split.validate), ("test", split.evaluate))
    }
    assert not judged["valid"] & judged["test"]
    if task == "smile":
        trained = rows(split.terms[0].examples) | rows(split.terms[1].examples)
        assert not judged["valid"] & trained


def test_a_validation_flag_must_be_one():
    with pytest.raises(MixflError, match="validation = 1: expected true or false"):
        plan("smile", "fedavg", preset="demo", given={"validation": 1})


def test_done_says_nothing_of_an_unfinished_run(tmp_path):
    trial = Trial(TINY, "fedavg", "a", "a")
    assert done(trial, tmp_path) is None
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "status.json").write_text('{"status": "running", "round": 3}')
    assert done(trial, tmp_path) is None


def test_time_left_is_known_from_runs_of_the_same_kind(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    trials = tiny_trials(5)
    board = Board()
    board.begin(trials, 5, jobs=1)
    assert board.seconds_left() is None
    board.running(0, trials[0], 0)
    clock[0] = 10.0
    board.over(Done(trials[0], tmp_path, "finished", 4))
    assert board.seconds_left() == pytest.approx(40)
    board.running(0, trials[1], 0)
    clock[0] = 14.0
    assert board.seconds_left() == pytest.approx(36)
