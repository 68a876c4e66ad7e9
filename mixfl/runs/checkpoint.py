"""Checkpoints of a run's state, by Orbax.

Orbax writes beside and renames, so a checkpoint is there whole or not at all. What disks do to
files afterwards it does not notice; so each carries a digest of its contents, and a damaged one
is passed over for the one before it.
"""

import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.errors import MixflError

KEEP = 3


class AnotherModel(Exception):
    """A checkpoint that is whole, but not of this problem."""


class Checkpoints:
    def __init__(self, path: Path, note: Callable[[str], None]):
        self.path, self.note = path.absolute(), note
        self.path.mkdir(parents=True, exist_ok=True)

    @functools.cached_property
    def manager(self) -> Any:
        """Made when first needed: a new run's first rounds need not wait for Orbax' import."""
        import orbax.checkpoint as ocp

        _hush()
        # Of several processes, only this one has checkpoints: Orbax must not wait for the others.
        this = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=this, active_processes={this})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEEP, enable_async_checkpointing=False, create=False,
            cleanup_tmp_directories=True, multiprocessing_options=alone,
        )  # fmt: skip
        return ocp.CheckpointManager(self.path, options=options)

    def saved(self) -> bool:
        """Is there any checkpoint?"""
        return any(self.path.iterdir()) and self.manager.latest_step() is not None

    def save(self, round: int, state: Any, meta: dict[str, Any]) -> None:
        """`meta` is JSON: what the run must remember beside the state."""
        if self.manager.latest_step() == round:
            return
        from orbax.checkpoint import args

        leaves = _leaves(state)
        meta = {**meta, "arrays": _signature(leaves)}
        content = args.Composite(
            state=args.StandardSave(leaves),
            meta=args.JsonSave({**meta, "digest": _digest(leaves, meta)}),
        )
        try:
            self.manager.save(round, args=content)
        except Exception as error:  # whatever a full disk makes Orbax raise
            raise MixflError(
                f"the checkpoint of round {round} could not be written to {self.path}: "
                f"{_reason(error)}. Free some space and go on with --resume."
            ) from None

    def latest(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """(round, state, meta) of the newest checkpoint that is whole; None if there is none."""
        if not self.saved():
            return None
        from orbax.checkpoint import args

        leaves, structure = jax.tree.flatten(like)
        shapes = {_name(i): np.zeros(np.shape(a), a.dtype) for i, a in enumerate(leaves)}
        first = args.Composite(meta=args.JsonRestore())
        wanted = args.Composite(state=args.StandardRestore(shapes), meta=args.JsonRestore())
        rounds = sorted(self.manager.all_steps(), reverse=True)
        for round in rounds:
            try:
                found = self.manager.restore(round, args=first)
                saved, expected = found.meta["arrays"], _signature(shapes)
                if saved["digest"] == _digest({}, saved["names"]) and saved != expected:
                    raise AnotherModel
                found = self.manager.restore(round, args=wanted)
                digest = found.meta.pop("digest")
                whole = digest == _digest(found.state, found.meta)
                reason = "its contents have changed"
            except AnotherModel:
                raise MixflError(
                    f"the checkpoint of round {round} in {self.path} is of another model or "
                    "optimizer (other arrays): choose another --out."
                ) from None
            except Exception as error:  # whatever a damaged file makes Orbax raise
                whole, reason = False, _reason(error)
            if whole:
                state = [jax.numpy.asarray(found.state[_name(i)]) for i in range(len(leaves))]
                del found.meta["arrays"]
                return round, jax.tree.unflatten(structure, state), found.meta
            then = "starting anew" if round == rounds[-1] else "going back to the one before it"
            self.note(f"the checkpoint of round {round} is damaged ({reason}): {then}")
            shutil.rmtree(self.path / str(round), ignore_errors=True)
            self.manager.reload()
        return None

    def close(self) -> None:
        if "manager" in vars(self):
            self.manager.close()
        for left in self.path.glob("*.orbax-checkpoint-tmp"):  # of a save that failed
            shutil.rmtree(left, ignore_errors=True)


@functools.cache  # once per process
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


def _name(i: int) -> str:
    return f"{i:04d}"


def _leaves(state: Any) -> dict[str, np.ndarray]:
    return {_name(i): np.asarray(a) for i, a in enumerate(jax.tree.leaves(state))}


def _signature(leaves: dict[str, np.ndarray]) -> dict[str, Any]:
    """Shapes and dtypes; with a digest, so that damage is not taken for another model."""
    names = {name: [list(a.shape), str(a.dtype)] for name, a in leaves.items()}
    return {"names": names, "digest": _digest({}, names)}


def _digest(leaves: dict[str, np.ndarray], meta: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(leaves):
        array = np.ascontiguousarray(leaves[name])
        digest.update(f"{name} {array.dtype} {array.shape} {sys.byteorder}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    """The system's words where they are in the message, which may be long; or its first line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
    found = [os.strerror(code) for code in codes if os.strerror(code) in str(error)]
    return found[0] if found else lines[0][:200]
