"""Python's garbage collector rests while a program is traced.

Tracing makes hundreds of thousands of objects that stay, and the collector would look through them
again and again: a fifth of the time of tracing a ResNet's round.
"""

import contextlib
import gc
import threading


class CollectorPaused(contextlib.ContextDecorator):
    """`with CollectorPaused():` also several at once, in several threads: the collector goes on
    after the last. If it was off before, it stays off."""

    lock = threading.Lock()
    inside = 0
    was_on = False

    def __enter__(self) -> None:
        with self.lock:
            if CollectorPaused.inside == 0:
                CollectorPaused.was_on = gc.isenabled()
                gc.disable()
            CollectorPaused.inside += 1

    def __exit__(self, *error) -> None:
        with self.lock:
            CollectorPaused.inside -= 1
            if CollectorPaused.inside == 0 and self.was_on:
                gc.enable()
