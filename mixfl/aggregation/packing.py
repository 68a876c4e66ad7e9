"""Codes and row numbers as bytes, and back. What arrives is checked: every list of codes or rows
has exactly one form as bytes, and anything else is an error (ValueError).

Codes of 4 or 2 bits are two or four to a byte, the first in the lowest bits. Rows are sorted; each
is sent as its difference to the one before, less 1, in groups of 7 bits (LEB128).
"""

import numpy as np

MOST_BYTES = 5  # of a row number below 2^32


def pack(codes: np.ndarray, bits: int) -> bytes:
    """Codes in [-L, L], L = 2^(bits-1) - 1. With 0 bits, all are 0."""
    flat = np.asarray(codes).reshape(-1)
    if bits == 0:
        return b""
    if bits >= 8:
        return flat.astype(f"<i{bits // 8}").tobytes()
    per = 8 // bits
    low = flat.astype(np.int8).view(np.uint8) & (2**bits - 1)
    low = np.pad(low, (0, -len(low) % per)).reshape(-1, per)
    shifts = np.arange(per, dtype=np.uint8) * bits
    return np.bitwise_or.reduce(low << shifts, axis=1).astype(np.uint8).tobytes()


def unpack(data: bytes, count: int, bits: int) -> np.ndarray:
    """[count] codes, in int8 or int16."""
    dtype = np.dtype(f"<i{max(bits, 8) // 8}")
    if len(data) != packed_bytes(count, bits):
        raise ValueError("another number of codes than expected")
    if bits == 0:
        return np.zeros(count, dtype)
    if bits >= 8:
        codes = np.frombuffer(data, dtype)
    else:
        per = 8 // bits
        shifts = np.arange(per, dtype=np.uint8) * bits
        low = (np.frombuffer(data, np.uint8)[:, None] >> shifts) & (2**bits - 1)
        low = low.reshape(-1)
        if low[count:].any():
            raise ValueError("something after the last code")
        codes = low[:count].astype(np.int8)
        codes = codes - ((codes >= 2 ** (bits - 1)) * np.int8(2 ** (bits - 1)) * np.int8(2))
        codes = codes.astype(np.int8)
    if len(codes) and codes.min() < -(2 ** (bits - 1) - 1):
        raise ValueError("a code that is out of range")
    return codes


def packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def pack_rows(rows: np.ndarray) -> bytes:
    """Rows in ascending order, each once."""
    gaps = _gaps(np.asarray(rows, np.int64)[None])[0].astype(np.uint64)
    groups = gaps[:, None] >> (7 * np.arange(MOST_BYTES, dtype=np.uint64))
    held = groups > 0
    held[:, 0] = True
    more = np.concatenate([held[:, 1:], np.zeros((len(gaps), 1), bool)], axis=1)
    coded = (groups & np.uint64(127)).astype(np.uint8) | (more * np.uint8(128))
    return coded[held].tobytes()


def unpack_rows(data: bytes, table: int) -> np.ndarray:
    """Rows of a table with so many rows, in ascending order."""
    given = np.frombuffer(data, np.uint8)
    last = given < 128
    if len(given) and not last[-1]:
        raise ValueError("the last row is not complete")
    ends = np.flatnonzero(last)
    if len(ends) > table:
        raise ValueError("more rows than the table has")
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - starts + 1
    if len(ends) and lengths.max() > MOST_BYTES:
        raise ValueError("a row number that is too long")
    if ((lengths > 1) & (given[ends] == 0)).any():
        raise ValueError("a row number that could be shorter")
    place = np.arange(len(given)) - np.repeat(starts, lengths)
    parts = (given & 127).astype(np.int64) << (7 * place)
    gaps = np.add.reduceat(parts, starts) if len(ends) else np.zeros(0, np.int64)
    rows = np.cumsum(gaps + 1) - 1
    if len(rows) and rows[-1] >= table:
        raise ValueError("a row that the table has not")
    return rows.astype(np.int32)


def row_bytes(rows: np.ndarray, table: int) -> np.ndarray:
    """The bytes of rows [clients, most], in any order; `table` marks padding."""
    ordered = np.sort(np.asarray(rows, np.int64), axis=1)
    gaps = _gaps(ordered)
    each = 1 + sum((gaps >> (7 * k) > 0).astype(np.int64) for k in range(1, MOST_BYTES))
    return np.sum(np.where(ordered < table, each, 0), axis=1)


def _gaps(ordered: np.ndarray) -> np.ndarray:
    return np.diff(ordered, axis=1, prepend=-1) - 1
