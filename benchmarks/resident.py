"""The resident size of this process (Linux, glibc)."""

import ctypes
import time
from pathlib import Path

SETTLED = 1.0  # seconds after which JAX has freed what it no longer needs


def trimmed_mb() -> float:
    """Without freed memory that the C library keeps."""
    time.sleep(SETTLED)
    ctypes.CDLL(None).malloc_trim(0)
    return _mb("VmRSS")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    """The largest size since `forget_peak`."""
    return _mb("VmHWM")


def _mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
