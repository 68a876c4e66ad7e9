"""The process itself: the start of JAX, the cores it may use, and how it ends."""

import contextlib
import os
import sys


def cores() -> int:
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found or 1


def start_jax(keys, distributed: bool = False) -> None:
    """What must be said before JAX starts: where programs are kept, and its CPU devices."""
    from mixfl.process.memory import keep_freed_memory

    keep_freed_memory()
    import jax

    from mixfl.process.compilation_cache import keep_programs

    keep_programs()
    wanted = keys.get("devices", "auto")
    devices = wanted if isinstance(wanted, int) else cores()
    with contextlib.suppress(RuntimeError):  # JAX runs already, where another program calls
        jax.config.update("jax_num_cpu_devices", min(max(devices, 1), 64))
    if distributed:
        from mixfl.engine import processes

        processes.start()


def connected() -> bool:
    """Is it one of several processes?"""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def end(code: int, everywhere: bool = False) -> None:
    """Ends this process; at once where others wait for it in a sum, which ends them too."""
    if connected() and not everywhere:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
