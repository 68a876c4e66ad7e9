"""How large a reply may be, and assembling a reply from its objects within that limit.

Flower sends a message as a tree of objects: the message, its records, their arrays, the arrays'
chunks. An array lists its chunks by number and may list each any number of times, so a short reply
can declare a terabyte. Here objects are counted as they arrive, and the arrays' lengths are added
up before anything is inflated.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Message
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from mixfl.aggregation import packing
from mixfl.aggregation.wire import TREES, Sent
from mixfl.deploy.flower.messages import Rejected
from mixfl.forms.rows import Table

SMALLEST_CHUNK = 1 << 18  # bytes; Flower's own chunks are of 5 MiB
LEVELS = (  # the kinds of objects at each level of a message's tree
    {"Message"}, {"RecordDict"}, {"ArrayRecord", "ConfigRecord", "MetricRecord"}, {"Array"},
    {"ArrayChunk"},
)  # fmt: skip


class Bounds(NamedTuple):
    """The most that a reply may have."""

    objects: int
    arrays: int  # bytes of data, counting each repetition
    text: int  # bytes of everything else: heads, names, numbers


def bounds(sizes: Iterable[tuple[str, int]]) -> Bounds:
    """Bounds on a reply with arrays of these names and sizes in bytes."""
    sizes = list(sizes)
    chunks = sum(1 + size // SMALLEST_CHUNK for _, size in sizes)
    objects = 16 + len(sizes) + chunks
    text = (64 << 10) + 512 * objects + sum(16 * len(name) for name, _ in sizes)
    return Bounds(objects, sum(size for _, size in sizes), text)


def upload_bounds(like: Sent) -> Bounds:
    """Codes take at most as many bytes as the arrays of `like`."""
    trees = {name: getattr(like, name) for name in TREES if getattr(like, name) is not None}
    return bounds((n, sum(map(_bytes, jax.tree.leaves(tree)))) for n, tree in trees.items())


def hello_bounds(tables: Mapping[str, Mapping[str, Table]]) -> Bounds:
    """Bounds on what a node says about itself: at most all rows of each table."""
    most = packing.MOST_BYTES
    every = [bounds((n, most * t.rows) for n, t in own.items()) for own in tables.values()]
    return Bounds(*(max(column) for column in zip(*every, strict=True)))


def _bytes(leaf: Any) -> int:
    shaped = jax.eval_shape(lambda: leaf) if not hasattr(leaf, "shape") else leaf
    return int(np.prod(shaped.shape, dtype=np.int64)) * np.dtype(shaped.dtype).itemsize


def tree_ids(tree: ObjectTree, most: int) -> list[str]:
    """The distinct objects of an announced tree, children first."""
    ids: dict[str, None] = {}
    level, seen = [tree], 0
    for _ in LEVELS:
        seen += len(level)
        if seen > 4 * most:  # equal objects may occur several times
            break
        ids.update((node.object_id, None) for node in level)
        level = [child for node in level for child in node.children]
    if level or len(ids) > most:
        raise Rejected("oversized", f"its reply has more than the {most} objects allowed")
    return list(reversed(ids))


class Reply:
    """The part of a reply that has arrived so far."""

    def __init__(self, root: str, tree: ObjectTree, bounds: Bounds):
        self.root, self.bounds = root, bounds
        self.missing = tree_ids(tree, bounds.objects)
        self.contents: dict[str, bytes] = {}
        self.arrays, self.text = bounds.arrays, bounds.text  # bytes that may still arrive

    @property
    def left(self) -> int:
        """Bytes that the next object may have."""
        return self.arrays + self.text

    def add(self, object_id: str, content: bytes) -> None:
        if len(content) > self.left:
            raise too_long(self.bounds)
        part = parted(content)
        data = part.length if part.kind == "ArrayChunk" else 0
        self.arrays -= data
        self.text -= len(content) - data
        if min(self.arrays, self.text) < 0:
            raise too_long(self.bounds)
        self.contents[object_id] = content
        self.missing.remove(object_id)

    def message(self) -> Message:
        """The reply as a Flower message, once nothing is missing."""
        try:
            self._check()
            return inflate_object_from_contents(self.root, self.contents)  # type: ignore[return-value]
        except Rejected:
            raise
        except Exception as error:  # a forged part can make json and flwr raise anything
            raise unreadable(error) from None

    def _check(self) -> None:
        """Checks the kinds of objects at each level, and the total size of the arrays."""
        level, total = [self.root], 0
        for kinds in LEVELS:
            below: dict[str, None] = {}
            for object_id in level:
                part = parted(self.contents[object_id])
                if part.kind not in kinds:
                    raise Rejected("malformed", "its reply does not have a message's structure")
                if part.kind == "Array":
                    total += self._inflated(object_id, part)
                below.update(dict.fromkeys(part.children))
            level = list(below)
        if level:
            raise Rejected("malformed", "its reply does not have a message's structure")
        if total > self.bounds.arrays:
            raise too_long(self.bounds)

    def _inflated(self, object_id: str, array: "Part") -> int:
        """The bytes of an array, counting each chunk as often as it is listed."""
        content = self.contents[object_id]
        sizes = [parted(self.contents[chunk]).length for chunk in array.children]
        listed = json.loads(content[len(content) - array.length :])["arraychunk_ids"]
        return sum(sizes[i] for i in listed)


class Part(NamedTuple):
    """What an object's head says about it."""

    kind: str
    children: list[str]
    length: int  # of its body, as received


def parted(content: bytes) -> Part:
    end = content.find(HEAD_BODY_DIVIDER)
    head = content[: max(end, 0)].decode(errors="replace").split(HEAD_VALUE_DIVIDER)
    if len(head) != 3:
        raise Rejected("malformed", "a part of its reply has no head")
    return Part(head[0], [c for c in head[1].split(",") if c], len(content) - end - 1)


def too_long(most: Bounds) -> Rejected:
    return Rejected("oversized", f"its reply is longer than the {most.arrays + most.text} bytes "
                    "allowed")  # fmt: skip


def unreadable(error: Exception) -> Rejected:
    return Rejected("malformed", f"its reply can't be read ({type(error).__name__})")
