"""What mixfl may change about the process it runs in, and nothing else in mixfl does.

Importing or calling mixfl changes no hook, log level, warning filter or allocator setting. The
command line, its worker processes and a program that wants the same speed call `prepare_process`.
"""

import contextlib
import os
from typing import Literal

from mixfl.process.memory import keep_freed_memory

MOST_DEVICES = 64


def prepare_process(devices: int | Literal["auto"] = "auto") -> None:
    """Sets up this process as the command line does. Call it first, before anything uses JAX.

    - Freed memory is kept for the next round (memory.py); rounds of large models are faster.
    - Compiled programs are cached on disk, and damaged entries are removed (compilation_cache.py).
    - JAX gets `devices` CPU devices; `auto`: one per core. A program on one of them runs in the
      thread that calls it, whose memory is kept.
    - Log messages from Orbax that repeat an error mixfl raises anyway are not shown (quiet.py).

    All of this is for the whole process and stays until it ends. Calling it again does no harm.

    >>> mixfl.prepare_process()  # doctest: +SKIP
    """
    keep_freed_memory()
    import jax

    from mixfl.process import quiet
    from mixfl.process.compilation_cache import keep_programs

    quiet.wanted = True
    keep_programs()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    count = cores() if devices == "auto" else devices
    with contextlib.suppress(RuntimeError):  # JAX has started, and its devices are fixed
        jax.config.update("jax_num_cpu_devices", min(max(count, 1), MOST_DEVICES))


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
