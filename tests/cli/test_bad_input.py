"""Bad input gets a clear message and exit code 2, and leaves nothing half-written."""

import builtins
import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import tiny_problem
import tomli_w
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

import mixfl
from mixfl import optimizers
from mixfl.cli import main
from mixfl.errors import MixflError
from mixfl.runs import model_file, reading
from mixfl.runs.user_input import parse_assignments, read_config
from mixfl.settings import KEYS
from mixfl.tasks import find
from mixfl.validation import LARGEST_FLOAT, LARGEST_INT, field_types

TINY = f"{tiny_problem.__file__}:problem"
RUN = ("run", TINY, "--algorithm", "2wgt")

# A user's file, to be spoilt in one place.
OWN = """
import jax.numpy as jnp
import numpy as np
import mixfl

x = np.arange(12.0) / 12
client = np.arange(12) // 3

def loss(params, batch):
    return (batch["x"] * params["w"] - 1) ** 2

def init(key):
    return {"w": jnp.zeros(())}

def evaluate(params):
    return {"loss": (params["w"] - 1) ** 2}

clients = mixfl.ClientData.from_arrays({"x": x}, client=client)
problem = mixfl.Problem(
    init, [mixfl.Federated(loss, clients), mixfl.Central(loss, {"x": x})], evaluate,
    dict(rounds=4, cohort_size=2, client_batch=2, local_steps=2, eval_every=1, checkpoint_every=1),
)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The present folder is an empty one, so that whatever is written there shows."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def mixfl_command(monkeypatch, capsys):
    """The command line, in this process: (exit code, what it said)."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["mixfl", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        err = capsys.readouterr().err
        assert "Traceback" not in err
        return code, err

    return command


def everything(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def refused(mixfl_command, folder):
    """Asserts that a command ends with exit code 2 and writes nothing; gives its message."""

    def command(*arguments):
        before = everything(folder)
        code, err = mixfl_command(*arguments)
        assert code == 2, err
        after = {p: c for p, c in everything(folder).items() if "__pycache__" not in p.parts}
        assert after == before
        return err

    return command


def own(old="", new="", file="own.py"):
    """`file:problem` with one thing changed."""
    assert old in OWN
    Path(file).write_text(OWN.replace(old, new) if old else OWN)
    return f"{file}:problem"


# What is given on the command line

SETS = {
    "client_l=1": ["unknown key 'client_l'. Did you mean 'client_lr'? `mixfl keys ", "lists all"],
    "zzz=1": ["unknown key 'zzz'. `mixfl keys ", "tiny_problem.py:problem --algorithm 2wgt` lists"],
    "rounds=ten": ["rounds = 'ten'", "a whole number of at least 1"],
    "rounds=1.5": ["rounds = 1.5", "a whole number"],
    "rounds=true": ["rounds = True", "a whole number"],
    "rounds=0": ["rounds = 0", "of at least 1"],
    f"rounds={2**70}": [f"rounds = {2**70}", "a whole number"],
    "rounds=[3]": ["rounds = [3]", "a whole number"],
    "rounds=": ["rounds = ''", "a whole number"],
    "seed=-1": ["seed = -1", "of at least 0"],
    "client_lr=0": ["client_lr = 0", "a finite number above 0"],
    "client_lr=-0.1": ["client_lr = -0.1", "above 0"],
    "client_lr=nan": ["client_lr = nan", "a finite number"],
    "client_lr=inf": ["client_lr = inf", "a finite number"],
    "client_lr=1" + "0" * 400: ["client_lr = 1000", "a finite number"],
    "client_lr=1" + "0" * 5000: ["client_lr = '1000", "a finite number"],
    "client_lr=fast": ["client_lr = 'fast'", "a finite number"],
    "client_lr=" + "[" * 5000: ["client_lr = '[[[", "a finite number"],
    "client_lr=2020-01-01": ["client_lr = datetime.date(2020, 1, 1)", "a finite number"],
    "merge_lr=Auto": ["merge_lr = 'Auto'", "or 'auto'"],
    "w_f=-1": ["w_f = -1", "of at least 0"],
    "weighting=example": ["unknown value of weighting 'example'", "Did you mean 'examples'?"],
    "server_opt=adm": ["unknown optimizer 'adm'", "Did you mean 'adam'?"],
    "server_opt=adam(b3=1)": ["optimizer 'adam(b3=1)' can't be made", "b3"],
    "server_opt=adam(0.1)": ["optimizer 'adam(0.1)'", "write it as adam or sgd(momentum=0.9)"],
    "server_opt=3": ["server_opt = 3", "expected text"],
    "pretrain_rounds=3": ["key 'pretrain_rounds' has no effect on '2wgt'", "2wgt` lists what has"],
    "cohort_size=13": ["cohort_size = 13", "has 12 clients", "at most 12"],
    "central_batch=41": ["central_batch = 41", "only 40 examples", "at most 40"],
    "devices=65": ["devices = 65", "JAX has"],
    "client_lr": ["--set client_lr: expected key=value"],
    "=3": ["--set =3: expected key=value"],
    "": ["--set : expected key=value"],
}


@pytest.mark.parametrize("assignment", SETS)
def test_set(assignment, refused):
    err = refused(*RUN, "--set", assignment)
    assert all(part in err for part in SETS[assignment]), err
    assert len(err.strip().splitlines()) == 1


COMMANDS = {
    "task": [("run", "smiel", "--algorithm", "pt"), "unknown task 'smiel'. Did you mean 'smile'?"],
    "no task": [("run",), "which task?"],
    "algorithm": [("run", TINY, "--algorithm", "2wtg"), "'2wtg'. Did you mean '2wgt'?"],
    "no algorithm": [("run", TINY), "Give --algorithm with one of fedavg, pt"],
    "preset": [("run", "smile", "--algorithm", "pt", "--preset", "papre"), "mean 'paper'?"],
    "no presets": [(*RUN, "--preset", "paper"), "has no presets"],
    "key of a task": [("run", "smile", "--algorithm", "pt", "--set", "hiden=3"), "'hidden'?"],
    "twice": [(*RUN, "--set", "seed=1", "--set", "seed=2"), "--set seed is given twice"],
    "two ways": [(*RUN, "--seed", "1", "--set", "seed=1"), "given by both --seed and --set"],
    "type of an option": [(*RUN, "--rounds", "x"), "'x' is not a valid integer"],
    "unknown option": [(*RUN, "--sead", "3"), "--seed"],
    "unknown command": [("rum", TINY), "rum"],
    "data": [(*RUN, "--data", "here"), "loads its data itself"],
    "baseline": [("run", TINY, "--algorithm", "baseline"), "central terms without data"],
    "compare": [("compare", TINY, "--algorithms", "pt,ptt"), "'ptt'. Did you mean 'pt'?"],
    "compare none": [("compare", TINY, "--algorithms", ","), "expected different names"],
    "trials": [("compare", TINY, "--trials", "0"), "0 is not in the range"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_command(case, refused):
    arguments, message = COMMANDS[case]
    assert message in refused(*arguments)


def test_smile_options_out_of_range(refused):
    run = ("run", "smile", "--algorithm", "pt", "--preset", "demo", "--set")
    assert "hidden = 0: expected a whole number from 1" in refused(*run, "hidden=0")
    assert "difficulty = 2: expected a number from 0 to 1" in refused(*run, "difficulty=2")
    assert "'unit'?" in refused(*run, "inputs=units")
    assert "hidden = [3]" in refused(
        "compare", "smile", "--algorithms", "pt", "--set", "hidden=[3]"
    )


# Where it is written


def test_folder_with_another_run(mixfl_command, refused):
    assert mixfl_command(*RUN, "--rounds", 1, "--out", "run")[0] == 0
    run = (*RUN, "--out", "run", "--rounds")
    assert "holds this run already: go on with --resume, start over with --restart" in refused(
        *run, 1
    )
    for resume in ([], ["--resume"]):
        err = refused(*run, 2, "--set", "client_lr=0.5", *resume)
        assert "run holds another run (central_lr was 0.2, now 0.5; client_lr was 0.2, now" in err
        assert "rounds was 1, now 2): choose another --out" in err
    other = ("run", TINY, "--algorithm", "pt", "--rounds", 1, "--out", "run", "--resume")
    assert "algorithm was 2wgt, now pt" in refused(*other)


def test_folder_with_other_files(refused, folder):
    for name in ("thesis.tex", "model.safetensors", "checkpoints"):
        (folder / name).mkdir()
        (folder / name / name).write_text("precious")
        for resume in ([], ["--resume"]):
            err = refused(*RUN, "--out", folder / name, *resume)
            assert f"holds other files ({name}) and no run" in err


def test_folder_that_cannot_be(refused, folder):
    (folder / "file").write_text("precious")
    assert "is a file: choose another --out" in refused(*RUN, "--out", "file")
    assert "file/run can't be written: Not a directory" in refused(*RUN, "--out", "file/run")
    assert "can't be written" in refused(*RUN, "--out", "/proc/mixfl/run")


def test_folder_without_permission(refused, monkeypatch):
    def mkdir(*_, **__):  # nothing stops root, who may run this test
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert "closed/run can't be written: Permission denied" in refused(*RUN, "--out", "closed/run")


def test_damaged_config_of_a_run(refused, folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text("task = ")
    assert "run/config.toml is not valid TOML" in refused(*RUN, "--out", "run", "--resume")


# Configuration files

CONFIGS = {
    b"rounds = ": "is not valid TOML",
    b"task = '\xff'": "is not valid TOML",
    b"rouns = 3": "Did you mean 'rounds'?",
    b"rounds = 'three'": "rounds = 'three': expected a whole number",
    b"[training]\nrounds = 3": "expected keys with values, not sections",
    b"task = 3": "task = 3: expected a text",
    b"algorithm = ['pt']": "algorithm = ['pt']: expected a text",
    b"client_opt = 'python:my.own'": "was a function in a Python program (python:my.own)",
}


@pytest.mark.parametrize("content", CONFIGS)
def test_config_file(content, refused, folder):
    (folder / "config.toml").write_bytes(content)
    err = refused(*RUN, "--config", "config.toml")
    assert CONFIGS[content] in err


def test_config_file_that_is_not_there(refused):
    assert "there is no file none.toml" in refused(*RUN, "--config", "none.toml")
    assert "can't be read: Is a directory" in refused(*RUN, "--config", ".")


# The user's own file

FILES = {
    "attribute": ("problem = ", "probelm = ", "has no 'problem'. It has: probelm."),
    "no problem": ("problem = ", "problem, _ = None, ", "is NoneType: expected a mixfl.Problem"),
    "syntax": ("def init(key):", "def init(key)", "own.py failed: SyntaxError"),
    "exception": ("client = ", "client = 1 / 0  #", "ZeroDivisionError: division by zero (line 7)"),
    "import": ("import mixfl\n", "import mixfl, torchh\n", "No module named 'torchh'"),
    "mean": ("- 1) ** 2\n\ndef init", "- 1).mean()\n\ndef init", "Leave out the mean or sum"),
    "loss raises": ('batch["x"]', 'batch["z"]', "the loss of term 'federated' failed: KeyError"),
    "integers": ("jnp.zeros(())", "jnp.zeros((), int)", "parameters must be floating-point arrays"),
    "python number": ("jnp.zeros(())", "0.5", "floating-point arrays"),
    "init NaN": ("jnp.zeros(())", "jnp.log(-1.0)", "init returned ['w'] with NaN"),
    "init raises": ("jnp.zeros(())", "jnp.zeros(-1)", "init failed: "),
    "no parameters": ('{"w": jnp.zeros(())}', "{}", "init"),
    "NaN": ("/ 12\n", "/ 12; x[5] = np.nan\n", "column 'x' has a NaN or infinite value in row 5"),
    "inf": ("/ 12\n", "/ 12; x[7] = np.inf\n", "column 'x' has a NaN or infinite value in row 7"),
    "large": ("/ 12\n", "* 1e300\n", "value in row 1 (as a 32-bit number)"),
    "int64": ("np.arange(12.0) / 12", "np.arange(12) << 40", "need more than 32 bits"),
    "strings": ("np.arange(12.0) / 12", "np.array(list('abcdefghijkl'))", "Turn text"),
    "objects": ("np.arange(12.0) / 12", "np.array([None] * 12)", "has dtype object"),
    "lengths": ('arrays({"x": x}', 'arrays({"x": x, "y": x[1:]}', "{'x': 12, 'y': 11}"),
    "client length": ("client=client", "client=client[1:]", "shape (11,), the data has 12 rows"),
    "client NaN": ("client=client", "client=[None, *client[1:]]", "missing values"),
    "no rows": ('{"x": x}, client=client', '{"x": x[:0]}, client=[]', "the data has no rows"),
    "empty": (
        'from_arrays({"x": x}, client=client)',
        'from_arrays({"x": x}, client=client).where(lambda c: c["x"] > 9, "x")',
        "the population 'federated' is empty: none of its 4 clients has an example",
    ),
    "no clients": ('from_arrays({"x": x}, client=client)', "from_clients({})", "none of the 0"),
    "weight": ("Federated(loss, clients)", "Federated(loss, clients, -1)", "at least 0, got -1"),
    "no central data": ('loss, {"x": x}', 'loss, {"x": []}', "the data has no rows"),
    "arrays": ("mixfl.Federated(loss, clients)", "mixfl.Federated(loss, x)", "ClientData, got nd"),
    "terms": ("[mixfl.Federated(loss, clients), ", "[", "needs a federated term"),
    "settings": ("dict(rounds=4", "dict(round=4", "unknown key 'round'. Did you mean 'rounds'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_own_file(case, refused):
    old, new, message = FILES[case]
    task = own(old, new)
    algorithm = "fedavg" if case == "terms" else "2wgt"
    assert message in refused("run", task, "--algorithm", algorithm)


def test_own_file_that_is_not_there(refused):
    assert "there is no file none.py" in refused("run", "none.py:problem", "--algorithm", "pt")


def test_command_of_its_own_process(folder):
    """As the shell sees it: one line, exit code 2."""
    mixfl_script = Path(sys.executable).with_name("mixfl")
    done = subprocess.run(
        [mixfl_script, "run", "smiel", "--algorithm", "pt"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mixfl: unknown task 'smiel'. Did you mean 'smile'?")
    assert len(done.stderr.splitlines()) == 1
    assert not list(folder.iterdir())


# What shows only while it runs

EVALUATES = {
    'raise KeyError("oops")': "evaluate failed: KeyError: 'oops'",
    "return 3": "evaluate returned 3: expected a dict of numbers",
    'return {"loss": "low"}': "evaluate returned loss = 'low'",
    'return {"loss": {"a": 1}}': "evaluate returned loss = {'a': 1}",
}


@pytest.mark.parametrize("body", EVALUATES)
def test_evaluate(body, mixfl_command):
    task = own('return {"loss": (params["w"] - 1) ** 2}', body)
    code, err = mixfl_command("run", task, "--algorithm", "pt", "--out", "run")
    assert code == 2
    assert EVALUATES[body] in err
    assert not Path("run").exists()  # found before anything is written


def test_clients_without_data_are_dropped_and_counted(mixfl_command):
    task = own(
        'from_arrays({"x": x}, client=client)',
        'from_clients({"a": {"x": x}, "b": {"x": []}, "c": {}, "d": {"x": x[:2]}})',
    )
    code, err = mixfl_command("run", task, "--algorithm", "fedavg", "--out", "run")
    assert code == 0
    assert "2 clients of 'federated' have no example and were dropped; 2 remain" in err
    assert mixfl.load("run").metrics[-1]["clients/federated"] == 2


def test_client_with_an_update_that_is_not_finite_is_left_out(mixfl_command):
    """Client 3 has examples that overflow; without it the run is the one on the others."""
    task = own("/ 12\n", "/ 12; x[9:] = 1e30\n")
    run = ("run", task, "--algorithm", "fedavg", "--set", "cohort_size=4", "--out")
    code, err = mixfl_command(*run, "run")
    assert code == 0
    assert "round 1: the updates of 1 clients were not finite and are left out" in err
    assert "4 client updates were not finite and were left out" in err
    rows = mixfl.load("run").metrics
    assert [row["clients/rejected"] for row in rows] == [1, 2, 3, 4]
    assert [row["clients/federated"] for row in rows] == [3] * 4
    assert 0 < rows[-1]["eval/loss"] < rows[0]["eval/loss"] < 1


def test_no_client_with_a_finite_update_is_divergence(mixfl_command):
    task = own("/ 12\n", "/ 12 + 1e30\n")
    code, err = mixfl_command("run", task, "--algorithm", "fedavg", "--out", "run")
    assert code == 3
    assert "fedavg diverged in round 1" in err


def test_divergence(mixfl_command):
    run = (
        "run",
        own(),
        "--algorithm",
        "2wgt",
        "--rounds",
        60,
        "--set",
        "merge_lr=1",
        "--out",
        "run",
    )
    run = (*run, "--set", "client_lr=300")
    code, err = mixfl_command(*run)
    assert code == 3
    assert "2wgt diverged in round" in err
    assert "lower client_lr (now 300) or central_lr (now 300)" in err
    assert "or set merge_lr = auto (now 1)" in err
    assert "The last good checkpoint is kept." in err
    status = json.loads(Path("run/status.json").read_text())
    rounds = [int(p.name) for p in Path("run/checkpoints").iterdir()]
    assert status["status"] == "diverged" == mixfl.load("run").status
    assert 1 < status["round"] < 60
    assert max(rounds) == status["round"] - 1
    rows = mixfl.load("run").metrics
    assert len(rows) == max(rounds)
    assert all(math.isfinite(row["eval/loss"]) for row in rows)
    assert mixfl.load("run").params is None
    # The same settings lead to the same end, from the checkpoint that was kept.
    code, err = mixfl_command(*run, "--resume")
    assert code == 3
    assert f"going on from the checkpoint of round {max(rounds)}" in err


# A full disk


def train(out, resume=False):
    problem, rounds = tiny_problem.problem, 3
    return mixfl.train(
        problem, "central", out=out, rounds=rounds, checkpoint_every=1, resume=resume
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    train(out)
    return out


def timeless(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def assert_same(out, whole):
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert timeless(out) == timeless(whole)


def assert_nothing_half_written(out):
    assert not list(out.rglob("*.partial"))
    assert not list(out.rglob("*tmp*"))
    metrics = out / "metrics.jsonl"
    if metrics.exists():
        assert metrics.read_text() == "" or metrics.read_text().endswith("\n")
        assert len(timeless(out)) == len(reading.read_metrics(out))


# Of a run of 3 rounds: config, origin, metrics, 2 events; status; 3 rows twice, 3 manifests of
# checkpoints and 3 times status; model, status.
WRITES = 20


def test_writes_are_counted(monkeypatch, folder):
    calls = []
    monkeypatch.setattr(os, "fsync", calls.append)
    train(folder / "run")
    assert len(calls) == WRITES


@pytest.mark.parametrize("nth", range(WRITES))
def test_disk_full_at_the_nth_write(nth, whole, monkeypatch, folder):
    """All but the last byte gets to the disk, then there is no space left."""
    out, calls, real = folder / "run", iter(range(10000)), os.fsync

    def fsync(number):
        if next(calls) < nth:
            return real(number)
        os.truncate(number, max(0, os.fstat(number).st_size - 1))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(MixflError, match=r"No space left on device.*--resume") as error:
            train(out)
    assert error.value.exit_code == 2
    assert_nothing_half_written(out)
    train(out, resume=True)
    assert_same(out, whole)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # no file may grow beyond this
from mixfl.cli import main
main()
"""


@pytest.mark.system
@pytest.mark.parametrize(("every", "what"), [(2, "checkpoint of round 2"), (9, "metrics.jsonl")])
def test_disk_full_in_a_process(every, what, mixfl_command, folder):
    """Errors of the system itself, in Orbax's threads too."""
    run = [*RUN, "--rounds", "8", "--set", f"checkpoint_every={every}", "--out"]
    limited = [sys.executable, "-c", LIMITED, *run, "run"]
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # it warns that it can't write
    done = subprocess.run(limited, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    (message,) = done.stderr.splitlines()
    assert what in message
    assert "could not be written" in message
    assert "--resume" in message
    assert_nothing_half_written(folder / "run")
    assert mixfl_command(*run, "run", "--resume")[0] == 0
    assert mixfl_command(*run, "whole")[0] == 0
    assert_same(folder / "run", folder / "whole")


# Parsers: whatever they are given, a value or a MixflError


def only_mixfl_errors(function, *arguments):
    try:
        return function(*arguments)
    except MixflError as error:
        assert str(error)
        return error


@given(st.lists(st.text() | st.from_regex(r"[a-z_]{1,9}=.*", fullmatch=True), max_size=4))
@example(["a=" + "[" * 10000])
@example(["a=" + "1" * 5000])
@example(["a=1\nb=2"])
def test_assignments(texts):
    found = only_mixfl_errors(parse_assignments, texts)
    if not isinstance(found, MixflError):
        assert found.keys() == {text.partition("=")[0].strip() for text in texts}
        assert len(found) == len(texts)


@given(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.integers() | st.floats() | st.booleans())
def test_assigned_numbers_are_numbers(key, value):
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    (found,) = parse_assignments([f" {key} = {text} "]).values()
    assert type(found) is type(value)
    assert found == value or value != value


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | st.dates() | st.complex_numbers() | st.sampled_from([np.zeros(2), np.int64(3), len]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
)  # fmt: skip


@given(st.sampled_from(sorted(KEYS)), anything)
@example("client_lr", 10**400)
@example("rounds", 10**5000)
@example("rounds", 1 << 63)
def test_settings_take_valid_values_only(key, value):
    found = only_mixfl_errors(lambda: mixfl.Settings(**{key: value}))
    if isinstance(found, MixflError):
        assert key in str(found) or "weighting" in str(found)
    else:
        kept = getattr(found, key)
        assert any(allows(t, kept) for t in members(key)), kept


def members(key):
    """The types that a key's value may have."""
    hint = field_types(mixfl.Settings)[key]
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)


def allows(type, value):
    """Written again, without the library that checks the settings."""
    if get_origin(type) is Literal:
        return value in get_args(type)
    if get_origin(type) is Callable:
        return callable(value)
    if get_origin(type) is not Annotated:
        return isinstance(value, type)
    kind, meta = get_args(type)
    if kind is str:  # a schedule
        return isinstance(value, str) and ("(" in value or value == "auto")
    return (
        builtins.type(value) is kind
        and (LARGEST_INT if kind is int else LARGEST_FLOAT) >= abs(value)
        and (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.lt is None or value < meta.lt)
    )


def valid(key):
    """Values that the key allows."""
    strategies = []
    for type in members(key):
        if get_origin(type) is Literal:
            strategies.append(st.sampled_from(get_args(type)))
        elif get_origin(type) is Annotated:
            kind, meta = get_args(type)
            if kind is str:
                strategies.append(st.sampled_from(["cosine(0.1, 500)", "linear(0.2, 0.1, 50)"]))
                continue
            least = meta.ge if meta.gt is None else meta.gt
            strategies.append(
                st.integers(least, meta.le)
                if kind is int
                else st.floats(
                    least, meta.le if meta.lt is None else meta.lt, allow_infinity=False,
                    exclude_min=meta.gt is not None, exclude_max=meta.lt is not None,
                )
            )  # fmt: skip
        elif type is str:
            strategies.append(st.text())
    return st.one_of(strategies)


@given(st.fixed_dictionaries({}, optional={key: valid(key) for key in KEYS}))
@settings(max_examples=50)
def test_config_survives_toml(tmp_path_factory, keys):
    s = mixfl.Settings(**keys)
    config = {"task": "own.py:problem", **{k: getattr(s, k) for k in keys}}
    file = tmp_path_factory.getbasetemp() / "config.toml"
    file.write_bytes(tomli_w.dumps(config).encode())
    try:
        head, found = read_config(file)
    except MixflError as error:
        assert "was a function in a Python program" in str(error)
        return
    assert head == {"task": "own.py:problem"}
    assert mixfl.Settings(**found) == s


specs = st.text() | st.from_regex(r"(adam|sgd|lamb)\([a-z0-9_=.,*\[\]{}'()-]*\)?", fullmatch=True)


@given(specs)
@example("sgd(momentum=0.9)")
@example("sgd(**{'momentum': 0.9})")
@example("__import__('os').system('x')")
@example("\0")
def test_optimizers_are_parsed_and_nothing_is_run(spec):
    found = only_mixfl_errors(optimizers.parse, spec)
    if not isinstance(found, MixflError):
        factory, arguments = found
        assert factory.__name__ in optimizers.known()
        assert all(isinstance(name, str) for name in arguments)


# Files with anything in them


def damaged(content: bytes):
    """Random bytes, or the right ones with some changed, or a part of them."""
    place = st.integers(0, len(content) - 1)
    changes = st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=3)

    def change(pairs):
        changed = bytearray(content)
        for at, byte in pairs:
            changed[at] = byte
        return bytes(changed)

    return st.binary() | changes.map(change) | place.map(lambda n: content[:n])


CONFIG = b"task = 'smile'\nrounds = 3\nclient_lr = 0.1\n"
ROWS = b"".join(b'{"round": %d, "eval/loss": 0.5, "name": "\\u00e9"}\n' % i for i in (1, 2, 3))
MODEL = model_file.model_bytes({"a": [np.zeros(2), np.ones((2, 2))], "b": np.zeros(())})


@given(damaged(CONFIG))
def test_any_config_file(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content)
    found = only_mixfl_errors(read_config, file)
    assert str(file) in str(found) or isinstance(found, tuple)


@given(damaged(ROWS))
@example(b"[" * 100_000)
@example(b'{"round": ' + b"1" * 5000 + b"}")
@example(b"\xff\n")
def test_any_metrics_file(tmp_path_factory, content):
    out = tmp_path_factory.getbasetemp()
    (out / "metrics.jsonl").write_bytes(content)
    (out / "status.json").write_bytes(content)
    rows = reading.read_metrics(out)
    assert all(isinstance(row["round"], int) for row in rows)
    assert len(rows) <= content.count(b"\n") + 1
    assert isinstance(reading.read_status(out), dict)


@given(damaged(MODEL))
@example(save({"a": np.zeros(1)}, metadata={"paths": "[" * 100_000}))
@example(save({"a": np.zeros(1)}, metadata={"paths": "[]"}))
@example(save({"a": np.zeros(1)}, metadata={"paths": '{"a": 3}'}))
@example(save({"a": np.zeros(1), "b": np.zeros(1)}, metadata={"paths": '{"b": ["a", "c"]}'}))
def test_any_model_file(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "model.safetensors"
    file.write_bytes(content)
    found = only_mixfl_errors(model_file.load_model, file)
    assert not isinstance(found, MixflError) or f"{file} is damaged" in str(found)
    only_mixfl_errors(model_file.load_model, file, {"a": [np.zeros(2), np.ones((2, 2))]})


@given(st.data())
def test_any_store(tmp_path_factory, data):
    base = tmp_path_factory.getbasetemp()
    good, bad = base / "good", base / "bad"
    if not good.exists():
        rng = np.random.default_rng(0)
        columns = {"x": rng.normal(size=(9, 2)), "flag": rng.random(9) > 0.5}
        mixfl.ClientData.from_arrays(columns, client=np.arange(9) // 4).write(good)
        bad.mkdir()
    files = {p.name: p.read_bytes() for p in good.iterdir()}
    name = data.draw(st.sampled_from(sorted(files)))
    files[name] = data.draw(damaged(files[name]))
    for file, content in files.items():
        (bad / file).write_bytes(content)

    found = only_mixfl_errors(mixfl.ClientData.open, bad)
    if isinstance(found, MixflError):
        assert "is damaged" in str(found)
    else:
        assert found.examples.all().keys()
        assert len(found.sizes()) == len(found.ids)


@pytest.mark.parametrize(
    "optimizer",
    ["noisy_sgd", "lbfgs", "adam(b1='x')", "sgd(momentum={[]: 1})", "sgd(lr=1, lr=2)", "adam(1)"],
)
def test_an_optimizer_that_cannot_work_is_found_before_anything_is_written(optimizer, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(MixflError, match="opt"):
        mixfl.train(tiny_problem.problem, "pt", rounds=2, central_opt=optimizer, out=out)
    assert not out.exists()


def test_a_users_file_that_exits_is_an_error(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(MixflError, match=r"leaves\.py failed: SystemExit"):
        find(f"{tmp_path / 'leaves.py'}:problem")


def test_faces_of_one_label_are_an_error():
    from mixfl.tasks import smile

    with pytest.raises(MixflError, match="no smiling face"):
        smile.problem(smile.Options(image_size=10, clients=4, per_client=3, held_out=1))


def test_an_evaluation_that_was_never_finite_is_no_divergence(mixfl_command):
    task = own('return {"loss": (params["w"] - 1) ** 2}', 'return {"loss": float("nan"), "a": 1}')
    code, err = mixfl_command("run", task, "--algorithm", "pt", "--out", "run")
    assert code == 0
    assert "eval/loss of the initial model is not finite" in err
    assert [row["eval/loss"] for row in mixfl.load("run").metrics] == [None] * 4


def test_a_users_file_is_run_once_by_a_comparison(mixfl_command):
    task = own("import mixfl\n", "import mixfl\nopen('loaded', 'a').write('once ')\n")
    several = ("compare", task, "--algorithms", "fedavg,pt", "--out", "both", "--jobs", "1")
    code, _ = mixfl_command(*several)
    assert code == 0
    assert Path("loaded").read_text() == "once "


def test_running_out_of_memory_is_a_message(monkeypatch, mixfl_command):
    from mixfl.runs import plan as config

    def plan(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 51539607552 bytes.")

    monkeypatch.setattr(config, "plan", plan)
    code, err = mixfl_command("run", own(), "--algorithm", "pt", "--out", "run")
    assert code == 2
    assert "out of memory: lower" in err
