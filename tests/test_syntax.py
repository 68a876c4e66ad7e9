"""Parsing Python while other threads do."""

import ast

import pytest

from mixfl.calls import parsed_call
from mixfl.syntax import parsed


@pytest.mark.parametrize("failures", [1, 3])
def test_what_fails_because_of_other_threads_is_parsed_again(failures, monkeypatch):
    """CPython 3.11.7's own error, which is seldom: a run once ended with it."""
    parse, calls = ast.parse, []

    def disturbed(*args, **kwargs):
        calls.append(args)
        if len(calls) <= failures:
            raise SystemError("AST constructor recursion depth mismatch (before=18, after=64)")
        return parse(*args, **kwargs)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert parsed_call("sgd(momentum=0.9)") == ("sgd", (), {"momentum": 0.9})
    assert len(calls) == failures + 1


def test_an_error_that_stays_is_raised(monkeypatch):
    def broken(*args, **kwargs):
        raise SystemError("unknown opcode")

    monkeypatch.setattr(ast, "parse", broken)
    with pytest.raises(SystemError, match="unknown opcode"):
        parsed("a = 1")
