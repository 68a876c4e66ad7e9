"""Finds the processes that a supervisor started, and ends them safely.

A supervisor puts a mark into the environment of each process it starts, and child processes
inherit it. The next supervisor finds leftovers by this mark. (A process id in a file would not do:
another process may have it by then.) Signals are sent through a pidfd, so the process that was
checked is the one that gets the signal. Without /proc (other systems than Linux), nothing is found.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MARK = "MIXFL_UP"
PR_SET_PDEATHSIG = 1
Test = Callable[[Path], bool]  # whether /proc/<pid> is a wanted process


def end_with(parent: int) -> Callable[[], None]:
    """For `preexec_fn`: makes the kernel kill the child when its parent ends, even by kill -9."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        if hasattr(libc, "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent ended before the line above
                os._exit(1)

    return prepare


def started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def marked(mark: str) -> Test:
    entry = f"{MARK}={mark}".encode()

    def has_mark(process: Path) -> bool:
        return entry in (process / "environ").read_bytes().split(b"\0")

    return has_mark


def is_server(process: Path) -> bool:
    """Whether it is the server of some run."""
    return b"flwr-serverapp" in (process / "cmdline").read_bytes()


def serving(folder: Path) -> Test:
    """The server that holds the lock of a run folder."""

    def holds_lock(process: Path) -> bool:
        if not is_server(process):
            return False
        lock = (folder / ".lock").stat()
        return any(os.path.samestat(lock, _stat(fd)) for fd in (process / "fd").iterdir())

    return holds_lock


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError:  # just closed
        return os.stat("/")


def running(wanted: Test) -> bool:
    return any(True for _ in _each(wanted))


def send(wanted: Test, number: int) -> int:
    """Sends a signal to each wanted process. Returns how many got it."""
    count = 0
    for pidfd in _each(wanted):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
            count += 1
    return count


def kill(wanted: Test, seconds: float = 10.0) -> int:
    """Sends SIGKILL to the wanted processes until none is left. Returns how many there were."""
    count, end = 0, time.monotonic() + seconds
    while (more := send(wanted, signal.SIGKILL)) and time.monotonic() < end:
        count = max(count, more)
        time.sleep(0.02)
    return count


def _each(wanted: Test) -> Iterator[int]:
    """A pidfd of each wanted process of this user, except this process."""
    own = os.getpid()
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if pid == own:
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            continue
        try:
            if process.stat().st_uid == os.getuid() and wanted(process) and started(pid):
                yield pidfd
        except OSError:  # it has ended, or we may not look at it
            pass
        finally:
            os.close(pidfd)
