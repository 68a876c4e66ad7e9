"""Checks values against their types (msgspec), and says in our words what is wrong.

A key is a field of a frozen dataclass whose type says everything that its value must be:

    client_lr: Positive = key(0.1, "client learning rate (eta)")
    merge_lr: Positive | Literal["auto"] = key("auto", "merge learning rate (eta_m)")

    def __post_init__(self):
        check_fields(self)
"""

import dataclasses
import functools
import operator
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import field
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert
from msgspec import inspect as types

from mixfl.errors import MixflError, unknown

LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, sys.float_info.max
SHOWN = 60  # characters of a wrong value in a message

Auto = Literal["auto"]
Positive = Annotated[float, Meta(gt=0, le=LARGEST_FLOAT)]
NotNegative = Annotated[float, Meta(ge=0, le=LARGEST_FLOAT)]
Finite = Annotated[float, Meta(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=LARGEST_INT)]
Index = Annotated[int, Meta(ge=0, le=LARGEST_INT)]


def key(default: Any, help: str, type: Any = None, synthetic: bool = False) -> Any:
    """A field with its default and its meaning; `mixfl keys` prints both. `type` is for fields that
    no annotation describes (see algorithms/own.py). `synthetic`: it describes a task's synthetic
    data, and nothing else."""
    more = {"type": type} if type else {}
    return field(default=default, metadata={"help": help, "synthetic": synthetic} | more)


def check_fields(instance: Any) -> None:
    """Check every field of a frozen dataclass, and convert numbers to the field's type."""
    hints = field_types(instance.__class__)
    for f in dataclasses.fields(instance):
        if f.metadata.get("checked"):
            continue
        value = check(f.name, getattr(instance, f.name), hints[f.name], f.metadata.get("help", ""))
        object.__setattr__(instance, f.name, value)


@functools.cache
def field_types(of: type) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)


def check(name: str, value: Any, type: Any, help: str = "") -> Any:
    """Return the value as its type has it, or raise an error that says what was expected."""
    members = get_args(type) if get_origin(type) in (Union, UnionType) else (type,)
    others = [m for m in members if get_origin(m) is not Callable]
    if len(others) < len(members):
        if callable(value):
            return value
        type = functools.reduce(operator.or_, others)
    try:
        return convert(_builtin(value), type)
    except (ValidationError, OverflowError):
        raise wrong(name, value, types.type_info(type), help) from None


def _builtin(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def wrong(name: str, value: Any, type: types.Type, help: str = "") -> MixflError:
    if isinstance(type, types.LiteralType) and isinstance(value, str):
        return unknown(f"value of {name}", value, map(str, type.values))
    meaning = f" ({help})" if help else ""
    return MixflError(f"{name} = {_short(value)}: expected {expected(type)}{meaning}.")


def expected(type: types.Type) -> str:
    """The type in words."""
    match type:
        case types.UnionType():
            return ", or ".join(
                expected(t) for t in type.types if not isinstance(t, types.NoneType)
            )
        case types.LiteralType():
            return " or ".join(f"'{v}'" for v in type.values)
        case types.IntType() | types.FloatType():
            return _number(type)
        case types.BoolType():
            return "true or false"
        case types.Metadata(extra={"expected": words}):
            return words
        case types.StrType():
            return "text"
        case types.ListType(item_type=types.StructType() | types.UnionType()):
            return "tables, [[...]] in TOML"
        case types.ListType():
            return "a list"
        case types.DictType() if not isinstance(type.value_type, types.AnyType):
            return f"a table, its values {expected(type.value_type)}"
        case _:
            return "a table"


def _number(type: types.IntType | types.FloatType) -> str:
    bounded = type.lt is not None or type.le not in (None, LARGEST_INT, LARGEST_FLOAT)
    noun = "a whole number" if isinstance(type, types.IntType) else "a number"
    if bounded and None not in (type.ge, type.le):
        return f"{noun} from {type.ge} to {type.le}"
    if noun == "a number" and not bounded:
        noun = "a finite number"
    limits = [("of at least", type.ge), ("above", type.gt), ("below", type.lt)]
    limits += [("at most", type.le)] if bounded else []
    stated = " and ".join(f"{words} {v}" for words, v in limits if v is not None)
    return f"{noun} {stated}".strip()


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_keys(
    given: Iterable[str], *, valid, used=None, by: str = "", listed: str = "mixfl keys"
) -> None:
    """An unknown key is an error, and so is a key without effect. `listed`: the command that lists
    all keys."""
    for name in given:
        if name not in valid:
            raise unknown("key", name, valid, f"`{listed}`")
        if used is not None and name not in used:
            raise MixflError(
                f"key '{name}' has no effect on {by}: leave it out. `{listed}` lists what has."
            )


def check_files(files: Any, reserved: Container[str]) -> None:
    """Texts by their file names, in a run folder that has other files too."""
    if not isinstance(files, Mapping):
        raise MixflError("files: expected a dict from names to texts.")
    for name, content in files.items():
        plain = isinstance(name, str) and re.fullmatch(r"[\w-][\w .-]*", name)
        if not plain or name in reserved or not _is_text(content):
            raise MixflError(
                f"files: {name!r} must be a plain name that a run's folder has no other use "
                "for, and its content a text."
            )


def _is_text(content: Any) -> bool:
    try:
        return isinstance(content, str) and bool(content.encode() or True)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


# Tables within tables, such as a TOML file


def check_tables(content: Mapping[str, Any], type: Any, file: str) -> Any:
    """A file's content as the msgspec.Struct `type`, whose fields may be structs again."""
    try:
        return convert(content, type)
    except ValidationError as error:
        place = re.search(r" - at `\$(.*)`$", str(error))
        path = re.findall(r"\.(\w+)|\[(\w+)\]", place[1]) if place else []
        raise _wrong_at(path, content, types.type_info(type), "", file) from None


def _wrong_at(path: list, value: Any, type: types.Type, name: str, file: str) -> MixflError:
    """The error at msgspec's path from `value`, whose own path is `name`."""
    where = f"{name} of {file}" if name else file
    members = type.types if isinstance(type, types.UnionType) else (type,)
    members = tuple(t for t in members if not isinstance(t, types.NoneType))
    type = members[0] if len(members) == 1 else type
    structs = {t.tag: t for t in members if isinstance(t, types.StructType)}
    if not structs:
        if path and isinstance(type, types.ListType):
            at = path[0][1]
            return _wrong_at(path[1:], value[int(at)], type.item_type, f"{name}[{at}]", file)
        return wrong(f"{file}: {name}", value, type)
    if not isinstance(value, Mapping):
        return MixflError(f"{where}: expected a table, got {_short(value)}.")
    tag = next(iter(structs.values())).tag_field
    kind = value.get(tag) if tag else None
    if kind not in list(structs):  # it may be anything, also unhashable
        return unknown(f"{tag} in {where}:", kind, map(str, structs))
    fields = {f.encode_name: f for f in structs[kind].fields}
    if path:
        at = path[0][0]
        inner = f"{name}.{at}" if name else at
        return _wrong_at(path[1:], value[at], fields[at].type, inner, file)
    for f in fields.values():
        if f.required and f.encode_name not in value:
            return MixflError(f"{where} has no `{f.encode_name}`.")
    keys = [*fields, *([tag] if tag else [])]
    return unknown(f"key in {where}:", next(k for k in value if k not in keys), keys)
