"""Keeps freed memory for the next round.

A round allocates and frees buffers of tens of megabytes. By default glibc returns each to the
system, and the next round pays for fresh pages, which costs more than the arithmetic: adding 1 to
42 MB of floats took 25 ms instead of 4 on a virtual machine with two Zen 3 cores.

Call it early: threads that have allocated memory before keep their own arenas, which these settings
don't reach (called late, a round of the smile task took 160 ms instead of 70).
"""

import ctypes
import functools

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


@functools.cache
def keep_freed_memory() -> bool:
    """Once per process. True if the C library is glibc; with any other, nothing happens."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 (raises if it is another library)
        settings = (
            (M_ARENA_MAX, 1),  # other arenas can't hold large blocks
            (M_MMAP_MAX, 0),  # large blocks come from the heap too
            (M_TRIM_THRESHOLD, 2**31 - 1),  # and the heap does not shrink
            (M_TOP_PAD, 64 << 20),
        )
        return all([libc.mallopt(option, value) == 1 for option, value in settings])
    except (OSError, AttributeError):
        return False
