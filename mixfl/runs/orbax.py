"""What is used of Orbax: arrays and JSON in a folder. Imported when it is first needed: a new
run's first rounds need not wait for it."""

import errno
import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np


def save(path: Path, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    from orbax.checkpoint import args

    content = args.Composite(state=args.StandardSave(arrays), meta=args.JsonSave(meta))
    path.parent.mkdir(parents=True, exist_ok=True)
    _checkpointer().save(path, args=content)


def meta(path: Path) -> dict[str, Any]:
    from orbax.checkpoint import args

    return _checkpointer().restore(path, args=args.Composite(meta=args.JsonRestore())).meta


def load(path: Path, like: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays with the names, shapes and dtypes of `like`, and the JSON."""
    from orbax.checkpoint import args

    wanted = args.Composite(state=args.StandardRestore(like), meta=args.JsonRestore())
    found = _checkpointer().restore(path, args=wanted)
    return found.state, found.meta


@functools.cache  # once per process
def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    _hush()
    # Of several processes, only this one has checkpoints: Orbax must not wait for the others.
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
    options: Any = dict(multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(**options),
        state=ocp.StandardCheckpointHandler(**options), meta=ocp.JsonCheckpointHandler(**options),
    )  # fmt: skip
    return ocp.Checkpointer(handler, **options)


def _hush() -> None:
    """What fails is raised. But when one read or write fails, Orbax leaves the others alone,
    and each of these complains with a traceback from a thread, then or later."""
    hook = sys.unraisablehook

    def unraisable(error):
        if "Event loop is closed" not in str(error.exc_value):
            hook(error)

    sys.unraisablehook = unraisable
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    own = ("orbax", "OCDBT", "tensorstore")
    logging.getLogger("asyncio").addFilter(lambda r: not any(n in r.getMessage() for n in own))


def reason(error: Exception) -> str:
    """The system's words where they are in the message, which may be long; or its first line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    codes = (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO,
        errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    )  # fmt: skip
    found = [os.strerror(code) for code in codes if os.strerror(code) in str(error)]
    return found[0] if found else lines[0][:200]
