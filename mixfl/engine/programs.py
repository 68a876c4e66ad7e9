"""Runs of one problem that differ only in their rates, seed or length share their programs.

The programs are kept with the problem (`Problem.kept`), and go when it goes.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax

from mixfl.algorithms.origin import OF_A_RUN
from mixfl.engine.captured import captured
from mixfl.engine.round import Round
from mixfl.forms.products import original
from mixfl.randomness import users_loss
from mixfl.settings import RATES, Settings

MOST = 8  # programs of a problem


def shared_round(new: Round) -> Round:
    """A round like this one that an earlier run has compiled, or this one."""
    if new.constant:
        return new
    kept: dict[Hashable, list[Round]] = new.problem.kept.setdefault("rounds", {})
    key = _key(new)
    alike = kept.pop(key, [])
    kept[key] = alike  # the last one used is the last to go
    for old in alike:
        if all(_value(old, name) == _value(new, name) for name in old.noted):
            return old
    alike.append(new)
    while sum(map(len, kept.values())) > MOST:
        oldest = next(iter(kept))
        kept[oldest].pop(0)
        if not kept[oldest]:
            del kept[oldest]
    return new


def _value(program: Round, name: str) -> Any:
    assert program.origin is not None  # only such programs are kept
    return getattr(program.origin.settings, name)


def _key(new: Round) -> Hashable:
    """All that a program depends on, except what it takes as arguments and what it notes."""
    origin, problem = new.origin, new.problem
    assert origin is not None
    settings = [_fixed(s) for s in (origin.settings, new.settings)]
    optimizers = [v for v in settings[0] if callable(v)]
    apart = [v for t in problem.populations for k, v in _apart(t)]
    losses = [users_loss(original(term.loss)) for term in problem.terms]
    forms = tuple((name, *map(type, fs)) for name, fs in new.forms.of.items())
    steps = tuple((type(step), repr(vars(step))) for step in new.aggregation.steps)
    return (
        *settings, tuple(map(_apart, problem.populations)),
        tuple(term.weight for term in problem.terms), forms, steps, new.at, new.threads,
        new.long is not None, new.host, new.may_be_empty, new.mesh, jax.process_count(),
        origin.make, captured(origin.make, *losses, *optimizers, *filter(callable, apart)),
    )  # fmt: skip


def _apart(term) -> tuple:
    """A population's own settings, without its rate."""
    return tuple(sorted((k, v) for k, v in term.settings.items() if k not in RATES))


def _fixed(s: Settings) -> tuple:
    names = [f.name for f in dataclasses.fields(s) if f.name not in OF_A_RUN | {*RATES, "round"}]
    return tuple(getattr(s, name) for name in names)
