"""Small files in the official formats, whole and damaged, and the stores made from them."""

import gzip
import json
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from PIL import Image

import mixfl
from mixfl.data.prepare import info, prepare
from mixfl.errors import MixflError


def made(format, source, target, **options):
    """{client: {column: array}} of the store, or {part: that} of a split."""
    prepare(format, source, target, options=options, report=None)
    if (target / "clients.arrow").exists():
        return contents(target)
    return {p.name: contents(p) for p in sorted(target.iterdir())}


def contents(path):
    data = mixfl.ClientData.open(path)
    return {data.ids[i]: data.examples.take(data.rows(i)) for i in range(len(data))}


def lists(clients):
    return {c: {k: a.tolist() for k, a in columns.items()} for c, columns in clients.items()}


def fails(format, source, tmp_path, *words, **options):
    """The message has all the words, and nothing is left behind."""
    before = set(tmp_path.rglob("*"))
    with pytest.raises(MixflError) as caught:
        prepare(format, source, tmp_path / "target", options=options)
    for word in words:
        assert word in str(caught.value)
    assert set(tmp_path.rglob("*")) == before


def write(path, text, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text if isinstance(text, bytes) else text.encode(encoding)
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def leaf(data, **others):
    counts = [len(d["x"]) for d in data.values()]
    return json.dumps({"users": list(data), "num_samples": counts, **others, "user_data": data})


def pictures(folder, size=(6, 4)):
    for i, name in enumerate(["cat/1.png", "cat/2.png", "dog/1.png", "dog/sub/2.png", "emu/1.png"]):
        path = write(folder / name, b"")
        Image.new("RGB", size, (i, 2 * i, 3 * i)).save(path)
    write(folder / "cat" / "readme.txt", "no image")
    return folder


def example_message():
    """tf.train.Example, from a description of its fields, by Google's own library."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name, *fields):
        m = file.message_type.add(name=name)
        for number, (field, kind, repeated) in enumerate(fields, 1):
            f = m.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                f.type, f.type_name = 11, f".t.{kind}"
            else:
                f.type = kind
        return m

    message("BytesList", ("value", 12, True))
    message("FloatList", ("value", 2, True))
    message("Int64List", ("value", 3, True))
    message("Feature", ("bytes_list", "BytesList", False), ("float_list", "FloatList", False),
            ("int64_list", "Int64List", False))  # fmt: skip
    features = message("Features", ("feature", "Features.Entry", True))
    entry = features.nested_type.add(name="Entry")
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".t.Feature")
    message("Example", ("features", "Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def proto(**features):
    example = example_message()()
    for key, value in features.items():
        entry = example.features.feature.add(key=key)
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(value[0])]
        getattr(entry.value, kind).value.extend(value)
    return example.SerializeToString()


def tff(path, rows, schema="split_name TEXT, client_id TEXT, serialized_example_proto BLOB"):
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE examples ({schema})")
        db.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    db.close()
    return path


MUTATION = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "repeat"]), st.integers(0, 999),
              st.binary(min_size=1, max_size=8)),
    max_size=4,
)  # fmt: skip


def mutated(data, changes):
    for kind, at, new in changes:
        at %= len(data) + 1
        if kind == "cut":
            data = data[:at]
        elif kind == "repeat":
            data = data[:at] + data[at // 2 :]
        else:
            data = data[:at] + new + data[at + (len(new) if kind == "flip" else 0) :]
    return data


def a_store_or_an_error(format, name, data, **options):
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in" / name, Path(folder) / "s"
        source.parent.mkdir()
        source.write_bytes(data)
        try:
            prepare(format, source, target, options=options)
        except MixflError:
            assert [p.name for p in Path(folder).iterdir()] == ["in"]
        else:
            assert info(target)
            assert sorted(p.name for p in Path(folder).iterdir()) == ["in", "s"]
        assert [p.name for p in source.parent.iterdir()] == [name]
