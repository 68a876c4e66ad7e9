"""Codes and row numbers as bytes: whatever is packed comes back, and anything else is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixfl.aggregation.packing import (
    MOST_BYTES,
    pack,
    pack_rows,
    packed_bytes,
    row_bytes,
    unpack,
    unpack_rows,
)

BITS = st.sampled_from([2, 4, 8, 16])


@given(st.data(), BITS)
def test_codes_come_back(data, bits):
    most = 2 ** (bits - 1) - 1
    codes = np.array(data.draw(st.lists(st.integers(-most, most), max_size=40)), np.int64)
    packed = pack(codes, bits)
    assert len(packed) == packed_bytes(len(codes), bits) == -(-len(codes) * bits // 8)
    np.testing.assert_array_equal(unpack(packed, len(codes), bits), codes)


@given(st.binary(max_size=20), st.integers(0, 50), BITS)
def test_codes_have_one_form_only(data, count, bits):
    try:
        codes = unpack(data, count, bits)
    except ValueError:
        return
    assert len(codes) == count
    assert np.abs(codes.astype(int)).max(initial=0) < 2 ** (bits - 1)
    assert pack(codes, bits) == data


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_the_smallest_number_is_no_code(bits):
    """It has no counterpart above 0, so codes that used it would not be unbiased."""
    low = (-(2 ** (bits - 1))) & 0xFFFF
    with pytest.raises(ValueError, match="out of range"):
        unpack(low.to_bytes(2, "little")[: max(1, bits // 8)] if bits >= 8 else
               bytes([low & (2**bits - 1)]), 1, bits)  # fmt: skip


def test_no_bits_are_zeros():
    assert pack(np.zeros(9), 0) == b""
    assert not unpack(b"", 9, 0).any()
    with pytest.raises(ValueError, match="another number"):
        unpack(b"\0", 9, 0)


@given(st.sets(st.integers(0, 10_000), max_size=60))
def test_rows_come_back(rows):
    ordered = np.array(sorted(rows), np.int32)
    packed = pack_rows(ordered)
    np.testing.assert_array_equal(unpack_rows(packed, 10_001), ordered)
    padded = np.full((1, 64), 10_001, np.int32)
    padded[0, : len(rows)] = np.array(list(rows), np.int32)  # in any order
    assert row_bytes(padded, 10_001).tolist() == [len(packed)]


def test_large_tables():
    rows = np.array([0, 127, 128, 129, 2**21, 2**31 - 2], np.int64)
    np.testing.assert_array_equal(unpack_rows(pack_rows(rows), 2**31 - 1), rows)


@given(st.binary(max_size=12), st.integers(1, 3000))
def test_rows_have_one_form_only(data, table):
    try:
        rows = unpack_rows(data, table)
    except ValueError:
        return
    assert len(rows) == 0 or (rows[0] >= 0 and rows[-1] < table and (np.diff(rows) > 0).all())
    assert pack_rows(rows) == data


@pytest.mark.parametrize(
    "data", [b"\x80", b"\x80\x00", b"\xff" * MOST_BYTES + b"\x01", b"\x05", b"\x00" * 6]
)
def test_odd_rows_are_refused(data):
    """Not complete; longer than needed; too long; not in the table; more than the table has."""
    with pytest.raises(ValueError, match="row"):
        unpack_rows(data, 5)
