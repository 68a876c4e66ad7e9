"""How the command line's process starts and ends."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from mixfl.process import cores, prepare_process

__all__ = ["connected", "cores", "end", "start_jax"]


def start_jax(keys: Mapping[str, Any], distributed: bool = False) -> None:
    """Before JAX computes anything: the process is prepared for the keys that the user gave."""
    devices = keys.get("devices", "auto")
    prepare_process(devices if isinstance(devices, int) else "auto")
    if distributed:
        from mixfl.engine import processes

        processes.start()


def connected() -> bool:
    """Is this one of several processes?"""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def end(code: int, everywhere: bool = False) -> None:
    """Ends this process. If other processes wait for it in a sum, it ends at once, which ends them
    too."""
    if connected() and not everywhere:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
