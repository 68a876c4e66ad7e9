"""Processes that a supervisor started, found again and ended safely.

What a supervisor starts carries a mark in its environment, and so does all that it starts in turn.
By the mark the next supervisor finds what an earlier one left behind: a number in a file could by
then be another process's. Signals go through a pidfd, so that the process that was looked at is
the one that gets it. Without /proc (not on Linux) nothing is found.
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
Found = Callable[[Path], bool]


def end_with(parent: int) -> Callable[[], None]:
    """To be called in a child before its program starts: kill -9 of the parent ends it too."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        if hasattr(libc, "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it has ended before the line above
                os._exit(1)

    return prepare


def started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def marked(mark: str) -> Found:
    wanted = f"{MARK}={mark}".encode()

    def found(process: Path) -> bool:
        return wanted in (process / "environ").read_bytes().split(b"\0")

    return found


def is_server(process: Path) -> bool:
    """Of a run, whichever it is."""
    return b"flwr-serverapp" in (process / "cmdline").read_bytes()


def serving(folder: Path) -> Found:
    """A run's server that holds the lock of the run's folder."""

    def found(process: Path) -> bool:
        if not is_server(process):
            return False
        lock = (folder / ".lock").stat()
        return any(os.path.samestat(lock, _stat(fd)) for fd in (process / "fd").iterdir())

    return found


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError:  # just closed
        return os.stat("/")


def running(wanted: Found) -> bool:
    return any(True for _ in _each(wanted))


def send(wanted: Found, number: int) -> int:
    """Sends a signal to each such process; how many there were."""
    count = 0
    for pidfd in _each(wanted):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, number)
            count += 1
    return count


def kill(wanted: Found, seconds: float = 10.0) -> int:
    """kill -9 of each such process, until none is left; how many there were."""
    count, end = 0, time.monotonic() + seconds
    while (more := send(wanted, signal.SIGKILL)) and time.monotonic() < end:
        count = max(count, more)
        time.sleep(0.02)
    return count


def _each(wanted: Found) -> Iterator[int]:
    """A pidfd of each such process of this user, but this one."""
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
        except OSError:  # it has ended, or is not ours to look at
            pass
        finally:
            os.close(pidfd)
