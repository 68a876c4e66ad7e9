"""Fewer messages from Orbax. When a read or write fails, mixfl raises an error that says so. Orbax
also abandons its other reads and writes, and each complains with a traceback from a thread, at once
or later."""

import functools
import logging
import sys

wanted = False  # set by prepare_process

ORBAX = ("orbax", "OCDBT", "tensorstore")


@functools.cache  # once per process
def silence_orbax() -> None:
    """After Orbax is imported: absl's logger must not exist before absl makes it."""
    hook = sys.unraisablehook

    def unraisable(error):
        if "Event loop is closed" not in str(error.exc_value):
            hook(error)

    sys.unraisablehook = unraisable
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(_not_orbax)


def _not_orbax(record: logging.LogRecord) -> bool:
    return not any(name in record.getMessage() for name in ORBAX)
