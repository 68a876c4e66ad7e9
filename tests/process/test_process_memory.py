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


SCATTERED = """
import ctypes
from mixfl.process.memory import keep_freed_memory, return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
    ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p])

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

assert not return_freed_memory()  # nothing is kept yet
assert keep_freed_memory()
before, size = resident(), 1 << 20
blocks = [libc.malloc(size) for _ in range(101)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[::2]:
    libc.free(block)
kept = resident() - before
assert return_freed_memory()
print(kept / size, (resident() - before) / size)
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_what_is_free_between_other_blocks_is_returned():
    ended = subprocess.run([sys.executable, "-c", SCATTERED], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    kept, after = map(float, ended.stdout.split())
    assert kept > 95
    assert after < 65  # of 101 blocks, 50 are in use


def test_it_is_returned_once_for_each_program(monkeypatch):
    from layer_problem import problem
    from problems import settings

    from mixfl.algorithms import ALGORITHMS
    from mixfl.engine import Simulator

    calls = []
    monkeypatch.setattr("mixfl.engine.simulator.return_freed_memory", lambda: calls.append(1))
    p, s = problem(), settings(rounds=4, pretrain_rounds=2)
    for name, programs in (("fedavg", 1), ("pretrain", 2)):
        calls.clear()
        simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
        *_, last = simulator.rounds(simulator.init(), 0, 3)
        list(simulator.rounds(last.state, 3, 4))
        assert len(calls) == 2 * programs  # before it is compiled, and after


ARENAS = """
import ctypes, threading
from mixfl.process.memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.open_memstream.restype = ctypes.c_void_p
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]

def arenas():
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    file = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
    libc.malloc_info(0, file)
    libc.fclose(file)
    return text.value.count(b"<heap nr=")

assert keep_freed_memory()
every = threading.Barrier(40)
threads = [threading.Thread(target=lambda: (bytearray(10_000), every.wait())) for _ in range(40)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(arenas())
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_threads_have_heaps_of_their_own():
    ended = subprocess.run([sys.executable, "-c", ARENAS], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 40


FRESH_PAGES = """
import resource
import mixfl
mixfl.prepare_process()
import jax, jax.numpy as jnp

@jax.jit
def large(x):  # takes a block of 100 MB
    return jnp.tanh(x[:, None] * x) @ x

x = jnp.ones(5000)
for _ in range(3):
    large(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    large(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_a_program_on_one_device_keeps_its_large_blocks():
    """Elsewhere than on the main thread's heap, each would be 24 thousand new pages."""
    ended = subprocess.run([sys.executable, "-c", FRESH_PAGES], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 24_000
