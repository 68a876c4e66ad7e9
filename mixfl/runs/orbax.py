"""What mixfl uses of Orbax: arrays and JSON in a folder. Orbax is imported when it is first needed,
so that a new run's first rounds need not wait for it."""

import errno
import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.process import quiet


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
    content = _checkpointer().restore(path, args=wanted)
    return content.state, content.meta


@functools.cache  # once per process
def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    if quiet.wanted:
        quiet.silence_orbax()
    # Of several processes, only this one writes checkpoints: Orbax must not wait for the others.
    this = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
    options: Any = dict(multiprocessing_options=alone)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(**options),
        state=ocp.StandardCheckpointHandler(**options), meta=ocp.JsonCheckpointHandler(**options),
    )  # fmt: skip
    return ocp.Checkpointer(handler, **options)


def reason(error: Exception) -> str:
    """Orbax's messages may be long: the system's words, if they are in it, or the first line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    codes = (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO,
        errno.EMFILE, errno.ENFILE, errno.ENOMEM,
    )  # fmt: skip
    system = [os.strerror(code) for code in codes if os.strerror(code) in str(error)]
    return system[0] if system else lines[0][:200]
