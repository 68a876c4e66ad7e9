"""Writing files so that they are either complete or unchanged."""

import contextlib
import errno
import os
from pathlib import Path

from mixfl.errors import MixflError


def append_whole(path: Path, content: bytes) -> None:
    """Appends all or nothing."""
    before = None
    try:
        before = path.stat().st_size
        with open(path, "ab", buffering=0) as file:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        if before is not None:
            with contextlib.suppress(OSError):
                os.truncate(path, before)
        raise disk_error(path, error) from None


def write_whole(path: Path, content: bytes) -> None:
    """Writes all or nothing: to another file, which is then renamed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise disk_error(path, error) from None


def write_over(path: Path, content: bytes) -> None:
    """Overwrites the file itself: a full disk has no room for a second one."""
    with open(path, "r+b", buffering=0) as file:
        file.write(content)
        file.truncate(len(content))


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_error(path: Path, error: OSError) -> MixflError:
    fix = "Free some space" if error.errno in FULL else "Fix that"
    return MixflError(
        f"{path} could not be written: {error.strerror or error}. {fix} (or choose another "
        "--out); --resume goes on from the last checkpoint."
    )
