"""Reads the data of the coming rounds in a thread, while the current round computes."""

import queue
import threading
from collections.abc import Callable, Iterator


class Prefetch:
    """Iterates over `source` in a thread, at most `ahead` items ahead."""

    def __init__(self, source: Callable[[], Iterator], ahead: int = 2):
        self.items: queue.Queue = queue.Queue(ahead)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(source,), daemon=True)
        self.thread.start()

    def _run(self, source):
        try:
            for item in source():
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # handed to the consumer
            self._put((None, error))

    def _put(self, item) -> bool:
        while not self.stopped.is_set():
            try:
                self.items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self):
        while True:
            item, error = self.items.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    def close(self):
        self.stopped.set()
        self.thread.join()
