"""Compiles a round while the first model is drawn and `evaluate` is compiled. Tracing
stays in the caller's thread. The compiler alone runs in another.
"""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Ahead:
    """A program that is being compiled, or nothing."""

    def __init__(self) -> None:
        self.compiling: Future | None = None

    def start(self, traced: Any) -> None:
        """`traced`: what `trace` of a jitted function returned. JAX keeps what is compiled for
        when the function is called."""
        lowered = traced.lower()
        thread = ThreadPoolExecutor(1, "mixfl-compiling")
        self.compiling = thread.submit(lowered.compile)
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Until it is compiled. What failed fails again when the function is called."""
        if self.compiling is not None:
            with contextlib.suppress(Exception):
                self.compiling.result()
            self.compiling = None
