"""What is sent: arrays in Flower's records, and the checks of what comes back.

A tree of arrays is sent as one array of bytes: its leaves one after the other. Both sides know
their names, dtypes and shapes, and the array's name is a checksum of these. What arrives is
compared with what was expected (name, dtype, shape, number of bytes) and then read in place: no
memory is allocated for it, and nothing is unpickled. Codes and row numbers are packed
(aggregation/packing.py).
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from mixfl.aggregation import packing
from mixfl.aggregation.download import Coded, coded
from mixfl.aggregation.quantize import NOT_FINITE
from mixfl.aggregation.wire import TREES, Sent
from mixfl.algorithms.contract import Broadcast
from mixfl.errors import MixflError
from mixfl.forms.rows import Table, distinct
from mixfl.settings import Settings
from mixfl.trees import Model, named_leaves, on_named

FORMAT = "mixfl.little-endian"
# Of the messages. 1 had no number, and sent whole changes in place of own parts; 2 had no rates;
# 3 sent every array by name, and row numbers as they are.
VERSION = 4
NONE: Mapping[str, float] = MappingProxyType({})
LARGEST = float(np.finfo(np.float32).max)
T = TypeVar("T")


class Rejected(Exception):
    """What arrived is not what was expected. `reason` is one word, for the metrics."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


def only_rejected(check: Callable[..., T]) -> Callable[..., T]:
    """Turns any other error that odd values cause in a check into a rejection."""

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


def arrays(tree: Any, bits: int | None = None) -> ArrayRecord:
    """A tree of arrays, one after the other. `bits`: they are codes."""
    if len(named_leaves(tree)) < len(jax.tree.leaves(tree)):
        raise MixflError("two parameters have the same name: use no / in the keys of the model.")
    tree = jax.tree.map(np.asarray, tree)
    leaves = jax.tree.leaves(tree)
    if bits is None:
        data = b"".join(leaf.tobytes() for leaf in leaves)
    else:
        data = packing.pack(np.concatenate([leaf.reshape(-1) for leaf in leaves]), bits)
    return ArrayRecord({layout(tree, bits): flat(data)})


def flat(data: bytes) -> Array:
    return Array("uint8", (len(data),), FORMAT, data)


def layout(tree: Any, bits: int | None = None) -> str:
    """A checksum of the names, dtypes and shapes of a tree's arrays."""
    named = [(n, str(a.dtype), tuple(a.shape)) for n, a in named_leaves(tree).items()]
    return f"{zlib.crc32(repr((named, bits)).encode()):08x}"


def parsed(given: Any, like: Any, name: str) -> np.ndarray:
    """The array of a record, which must have the shape and dtype of `like`."""
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


def parsed_tree(record: Any, like: Any, bits: int | None = None) -> Any:
    """The tree of a record of arrays, like the tree `like`. `bits`: they are codes."""
    expected, tree = jax.tree.flatten(like)
    counts = [math.prod(leaf.shape) for leaf in expected]
    sizes = [n * np.dtype(a.dtype).itemsize for n, a in zip(counts, expected, strict=True)]
    if bits is None:
        data = parsed_flat(record, layout(like), sum(sizes))
        parts = np.split(np.frombuffer(data, np.uint8), np.cumsum(sizes)[:-1]) if expected else []
        leaves = [p.view(np.dtype(a.dtype)) for p, a in zip(parts, expected, strict=True)]
    else:
        size = packing.packed_bytes(sum(counts), bits)
        data = parsed_flat(record, layout(like, bits), size)
        try:
            codes = packing.unpack(data, sum(counts), bits)
        except ValueError as error:
            raise Rejected("malformed", f"its codes are none: {error}") from None
        leaves = np.split(codes, np.cumsum(counts)[:-1])
    shaped = [a.reshape(like.shape) for a, like in zip(leaves, expected, strict=True)]
    return jax.tree.unflatten(tree, shaped)


def parsed_flat(record: Any, name: str, size: int) -> bytes:
    """The one array of a record, of so many bytes."""
    if not isinstance(record, ArrayRecord) or set(record) != {name}:
        raise Rejected("malformed", "a record has other arrays than expected, or none")
    parsed(record[name], jax.ShapeDtypeStruct((size,), np.uint8), name)
    return record[name].data


def numbers(record: Any, *names: str) -> list[float]:
    if not isinstance(record, MetricRecord) or set(record) != set(names):
        raise Rejected("malformed", "a record has other numbers than expected, or none")
    values: list[Any] = [record[name] for name in names]
    if not all(isinstance(v, int | float) for v in values):
        raise Rejected("malformed", "a list where a number was expected")
    if not all(abs(v) <= LARGEST for v in values):  # NaN fails this too
        raise Rejected("nonfinite", "a number is not finite")
    return [float(v) for v in values]


def config(content: RecordDict, kind: str, **types: type) -> list[Any]:
    record = content.get(kind)
    if not isinstance(record, ConfigRecord) or not all(
        type(record.get(name)) is type_ for name, type_ in types.items()
    ):
        raise Rejected("malformed", f"the record '{kind}' is missing or incomplete")
    return [record[name] for name in types]


# The first message: who a client is


def hello(
    population: str, number: int, rows: Mapping[str, np.ndarray], frozen: str = ""
) -> RecordDict:
    """`rows` has, per table, the rows that its data names, in order. It needs no others. Tables of
    which it holds the same rows are named once (rows.distinct). `frozen` is the digest of its
    frozen arrays, if it has some."""
    who = ConfigRecord(
        {"population": population, "number": str(number), "version": VERSION}  # up to 64 bits
    )
    if frozen:
        who["frozen"] = frozen
    packed = {n: flat(packing.pack_rows(a)) for n, a in rows.items()}
    return RecordDict({"hello": who, "rows": ArrayRecord(packed)})


@only_rejected
def parsed_hello(
    content: RecordDict, tables: Mapping[str, Mapping[str, Table]], frozen: str = ""
) -> tuple[str, int, dict[str, np.ndarray]]:
    """`tables` has the tables of each population, `frozen` is the digest of the server's arrays."""
    population, number = config(content, "hello", population=str, number=str)
    check_version(content["hello"])
    if content["hello"].get("frozen", "") != frozen:
        raise Rejected("frozen", "its frozen arrays are not the server's")
    if population not in tables:
        raise Rejected("malformed", "it is of no population of this problem")
    if not (number.isascii() and number.isdigit() and len(number) <= 20):
        raise Rejected("malformed", "its number is none")
    given, rows = content.get("rows"), dict[str, np.ndarray]()
    named = distinct(tables[population])
    if not isinstance(given, ArrayRecord) or set(given) != set(named):
        raise Rejected("malformed", "it names rows of other tables than expected")
    for name, alike in named.items():
        table = tables[population][name]
        size = given[name].shape[0] if len(given[name].shape) == 1 else 0
        if not 0 < size <= packing.MOST_BYTES * table.rows:
            raise Rejected("shape", f"it names no rows of '{name}', or too many")
        parsed(given[name], jax.ShapeDtypeStruct((size,), np.uint8), name)
        try:
            ids = packing.unpack_rows(given[name].data, table.rows)
        except ValueError as error:
            raise Rejected("malformed", f"its rows of '{name}' are none: {error}") from None
        rows |= dict.fromkeys(alike, ids)
    return population, int(number), {name: rows[name] for name in tables[population]}


def digest(rows: Mapping[str, np.ndarray]) -> int:
    """A checksum by which both sides know that they mean the same rows."""
    crc = 0
    for name in sorted(rows):
        crc = zlib.crc32(rows[name].tobytes(), zlib.crc32(name.encode(), crc))
    return crc


# A round


def cut(tree: Any, rows: Mapping[str, np.ndarray]) -> Any:
    """Cuts tables to the given rows."""
    return on_named(lambda table, ids: np.asarray(table)[ids], rows, tree)


def cut_codes(tree: Any, rows: Mapping[str, np.ndarray], cut: Callable = cut) -> Any:
    """The same of a model that may be coded."""
    if isinstance(tree, Model):
        return Model(cut_codes(tree.params, rows, cut), tree.state)
    if isinstance(tree, Coded):
        return tree._replace(codes=cut(tree.codes, rows))
    return cut(tree, rows)


def cut_shapes(tree: Any, rows: Mapping[str, np.ndarray]) -> Any:
    return on_named(
        lambda t, ids: jax.ShapeDtypeStruct((len(ids), *t.shape[1:]), t.dtype), rows, tree
    )


def only_named(rows: Mapping[str, Any], tables: Mapping[str, Table]) -> dict[str, Any]:
    """Those that a client must name."""
    return {name: rows[name] for name in distinct(tables)}


def task(
    round: int, broadcast: Broadcast, rows: Mapping[str, np.ndarray], told: Any = (),
    rates: Mapping[str, float] = NONE, frozen: ConfigRecord | None = None,
) -> RecordDict:  # fmt: skip
    """What a client gets in a round; `broadcast` may have codes. `told` is for the aggregation
    steps at the client; `rates` are those of the round, if they change from round to round;
    `frozen` names the frozen arrays."""
    head = ConfigRecord({"round": round, "rows": digest(rows), "version": VERSION})
    content = RecordDict({"train": head})
    if frozen is not None:
        content["frozen"] = frozen
    content["x"] = arrays(cut_codes(broadcast.x, rows))
    if broadcast.aug is not None:
        content["aug"] = arrays(cut_codes(broadcast.aug, rows))
    if broadcast.extra is not None:
        content["extra"] = arrays(broadcast.extra)
    if jax.tree.leaves(told):
        content["told"] = arrays(told)
    if rates:
        content["rates"] = MetricRecord(dict(rates))
    return content


class Task(NamedTuple):
    round: int
    broadcast: Broadcast
    told: Any
    rates: dict[str, float]


def parsed_task(
    content: RecordDict, x: Any, rows: Mapping[str, np.ndarray], told: Any = (),
    extra: Callable[[], Any] = lambda: None, rates: Iterable[str] = (), download: Any = None,
) -> Task | None:  # fmt: skip
    """The task in a message; None if the server means other rows. `x`, `told` and `extra()` have
    the shapes of the model, of what the aggregation tells and of the algorithm's own fields;
    `rates` are the names of the rates that are sent. Codes of the broadcast are still codes."""
    round, rows_digest = config(content, "train", round=int, rows=int)
    check_version(content["train"])
    if rows_digest != digest(rows):
        return None
    kinds = ("float32", "float32") if download is None else (download.x, download.aug)
    like, like_aug = (
        cut_codes(jax.eval_shape(functools.partial(coded, kind), x), rows, cut_shapes)
        for kind in kinds
    )
    aug = parsed_tree(content["aug"], like_aug) if "aug" in content else None
    told = parsed_tree(content.get("told"), told) if jax.tree.leaves(told) else told
    own = parsed_tree(content["extra"], extra()) if "extra" in content else None
    broadcast = Broadcast(parsed_tree(content.get("x"), like), aug, extra=own)
    return Task(round, broadcast, told, parsed_rates(content.get("rates"), list(rates)))


def parsed_rates(record: Any, names: list[str]) -> dict[str, float]:
    if record is None and not names:
        return {}
    values = dict(zip(names, numbers(record, *names), strict=True))
    if not all(v > 0 for v in values.values()):
        raise Rejected("malformed", "a learning rate is not above 0")
    return values


def check_version(head: Any) -> None:
    version = head.get("version", 1)
    if version != VERSION:
        raise Rejected(
            "version", f"its mixfl sends messages of version {str(version)[:20]}, this one of "
            f"version {VERSION}: install the same release of mixfl at the server and at all nodes",
        )  # fmt: skip


STALE = RecordDict({"stale": ConfigRecord({})})  # "I hold other rows now: ask me again"


CODES = ("weighted", "grads")  # the fields of Sent that may be codes


def upload(sent: Sent, bits: int | None = None) -> RecordDict:
    """What a client sends to the server; `bits` of its codes."""
    numbers: dict[str, Any] = {
        name: float(getattr(sent, name)) for name in ("weight", "steps", "loss")
    }
    content = RecordDict({"numbers": MetricRecord(numbers)})
    for name in TREES:
        if (tree := getattr(sent, name)) is not None:
            content[name] = arrays(tree, bits if name in CODES else None)
    return content


@only_rejected
def parsed_upload(
    content: RecordDict, like: Sent, s: Settings, most: float, bits: int | None = None
) -> Sent:
    """What a client sent, like `like`, or Rejected. `most` is the largest norm allowed, `bits` is
    the size of codes, whose range bounds the norm."""
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
    trees = {
        name: parsed_tree(content.get(name), getattr(like, name), bits if name in CODES else None)
        for name in TREES
        if getattr(like, name) is not None
    }
    if "report" in trees and (trees["report"] == NOT_FINITE).any():
        raise Rejected("nonfinite", "its change of the model is not finite")
    if "report" in trees and trees["report"][-1] > 1:
        raise Rejected("malformed", "its report is none")
    for leaf in jax.tree.leaves(trees):
        if not np.isfinite(leaf).all():
            raise Rejected("nonfinite", "its change of the model is not finite")
    head = {"weight": weight, "steps": steps, "loss": loss}
    sent = like._replace(**trees, **{name: np.float32(v) for name, v in head.items()})
    if bits is None:
        check_norms(sent, most)
    return sent


def check_norms(sent: Sent, most: float) -> None:
    for name in TREES:
        leaves = jax.tree.leaves(getattr(sent, name))
        squares = [np.sum(np.square(np.asarray(a, np.float64))) for a in leaves]
        if math.sqrt(sum(squares)) > most * (float(sent.weight) if name == "weighted" else 1):
            raise Rejected("too_large", "its change of the model is larger than max_update_norm")
