"""Several processes, on one host or several, that train one model together (docs/scaling.md).

Each runs the same program on its own part of every cohort; jax.distributed connects them. Only
process 0 prints, evaluates and writes. Whatever one process finds out or decides (an error, to
stop, where to continue), all must know at the same point of the program. If one just left, the
others would wait for it in the next sum over clients.
"""

import functools
import json
import os
import sys
import threading
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mixfl.errors import Diverged, MixflError

COORDINATOR, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
WAIT, WAIT_SECONDS = "MIXFL_WAIT_SECONDS", 300
FAILED = (jax.errors.JaxRuntimeError, ValueError)  # what JAX raises if a sum failed
HOW = (
    f"Start mixfl by srun or mpirun, or set {COORDINATOR}=HOST:PORT (of process 0), {PROCESSES} "
    f"and {PROCESS} (see docs/scaling.md)."
)


def start() -> None:
    """Joins the other processes, before JAX computes anything. The environment names them: in the
    variables above, or in those of SLURM, Open MPI and others, which jax.distributed reads."""
    wait = _number(WAIT, WAIT_SECONDS)
    address, count, index = os.environ.get(COORDINATOR), _number(PROCESSES), _number(PROCESS)
    # mixfl has its own signal handlers; JAX would take SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)

    # After its own timeout, JAX aborts the process with a C++ stack trace. This one is earlier.
    def alone():
        missing = f"of the {count} processes" if count else "of the processes"
        print(
            f"mixfl: some {missing} did not come to {address or 'process 0'} in {wait} seconds "
            f"({WAIT}): see that all were started, with different numbers, and can reach it.",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        os._exit(MixflError.exit_code)

    watch = threading.Timer(wait, alone)
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            address, count, index, initialization_timeout=2 * wait, shutdown_timeout_seconds=60
        )
    except Exception as error:  # from JAX, or from its code for clusters
        raise MixflError(f"the processes can't be connected: {error} {HOW}") from None
    finally:
        watch.cancel()


def _number(name: str, default: int | None = None) -> Any:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit():
        raise MixflError(f"{name}={text}: expected a whole number.")
    return int(text)


def first() -> bool:
    return jax.process_index() == 0


def devices(count: int) -> list:
    """`count` devices, the same number from each process."""
    processes = range(jax.process_count())
    each = count // len(processes)
    return [d for p in processes for d in jax.local_devices(process_index=p)[:each]]


def available() -> int:
    """The number of devices, if each process uses as many as the one with the fewest."""
    processes = range(jax.process_count())
    return len(processes) * min(len(jax.local_devices(process_index=p)) for p in processes)


def local(tree: Any) -> Any:
    """Turns arrays that every process has in full into arrays of this process alone."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda a: a.addressable_data(0), tree)


def gather(value: Any) -> list:
    """The values of all processes, in order. They travel as JSON."""
    if jax.process_count() == 1:
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.zeros(jax.process_count(), np.int32)
    sizes[jax.process_index()] = len(content)
    sizes = _add(sizes)
    room = 1 << int(sizes.max()).bit_length()  # few different sizes: each is compiled
    table = np.zeros((len(sizes), room), np.uint8)
    table[jax.process_index(), : len(content)] = content
    return [json.loads(row[:size].tobytes()) for row, size in zip(_add(table), sizes, strict=True)]


def share(tree: Any) -> Any:
    """Process 0's arrays, bit for bit. The others pass arrays of the same shapes."""
    if jax.process_count() == 1:
        return tree

    def one(leaf):
        array = np.asarray(leaf)
        content = np.frombuffer(array.tobytes(), np.uint8)
        content = _add(content if first() else np.zeros_like(content))
        return jax.numpy.asarray(np.frombuffer(content, array.dtype).reshape(array.shape))

    return jax.tree.map(one, tree)


def _add(array: np.ndarray) -> np.ndarray:
    """The sum of the processes' arrays."""
    mesh, add = _adder()
    whole = jax.make_array_from_process_local_data(NamedSharding(mesh, P("processes")), array[None])
    try:
        return np.asarray(add(whole))
    except FAILED as error:
        raise lost(error) or error from None


@functools.cache
def _adder():
    """Uses one device of each process, since processes may have different numbers of devices."""
    mesh = Mesh(np.array(devices(jax.process_count())), ("processes",))
    add = jax.shard_map(
        lambda a: jax.lax.psum(a[0], "processes"), mesh=mesh, in_specs=P("processes"),
        out_specs=P(), check_vma=False,
    )  # fmt: skip
    return mesh, jax.jit(add)


class Together:
    """`with Together() as shared:` if one process fails, all of them do.

    An error in one is raised in all at the end of the block. Without an error, all have process 0's
    `shared.value` afterwards. It travels as JSON.
    """

    def __init__(self):
        self.value: Any = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if jax.process_count() == 1 or (error and not isinstance(error, Exception)):
            return
        told = None
        if error is not None:
            told = [str(error) or kind.__name__, getattr(error, "round", None)]
        answers = gather([self.value, told])
        if error is not None:
            error.everywhere = True
            return
        for process, (_, other) in enumerate(answers):
            if other is not None:
                raise _elsewhere(process, *other)
        self.value = answers[0][0]


def _elsewhere(process: int, message: str, round: int | None) -> MixflError:
    text = f"process {process}: {message}"
    error = MixflError(text) if round is None else Diverged(text, round)
    error.everywhere = True
    return error


def lost(error: Exception) -> MixflError | None:
    """The message if a sum over the processes failed; None if it is another error."""
    sums = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
    if jax.process_count() == 1 or not sums:
        return None
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return MixflError(
        "a sum over the processes failed, as when one of them has ended (look at the output of the "
        f"others): {lines[0][:200]}. The same command with --resume goes on from the last "
        "checkpoint."
    )
