"""Ctrl-C and SIGTERM save the run and stop it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """In the main thread, Ctrl-C and SIGTERM ask the loop to save and stop; a second one stops at
    once. The handlers from before are put back at the end."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handler(number, frame):
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        os.write(2, b"\nstopping after this round; Ctrl-C again stops at once\n")

    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, old in before.items():
            signal.signal(number, old)
