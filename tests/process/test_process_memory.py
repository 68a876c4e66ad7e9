"""Freed memory is kept for the next round, but not that of large models."""

import subprocess
import sys

import pytest

CODE = """
import ctypes
from mixfl.process.memory import LARGE_BLOCK, keep_freed_memory, return_large_blocks

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
    ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p])

def held():
    size = 3 * LARGE_BLOCK
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    before = resident()
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    return (resident() - before) / size

assert not return_large_blocks()  # nothing is kept yet
assert keep_freed_memory()
kept = held()
assert return_large_blocks()
libc.malloc_trim(0)
print(kept, held())
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_large_blocks_are_returned_if_asked_for():
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    kept, returned = map(float, ended.stdout.split())
    assert kept > 0.9
    assert returned < 0.1
