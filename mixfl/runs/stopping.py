"""Ctrl-C and SIGTERM save the run and stop it. So does a file `stop` in its folder."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

STOP = "stop"  # a file in the run folder: `mixfl watch` or the user asks the run to stop
LOOK_SECONDS = 0.2  # between two looks for it


class Asked:
    """Has someone asked the run to stop?"""

    def __init__(self, folder: Path | None):
        self.signal = threading.Event()
        self.by_file = False
        self.file = folder / STOP if folder is not None else None
        self.looked = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if self.file is not None and not self.by_file and now - self.looked > LOOK_SECONDS:
            self.looked = now
            self.by_file = os.path.lexists(self.file)
        return self.by_file or self.signal.is_set()


@contextlib.contextmanager
def stop_requested(folder: Path | None = None) -> Iterator[Asked]:
    """In the main thread, Ctrl-C and SIGTERM ask the loop to save and stop; a second one stops at
    once. The handlers from before are put back at the end."""
    asked = Asked(folder)
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handler(number, frame):
        if asked.signal.is_set():
            raise KeyboardInterrupt
        asked.signal.set()
        os.write(2, b"\nstopping after this round; Ctrl-C again stops at once\n")

    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)
