"""Frozen arrays in a deployment: server and nodes must have the same, so they compare digests.

If the problem has the arrays itself (or PyTorch modules have them), server and nodes have each made
them. If a function loads them, only the server calls it. A node then gets the arrays once, and
keeps them in its cache folder under their digest. Every message to a node names the digest, so a
process that has just started finds them there.
"""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from mixfl.deploy.flower.messages import Rejected, array, config, only_rejected, parsed
from mixfl.errors import MixflError
from mixfl.frozen import Frozen
from mixfl.problem import Problem
from mixfl.process.compilation_cache import own_cache
from mixfl.runs.model_file import load_model, model_bytes, model_paths, nested

MOST_KEPT = 4  # sets of arrays at a node
LACKS = RecordDict({"lacks": ConfigRecord({})})  # "send me the arrays"
SHA256 = re.compile(r"[0-9a-f]{64}")


def name(problem: Problem) -> ConfigRecord | None:
    """What every message to a node has, if the problem has frozen arrays."""
    if not problem.all_frozen:
        return None
    sent = problem.frozen.digest if is_sent(problem) else ""
    return ConfigRecord({"digest": problem.frozen_digest(), "sent": sent})


def is_sent(problem: Problem) -> bool:
    """Does the server send the arrays to nodes?"""
    return problem.frozen is not None and problem.frozen.loaded


OTHERS = (
    "the frozen arrays of this node are not the server's: load the same file at both, or give "
    "Problem(frozen=...) a function, which only the server calls"
)


def delivery(problem: Problem) -> RecordDict:
    """The message with the arrays."""
    tree = problem.frozen.arrays
    if not _plain(tree):
        raise MixflError(
            "frozen: nodes can be sent dicts, lists and tuples of arrays, no other kinds of trees. "
            "Let the function return such, and put the arrays in their places in the loss."
        )
    paths, record = model_paths(tree), name(problem)
    assert record is not None
    leaves = zip(paths, jax.tree.leaves(tree), strict=True)
    return RecordDict({
        "frozen": record,
        "arrays": ArrayRecord({n: array(leaf) for n, leaf in leaves}),
        "paths": ConfigRecord({"json": json.dumps(paths)}),
    })  # fmt: skip


def _plain(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(isinstance(k, str) and _plain(v) for k, v in tree.items())
    if type(tree) in (list, tuple):
        return all(map(_plain, tree))
    return isinstance(tree, jax.Array)


def digest_in(content: RecordDict) -> str:
    """What a message says about the arrays; empty if nothing."""
    record = content.get("frozen")
    return str(record.get("digest", "")) if isinstance(record, ConfigRecord) else ""


def at_node(problem: Problem, content: RecordDict) -> Problem | None:
    """The problem with the server's arrays; None if this node lacks them."""
    if not is_sent(problem):
        return problem
    try:
        (digest,) = config(content, "frozen", sent=str)
        if not SHA256.fullmatch(digest):
            raise Rejected("malformed", "the digest of the frozen arrays is none")
        file = _folder() / f"{digest}.safetensors"
        if "arrays" in content:
            _keep(file, _received(content), digest)
    except Rejected as rejected:
        raise MixflError(f"the server's message is not of this problem: {rejected}.") from None
    tree = _kept(file, digest)
    return None if tree is None else dataclasses.replace(problem, frozen=tree)


@only_rejected
def _received(content: RecordDict) -> Any:
    record, (text,) = content["arrays"], config(content, "paths", json=str)
    paths = json.loads(text)
    if not isinstance(record, ArrayRecord) or set(record) != set(paths):
        raise Rejected("malformed", "the frozen arrays are others than those announced")
    named = {
        n: parsed(a, jax.ShapeDtypeStruct(tuple(a.shape), np.dtype(a.dtype)), n)
        for n, a in record.items()
    }
    return nested(paths, named)


def _keep(file: Path, tree: Any, digest: str) -> None:
    if Frozen(tree).digest != digest:
        raise Rejected("malformed", "the frozen arrays do not have their digest")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(model_bytes(tree))
        os.replace(new.name, file)  # several nodes may share the folder
        others = sorted(file.parent.glob("*.safetensors"), key=lambda p: p.stat().st_mtime)
        for old in others[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise MixflError(
            f"the frozen arrays can't be kept in {file.parent}: {error.strerror}. Set "
            "XDG_CACHE_HOME to a folder that this node can write to."
        ) from None


def _kept(file: Path, digest: str) -> Any:
    """None if they are not there, or damaged."""
    with contextlib.suppress(MixflError):
        tree = load_model(file)
        if Frozen(tree).digest == digest:
            with contextlib.suppress(OSError):
                os.utime(file)  # the last one used is the last to go
            return tree
    return None


def _folder() -> Path:
    return own_cache() / "frozen"
