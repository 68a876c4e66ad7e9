"""What travels: arrays as records of Flower's, and the checks of what comes back.

An array is sent as its bytes, with its dtype and shape beside them. What arrives is compared with
what was expected (names, dtypes, shapes, and the length of the bytes) and then looked at where it
lies: no memory is taken for it, and nothing is unpickled.
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    no_object_id_recompute,
)

from mixfl.algorithms.contract import Message as Broadcast
from mixfl.algorithms.contract import Upload
from mixfl.errors import MixflError
from mixfl.forms.rows import Table
from mixfl.settings import Settings
from mixfl.trees import named_leaves, on_named

FORMAT = "mixfl.little-endian"
LARGEST = float(np.finfo(np.float32).max)
T = TypeVar("T")


class Rejected(Exception):
    """What arrived is not what was expected. `reason` is one word, for the metrics."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


def only_rejected(check: Callable[..., T]) -> Callable[..., T]:
    """Whatever else a client's odd values make a check raise is a rejection too."""

    @functools.wraps(check)
    def checked(*given, **more):
        try:
            with np.errstate(all="ignore"):
                return check(*given, **more)
        except Rejected:
            raise
        except Exception as error:
            raise Rejected("malformed", f"it is of odd values ({type(error).__name__})") from None

    return checked


# Arrays


def array(a: Any) -> Array:
    a = np.asarray(a)
    return Array(str(a.dtype), tuple(a.shape), FORMAT, a.tobytes())


def arrays(tree: Any) -> ArrayRecord:
    """A tree of parameters by their names."""
    named = named_leaves(tree)
    if len(named) < len(jax.tree.leaves(tree)):
        raise MixflError("two parameters have the same name: use no / in the keys of the model.")
    return ArrayRecord({name: array(leaf) for name, leaf in named.items()})


def parsed(given: Any, like: Any, name: str) -> np.ndarray:
    """The array of a record, which must be like `like` (a shape and a dtype)."""
    dtype, shape = np.dtype(like.dtype), tuple(like.shape)
    if not isinstance(given, Array) or given.stype != FORMAT:
        raise Rejected("malformed", f"'{name}' is not in the expected form")
    if given.dtype != str(dtype):
        raise Rejected("dtype", f"'{name}' has another dtype than {dtype}")
    if tuple(given.shape) != shape:
        raise Rejected("shape", f"'{name}' has another shape than {shape}")
    size = dtype.itemsize * math.prod(shape)
    if len(given.data) != size:
        raise Rejected("size", f"'{name}' has {len(given.data)} bytes, expected {size}")
    return np.frombuffer(given.data, dtype).reshape(shape)


def parsed_tree(record: Any, like: Any) -> Any:
    """The tree of a record of arrays, like the tree `like`."""
    expected = named_leaves(like)
    if not isinstance(record, ArrayRecord) or set(record) != set(expected):
        raise Rejected("malformed", "a record has other arrays than expected, or none")
    leaves = [parsed(record[name], leaf, name) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def numbers(record: Any, *names: str) -> list[float]:
    if not isinstance(record, MetricRecord) or set(record) != set(names):
        raise Rejected("malformed", "a record has other numbers than expected, or none")
    values: list[Any] = [record[name] for name in names]
    if not all(isinstance(v, int | float) for v in values):
        raise Rejected("malformed", "a list where a number was expected")
    if not all(abs(v) <= LARGEST for v in values):  # nor is NaN
        raise Rejected("nonfinite", "a number is not finite")
    return [float(v) for v in values]


def config(content: RecordDict, kind: str, **types: type) -> list[Any]:
    record = content.get(kind)
    if not isinstance(record, ConfigRecord) or not all(
        type(record.get(name)) is type_ for name, type_ in types.items()
    ):
        raise Rejected("malformed", f"the record '{kind}' is missing or incomplete")
    return [record[name] for name in types]


# What a client is, when it is asked: the first message


def hello(population: str, number: int, rows: Mapping[str, np.ndarray]) -> RecordDict:
    """`rows` has, per table, the rows that its data names: of others it needs nothing."""
    who = ConfigRecord({"population": population, "number": str(number)})  # up to 64 bits
    return RecordDict({"hello": who, "rows": ArrayRecord({n: array(a) for n, a in rows.items()})})


@only_rejected
def parsed_hello(
    content: RecordDict, tables: Mapping[str, Mapping[str, Table]]
) -> tuple[str, int, dict[str, np.ndarray]]:
    """`tables` has each population's."""
    population, number = config(content, "hello", population=str, number=str)
    if population not in tables:
        raise Rejected("malformed", "it is of no population of this problem")
    if not (number.isascii() and number.isdigit() and len(number) <= 20):
        raise Rejected("malformed", "its number is none")
    given, found = content.get("rows"), {}
    if not isinstance(given, ArrayRecord) or set(given) != set(tables[population]):
        raise Rejected("malformed", "it names rows of other tables than expected")
    for name, table in tables[population].items():
        count = given[name].shape[0] if len(given[name].shape) == 1 else 0
        if not 0 < count <= table.rows:
            raise Rejected("shape", f"it names {count} rows of '{name}'")
        ids = parsed(given[name], jax.ShapeDtypeStruct((count,), np.int32), name)
        if ids.min() < 0 or ids.max() >= table.rows or len(np.unique(ids)) < count:
            raise Rejected("malformed", f"it names rows that '{name}' has not, or some twice")
        found[name] = ids
    return population, int(number), found


def digest(rows: Mapping[str, np.ndarray]) -> int:
    """By which both sides know that they mean the same rows."""
    crc = 0
    for name in sorted(rows):
        crc = zlib.crc32(rows[name].tobytes(), zlib.crc32(name.encode(), crc))
    return crc


# A round


def cut(tree: Any, rows: Mapping[str, np.ndarray]) -> Any:
    """Of the tables, only the given rows."""
    return on_named(lambda table, ids: np.asarray(table)[ids], rows, tree)


def cut_shapes(tree: Any, rows: Mapping[str, np.ndarray]) -> Any:
    return on_named(
        lambda t, ids: jax.ShapeDtypeStruct((len(ids), *t.shape[1:]), t.dtype), rows, tree
    )


def task(round: int, message: Broadcast, rows: Mapping[str, np.ndarray]) -> RecordDict:
    """What a client gets in a round."""
    content = RecordDict({"train": ConfigRecord({"round": round, "rows": digest(rows)})})
    content["x"] = arrays(cut(message.x, rows))
    if message.aug is not None:
        content["aug"] = arrays(cut(message.aug, rows))
    return content


def parsed_task(
    content: RecordDict, x: Any, rows: Mapping[str, np.ndarray]
) -> tuple[int, Broadcast] | None:
    """The round and the message, like the model `x`; None if its rows are not those."""
    round, rows_digest = config(content, "train", round=int, rows=int)
    if rows_digest != digest(rows):
        return None
    like = cut_shapes(x, rows)
    aug = parsed_tree(content["aug"], like) if "aug" in content else None
    return round, Broadcast(parsed_tree(content.get("x"), like), aug)


STALE = RecordDict({"stale": ConfigRecord({})})  # "I hold other rows now: ask me again"


def upload(sent: Upload) -> RecordDict:
    """What the server gets of a client."""
    told: dict[str, Any] = {
        name: float(getattr(sent, name)) for name in ("weight", "steps", "loss")
    }
    content = RecordDict({"delta": arrays(sent.delta), "numbers": MetricRecord(told)})
    if sent.grads is not None:
        content["grads"] = arrays(sent.grads)
    return content


@only_rejected
def parsed_upload(content: RecordDict, like: Upload, s: Settings, most: float) -> Upload:
    """A client's upload, like `like`, or Rejected. `most` is the largest norm of its change."""
    if "stale" in content:
        raise Rejected("stale", "it holds other rows now, and is asked for them again")
    weight, steps, loss = numbers(content.get("numbers"), "weight", "steps", "loss")
    if steps != int(steps) or not 1 <= steps <= s.local_steps:
        raise Rejected("malformed", "it took a number of steps that is not possible")
    least, largest = {
        "examples": (steps, steps * s.client_batch),
        "steps": (steps, steps),
        "uniform": (1.0, 1.0),
    }[s.weighting]
    if not least <= weight <= largest:
        raise Rejected("malformed", "its weight is not possible with its steps")
    delta = parsed_tree(content.get("delta"), like.delta)
    grads = None if like.grads is None else parsed_tree(content.get("grads"), like.grads)
    for leaf in jax.tree.leaves((delta, grads)):
        if not np.isfinite(leaf).all():
            raise Rejected("nonfinite", "its change of the model is not finite")
    for tree in (delta, grads):
        squares = [np.sum(np.square(a.astype(np.float64))) for a in jax.tree.leaves(tree)]
        if math.sqrt(sum(squares)) > most:
            raise Rejected("too_large", "its change of the model is larger than max_update_norm")
    return Upload(delta, np.float32(weight), np.float32(steps), grads, np.float32(loss))


def sent_bytes(message: Message) -> int:
    """The bytes that travel with a message: of it and of all objects that it consists of."""
    with no_object_id_recompute():
        return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
