"""Whatever a client says is taken or rejected: nothing else comes out of the checks."""

import jax
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

import mixfl
from mixfl.aggregation.wire import Sent
from mixfl.deploy.flower import messages
from mixfl.forms.rows import Table

ODD = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.text(max_size=5),
    st.binary(max_size=5), st.lists(st.integers(0, 9), max_size=3), st.just("9" * 30),
)  # fmt: skip
SHAPES = st.lists(
    st.one_of(st.integers(-3, 2**70), st.floats(), st.none(), st.text(max_size=2), st.booleans(),
              st.lists(st.integers(), max_size=2)), max_size=3,
)  # fmt: skip
NAMES = st.sampled_from(
    ["w", "b", "weight", "steps", "loss", "population", "number", "t", "", "\0"]
)


def array_of(dtype, shape, form, data):
    array = Array("float32", (1,), messages.FORMAT, b"")
    array.__dict__.update(dtype=dtype, shape=tuple(shape), stype=form, data=data)
    return array


ARRAYS = st.builds(
    array_of, st.one_of(st.sampled_from(["float32", "int32", "object", "V8", ""]), st.integers()),
    SHAPES, st.one_of(st.just(messages.FORMAT), st.integers()), st.binary(max_size=24),
)  # fmt: skip


def record_of(kind, values):
    record = kind()
    record._data.update(values) if hasattr(record, "_data") else dict.update(record, values)
    return record


RECORDS = st.one_of(
    st.builds(record_of, st.just(ArrayRecord), st.dictionaries(NAMES, ARRAYS, max_size=3)),
    st.builds(record_of, st.just(ConfigRecord), st.dictionaries(NAMES, ODD, max_size=4)),
    st.builds(record_of, st.just(MetricRecord), st.dictionaries(NAMES, ODD, max_size=4)),
    st.builds(
        lambda loss, steps, weight: MetricRecord(
            dict(loss=float(loss), steps=float(steps), weight=float(weight))
        ),
        st.floats(), st.floats() | st.integers(0, 4), st.floats() | st.integers(0, 9),
    ),
    st.builds(
        lambda number, version: ConfigRecord(
            {"population": "federated", "number": number, "version": version}
        ),
        st.text(max_size=25) | st.just("3"), st.integers(1, 3) | st.text(max_size=3),
    ),
)  # fmt: skip
CONTENTS = st.dictionaries(
    st.sampled_from(["weighted", "numbers", "grads", "hello", "rows", "stale", "more"]),
    RECORDS,
    max_size=5,
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(CONTENTS, st.sampled_from(["float32", "bfloat16", "float64"]))
def test_any_content_is_an_upload_or_rejected(content, dtype):
    shape = jax.ShapeDtypeStruct((3,), jax.numpy.dtype(dtype) if dtype != "float64" else np.float64)
    one = jax.ShapeDtypeStruct((), np.float32)
    like = Sent({"w": shape}, {"w": shape}, one, one, one)
    try:
        messages.parsed_upload(RecordDict(content), like, mixfl.Settings(local_steps=3), 1e6)
    except messages.Rejected as rejected:
        assert len(str(rejected)) < 300


@settings(max_examples=500, deadline=None)
@given(CONTENTS)
def test_any_content_is_a_hello_or_rejected(content):
    tables = {"federated": {"t": Table(("item",), 5)}, "other": {}}
    try:
        messages.parsed_hello(RecordDict(content), tables)
    except messages.Rejected as rejected:
        assert len(str(rejected)) < 300


def test_shapes_that_are_no_numbers():
    tables = {"federated": {"t": Table(("item",), 5)}}
    for shape in (["a"], [None], [[1]], [2.0], [float("nan")], [2**70], [True]):
        rows = record_of(ArrayRecord, {"t": array_of("int32", shape, messages.FORMAT, b"\0" * 8)})
        who = ConfigRecord({"population": "federated", "number": "1", "version": messages.VERSION})
        with pytest.raises(messages.Rejected):
            messages.parsed_hello(RecordDict({"hello": who, "rows": rows}), tables)
