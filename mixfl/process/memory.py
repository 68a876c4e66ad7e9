"""Keeps freed memory for the next round.

A round allocates and frees buffers of tens of megabytes. By default glibc returns each to the
system, and the next round pays for fresh pages, which costs more than the arithmetic: adding 1 to
42 MB of floats took 25 ms instead of 4 on a virtual machine with two Zen 3 cores.

With models of tens of megabytes, a round's buffers are one block of hundreds. Such blocks are
returned after all (`return_large_blocks`): on a heap that is never returned, the next one may not
fit where the last one was, and the process would hold both.

What compiling has used is returned too, once (`return_freed_memory`): it is hundreds of megabytes
in small pieces, among which a round's buffers find no place.

The heap gets huge pages, where the system allows programs to ask for them: a round goes through
megabytes again and again, and with small pages the processor spends time looking up
addresses (a round of a ResNet took 0.92 s of processor time in place of 0.99).

Threads have heaps of their own ("arenas"). On one heap, all that compile wait for each other, and
leave so many small pieces that later rounds wait too: the first start of a GPT took 11 s in place
of 6, and its rounds 370 ms in place of 245; those of an MLP 32 in place of 18. But only the main
thread's heap holds blocks of 64 MB: other threads get fresh pages for each (a round of the smile
task took 55 ms in place of 32). So rounds on one device run in the thread that calls them
(`prepare_process`).

Call it early, before JAX starts.
"""

import ctypes
import functools

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -3, -4, -8
LARGE_BLOCK = 32 << 20  # bytes; glibc takes no larger number
MADV_HUGEPAGE, HUGE_PAGE = 14, 2 << 20
AREA = 1 << 30  # of the heap with huge pages; what is never used costs nothing
ARENAS = 256  # more than a process has threads


@functools.cache
def keep_freed_memory() -> bool:
    """Once per process. True if the C library is glibc; with any other, nothing happens."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 (raises if it is another library)
        settings = (
            (M_ARENA_MAX, ARENAS),
            (M_MMAP_MAX, 0),  # large blocks come from the heap too
            (M_TRIM_THRESHOLD, 2**31 - 1),  # and the heap does not shrink
            (M_TOP_PAD, 64 << 20),
        )
        kept = all([libc.mallopt(option, value) == 1 for option, value in settings])
        if kept:
            use_huge_pages(libc)
        return kept
    except (OSError, AttributeError):
        return False


def use_huge_pages(libc: ctypes.CDLL) -> None:
    """For the next AREA bytes of the heap. Nothing happens if there is no such space, or if the
    system has no huge pages."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(AREA)  # from the top of the heap, where it stays after `free`
    if block:
        begin = -(-block // HUGE_PAGE) * HUGE_PAGE
        libc.madvise(begin, block + AREA - begin, MADV_HUGEPAGE)
        libc.free(block)


def return_large_blocks() -> bool:
    """In a process that keeps freed memory. True if blocks of LARGE_BLOCK and more are returned."""
    if not _kept():
        return False
    libc = ctypes.CDLL(None)
    settings = ((M_MMAP_THRESHOLD, LARGE_BLOCK), (M_MMAP_MAX, 2**16))
    return all([libc.mallopt(option, value) == 1 for option, value in settings])


def return_freed_memory() -> bool:
    """Returns what is free at the moment, in a process that keeps freed memory. True if it does."""
    if not _kept():
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


def _kept() -> bool:
    return bool(keep_freed_memory.cache_info().currsize) and keep_freed_memory()
