"""What the simulator chooses where the settings say `auto`: devices, tables, first layers."""

import os

import jax

from mixfl.algorithms.contract import Algorithm
from mixfl.engine import processes
from mixfl.engine.feeding import Feeder
from mixfl.engine.summing import small_model
from mixfl.errors import MixflError
from mixfl.forms.low_rank import first_layers, pays
from mixfl.forms.rows import tables, why_dense
from mixfl.optimizers import make
from mixfl.problem import Params, Problem
from mixfl.settings import Settings
from mixfl.trees import named_leaves

LARGE_PARAMETER = 2**20  # numbers; measured, see docs/simulator.md


def model_shapes(problem: Problem) -> Params | None:
    """None if init can't tell: the preflight says what is wrong with it."""
    try:
        return jax.eval_shape(problem.init, jax.random.key(0))
    except Exception:
        return None


def row_sparse_tables(problem: Problem, x: Params, algorithm: Algorithm, s: Settings) -> dict:
    """Per population's name, the tables of which its clients get only their rows."""
    if not any(t.rows for t in problem.populations):
        if s.tables == "rows":
            raise MixflError("tables = rows, but no term marks a table (rows=... of Federated).")
        return {}
    if why_dense(algorithm, s) or x is None:
        return {}
    return {term.name: tables(term, x) for term in problem.populations}


def low_rank_layers(
    problem: Problem, x: Params, algorithm: Algorithm, s: Settings, feeder: Feeder
) -> dict:
    """Per population's name, the weights that clients train in the low-rank form."""
    if s.first_layer == "plain" or not algorithm.feed.clients:
        return {}
    found: dict[str, list[str]] = {}
    exact = algorithm.feed.own and make(s.client_opt, s.client_lr).plain
    exact = exact and s.aggregation == "mean"
    for term, rows, steps in zip(problem.populations, feeder.batch, feeder.steps, strict=True):
        try:
            layers = first_layers(term, x, rows)
        except Exception:  # the preflight says what is wrong with the loss
            continue
        wanted = [n for n, v in layers.items() if s.first_layer == "low-rank" or pays(v, steps)]
        if exact and wanted:
            found[term.name] = wanted
    if s.first_layer == "low-rank" and not found:
        raise MixflError(
            "first_layer = low-rank, but no loss has a dense layer on raw inputs whose weights are "
            "used nowhere else, the clients' steps are not plain SGD on their own loss, or the "
            "aggregation is not the mean. Set first_layer = auto."
        )
    return found


def choose_devices(
    problem: Problem, x: Params, algorithm: Algorithm, s: Settings, low_rank: dict, feeder: Feeder
) -> int:
    """The devices that share a cohort. Where `auto` on a CPU (of each process):

    one where products are large enough to use all cores by themselves (large parameters, low-rank
    layers) and where there are no clients; all but one for small models, where reading takes nearly
    as long as training; otherwise all."""
    available, count = processes.available(), jax.process_count()
    if s.aggregation != "mean" and algorithm.feed.clients:
        return _one_device(s, count)
    if s.devices == "auto":
        if jax.default_backend() != "cpu":
            return available
        parameters = named_leaves(x)
        large = any(p.size >= LARGE_PARAMETER for p in parameters.values())
        if x is None or large or low_rank or not algorithm.feed.clients:
            return count
        small = all(
            small_model(parameters, feeder.most_rows(j) if t.name in feeder.tables else {})
            for j, t in enumerate(problem.populations)
        )
        return max(count, available - count) if small else available
    if s.devices % count:
        raise MixflError(
            f"devices = {s.devices}, but there are {count} processes: give a multiple of {count} "
            "(of each process as many are used)."
        )
    if s.devices > available:
        raise MixflError(
            f"devices = {s.devices}, but JAX has {available}. On a CPU, as many as wanted are made "
            "by the command line, or by jax.config.update('jax_num_cpu_devices', n) at the start "
            f"of a program ({os.cpu_count()} cores here)."
        )
    return s.devices


def _one_device(s: Settings, processes: int) -> int:
    """Where all uploads of a cohort are held at once."""
    chunked = s.cohort_chunk != "auto" and s.cohort_chunk < s.cohort_size
    if processes > 1 or s.devices not in ("auto", 1) or chunked:
        raise MixflError(
            f"aggregation = {s.aggregation} compares the changes of all clients in one place: set "
            "devices = 1 and leave cohort_chunk out, and train in one process."
        )
    return 1
