"""A library leaves the process alone: importing and calling mixfl changes no hook, log level,
warning filter, signal handler, environment variable, JAX setting or allocator setting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import tiny_problem

SUPPORT = Path(tiny_problem.__file__).parent

# What a process has, as text. It is taken before and after `import mixfl` and a training.
PROBE = """
import ctypes, json, logging, os, signal, sys, threading, warnings

calls = []  # of mallopt


class Watched(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "mallopt":
            return lambda *arguments: calls.append(arguments) or 1
        return super().__getattr__(name)


ctypes.CDLL = Watched
# Third-party modules that mixfl uses, and their own side effects, come first.
import jax, numpy, optax, orbax.checkpoint, pyarrow, safetensors, tensorboardX


def taken():
    loggers = {name: logging.getLogger(name) for name in sorted(logging.root.manager.loggerDict)}
    loggers["root"] = logging.root
    return {
        "hooks": [repr(h) for h in (sys.excepthook, sys.unraisablehook, threading.excepthook,
                                    sys.displayhook, sys.breakpointhook)],
        "warnings": [repr(warnings.showwarning), repr(warnings.filters)],
        "signals": {str(n): repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())},
        "environment": dict(os.environ),
        "jax": {name: repr(value) for name, value in sorted(jax.config.values.items())},
        "loggers": {n: [l.level, repr(l.filters), repr(l.handlers), l.disabled, l.propagate]
                    for n, l in loggers.items()},
        "disabled below": logging.root.manager.disable,
        "mallopt": list(calls),
        "recursion": sys.getrecursionlimit(),
        "stdout": repr([sys.stdout, sys.stderr]),
    }


before = taken()
"""

IMPORT = """
import mixfl
for name in mixfl.__all__:
    getattr(mixfl, name)
"""

TRAIN = """
sys.path.insert(0, sys.argv[1])
import tiny_problem
mixfl.train(tiny_problem.problem, "2wgt", rounds=2, out=sys.argv[2])
mixfl.load(sys.argv[2], best=True)  # from a checkpoint
"""

TELL = """
after = taken()
for name in after["loggers"].keys() - before["loggers"].keys():  # of modules imported meanwhile
    del after["loggers"][name]
print(json.dumps([{k: [before[k], after[k]] for k in before if before[k] != after[k]}, calls]))
"""


def changes(code: str, *arguments) -> tuple[dict, list]:
    """What the code changed, with how it was and is, and the calls of mallopt."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "MLFLOW_"))}
    ended = subprocess.run(
        [sys.executable, "-c", PROBE + code + TELL, *map(str, arguments)],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return tuple(json.loads(ended.stdout.splitlines()[-1]))


AGAIN = """
entries = len(list(cache.glob("*-cache")))
compiled = []
jax.monitoring.register_event_listener(lambda name, **_: compiled.append(name))
jax.jit(lambda x: x * 3 + 1)(1.0)  # the program's own: not cached
assert len(list(cache.glob("*-cache"))) == entries > 10
assert not any("cache_hits" in name for name in compiled)
"""


def test_importing_and_training_change_nothing(tmp_path, monkeypatch):
    """But what a training compiles is cached on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = f"from pathlib import Path\ncache = Path({str(tmp_path / 'mixfl')!r})\n"
    code = IMPORT + TRAIN + cache + AGAIN
    assert changes(code, SUPPORT, tmp_path / "run") == ({}, [])
    # A second process compiles nothing that the first one did.
    hits = """
compiled = []
jax.monitoring.register_event_listener(lambda name, **_: compiled.append(name.split("/")[-1]))
"""
    more = "assert compiled.count('cache_hits') > 10 and 'cache_misses' not in compiled, compiled\n"
    assert changes(IMPORT + hits + TRAIN + more, SUPPORT, tmp_path / "run 2") == ({}, [])


def test_a_cache_of_the_users_own_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "unused"))
    own = f"jax.config.update('jax_compilation_cache_dir', {str(tmp_path / 'own')!r})\n"
    own += "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\nbefore = taken()\n"
    assert changes(own + IMPORT + TRAIN, SUPPORT, tmp_path / "run") == ({}, [])
    assert list((tmp_path / "own").glob("*-cache"))
    assert not (tmp_path / "unused" / "mixfl").exists()


# The same for a loss in PyTorch, which torchax compiles. PyTorch imports sympy when it likes.
PYTORCH = """
import sympy, torch

without_torch = taken
taken = lambda: without_torch() | {
    "torch": [torch.backends.mha.get_fastpath_enabled(), torch.initial_seed()]
}
before = taken()
import mixfl.pytorch

model = mixfl.pytorch.Model(lambda: torch.nn.Linear(3, 1))
loss = model.loss(lambda net, batch: net(batch["x"])[:, 0] ** 2)
clients = mixfl.ClientData.from_arrays({"x": numpy.eye(3, dtype=numpy.float32)}, [0, 1, 1])
problem = mixfl.Problem(model.init, [mixfl.Federated(loss, clients)])
assert "torchax" not in sys.modules
mixfl.train(problem, "fedavg", rounds=1, cohort_size=2)
assert "torchax" in sys.modules and not problem.terms[0].loss.notes
"""


def test_compiling_pytorch_changes_nothing():
    assert changes(IMPORT + PYTORCH) == ({}, [])


def test_prepare_process_changes_what_it_says(tmp_path, monkeypatch):
    """And the probe would have noticed."""
    prepare = IMPORT + "mixfl.prepare_process(devices=3)\nassert jax.device_count() == 3\n"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    changed, calls = changes(prepare + TRAIN, SUPPORT, tmp_path / "run")
    assert changed.keys() == {"hooks", "warnings", "jax", "loggers", "mallopt"}
    assert {option for option, _ in calls} == {-1, -2, -4, -8}
    before, now = changed["jax"]
    assert {k for k in now if now[k] != before[k]} == {
        "jax_compilation_cache_dir", "jax_cpu_enable_async_dispatch", "jax_num_cpu_devices",
        "jax_persistent_cache_min_compile_time_secs",
    }  # fmt: skip
    assert now["jax_compilation_cache_dir"] == repr(str(tmp_path / "mixfl"))
