"""Values are checked by their types, and what is wrong is said in our words."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from mixfl.errors import MixflError
from mixfl.studies import schema
from mixfl.validation import Auto, Count, NotNegative, Positive, check, check_fields, key

HALF_OPEN = Annotated[float, Meta(ge=0, lt=0.5)]
PART = Annotated[float, Meta(gt=0, le=1)]
NAMES = Literal["mean", "median"]


@pytest.mark.parametrize(
    ("value", "type", "expected"),
    [
        (3, Positive, 3.0),
        (np.float32(0.5), Positive, 0.5),
        (Fraction(1, 4), Positive, 0.25),
        (np.int64(3), Count, 3),
        (2**63 - 1, Count, 2**63 - 1),
        ("auto", Count | Auto, "auto"),
        (None, NotNegative | None, None),
        ("median", NAMES, "median"),
        (0, HALF_OPEN, 0.0),
        (len, str | Callable[..., Any], len),
    ],
)
def test_good_values_get_the_type(value, type, expected):
    result = check("key", value, type)
    assert result == expected
    assert result.__class__ is expected.__class__


@pytest.mark.parametrize(
    ("value", "type", "message"),
    [
        (-1, Positive, "key = -1: expected a finite number above 0 (meaning)."),
        (True, Positive, "key = True: expected a finite number above 0 (meaning)."),
        (math.nan, NotNegative, "key = nan: expected a finite number of at least 0 (meaning)."),
        (math.inf, Positive, "key = inf: expected a finite number above 0 (meaning)."),
        ("3", Positive, "key = '3': expected a finite number above 0 (meaning)."),
        (1.0, Count, "key = 1.0: expected a whole number of at least 1 (meaning)."),
        (np.bool_(True), Count, "key = np.True_: expected a whole number of at least 1 (meaning)."),
        (2**63, Count, f"key = {2**63}: expected a whole number of at least 1 (meaning)."),
        pytest.param(
            10**5000, Count, "key = a number: expected a whole number of at least 1 (meaning).",
            id="5000 digits",
        ),
        ("Auto", Count | Auto, "key = 'Auto': expected a whole number of at least 1, or 'auto' "
         "(meaning)."),
        (0.5, HALF_OPEN, "key = 0.5: expected a number of at least 0 and below 0.5 (meaning)."),
        (1.5, PART, "key = 1.5: expected a number above 0 and at most 1 (meaning)."),
        (9, Annotated[int, Meta(ge=1, le=8)], "key = 9: expected a whole number from 1 to 8 "
         "(meaning)."),
        (1, bool, "key = 1: expected true or false (meaning)."),
        (3, str | Callable[..., Any], "key = 3: expected text (meaning)."),
        ("men", NAMES, "unknown value of key 'men'. Did you mean 'mean'? Valid: mean, median."),
        (3, NAMES, "key = 3: expected 'mean' or 'median' (meaning)."),
    ],
)  # fmt: skip
def test_bad_values_get_a_sentence(value, type, message):
    with pytest.raises(MixflError) as error:
        check("key", value, type, "meaning")
    assert str(error.value) == message


@pytest.mark.parametrize("value", [10**400, Fraction(10**400), "x" * 1000, [[]] * 1000], ids=type)
def test_large_values_are_cut_in_the_message(value):
    with pytest.raises(MixflError, match=r"key = .{60}\.\.\.: expected") as error:
        check("key", value, Positive)
    assert len(str(error.value)) < 130


def test_fields_are_checked_and_converted():
    @dataclass(frozen=True)
    class Options:
        rate: Positive = key(0.1, "learning rate")
        steps: Count | Auto = key("auto", "steps")

        def __post_init__(self):
            check_fields(self)

    assert repr(Options(rate=1).rate) == "1.0"
    with pytest.raises(MixflError, match=r"steps = 0: .* or 'auto' \(steps\)\."):
        Options(steps=0)


STUDY: dict[str, Any] = {
    "title": "T",
    "quick": {"trials": 2, "real": {}},
    "series": [{"algorithms": ["pt"], "over": {"K": [1, 2]}}],
    "show": [{"kind": "curves", "label": "x", "metrics": ["m"]}],
    "claim": [
        {"number": 1, "says": "s", "checks": [{"kind": "often", "metric": "m", "each": ["pt"]}]}
    ],
}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["title"], 3, "f.toml: title = 3: expected text."),
        (["quick"], 3, "quick of f.toml: expected a table, got 3."),
        (
            ["quick", "real"],
            {"trails": 1},
            "unknown key in quick.real of f.toml: 'trails'. Did you ",
        ),
        (
            ["series", 0, "over"],
            {"K": 3},
            "f.toml: series[0].over = {'K': 3}: expected a table, its ",
        ),
        (["show", 0, "kind"], "curve", "unknown kind in show[0] of f.toml: 'curve'. Did you mean "),
        (["show", 0, "kind"], [3], "unknown kind in show[0] of f.toml: '[3]'. Valid: bounds, "),
        (["show", 0, "metrics"], [3], "f.toml: show[0].metrics[0] = 3: expected text."),
        (["show", 0], {"kind": "final"}, "show[0] of f.toml has no `label`."),
        (["claim"], {}, "f.toml: claim = {}: expected tables, [[...]] in TOML."),
        (["claim", 0, "checks", 0, "each"], [], "a check of claim 1 of f.toml compares nothing"),
    ],
)
def test_the_place_of_a_mistake_in_a_file_is_named(path, value, message):
    schema.check(STUDY, Path("f.toml"))
    with pytest.raises(MixflError) as error:
        schema.check(changed(STUDY, path, value), Path("f.toml"))
    assert str(error.value).startswith(message)


def changed(content, path, value):
    if not path:
        return value
    if isinstance(content, list):
        return [changed(c, path[1:], value) if i == path[0] else c for i, c in enumerate(content)]
    return {**content, path[0]: changed(content.get(path[0]), path[1:], value)}


names = st.sampled_from(["title", "quick", "real", "series", "show", "kind", "curves", "keys", "x"])
toml = st.recursive(
    st.integers() | st.floats() | st.booleans() | st.text(max_size=3) | st.dates() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
)


@given(st.dictionaries(names, toml, max_size=5))
def test_any_file_is_taken_or_refused_with_a_sentence(content):
    try:
        schema.check({"title": "T"} | content, Path("f.toml"))
    except MixflError as error:
        assert "f.toml" in str(error)
