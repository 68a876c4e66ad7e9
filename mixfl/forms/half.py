"""Losses that compute in bfloat16, while the parameters and all sums stay float32.

Parameters, floating-point data and frozen arrays are cast on the way into a loss, and losses on the
way out. So gradients, steps and sums are in float32.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mixfl.algorithms.contract import Algorithm
from mixfl.errors import MixflError
from mixfl.losses import Takes, takes
from mixfl.problem import Problem
from mixfl.settings import Settings


def half(tree: Any) -> Any:
    """In bfloat16 what is in float32 or float64."""
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16) if _single(a) else a, tree)


def _single(a: Any) -> bool:
    return getattr(a, "dtype", None) in (jnp.float32, jnp.float64)


@dataclass(frozen=True)
class InBfloat16:
    """The same loss, computed in bfloat16."""

    loss: Callable

    @property
    def takes(self) -> Takes:
        return takes(self.loss)

    @property
    def frozen(self) -> Any:
        return getattr(self.loss, "frozen", None)

    def with_frozen(self, arrays: Any) -> "InBfloat16":
        return InBfloat16(self.loss.with_frozen(half(arrays)))  # type: ignore[attr-defined]

    def __call__(self, *args, **more):
        result = self.loss(*half(args), **half(more))
        short = lambda a: getattr(a, "dtype", None) == jnp.bfloat16  # noqa: E731
        return jax.tree.map(lambda a: a.astype(jnp.float32) if short(a) else a, result)


def in_half(problem: Problem, s: Settings) -> Problem:
    """With losses that compute as `compute` says."""
    if s.compute == "float32" or any(isinstance(t.loss, InBfloat16) for t in problem.terms):
        return problem
    if problem.state is not None:
        raise MixflError(
            f"compute = {s.compute}: the problem has a state, which would lose digits in every "
            "step. Cast inside the losses."
        )
    for term in problem.terms:
        if hasattr(term.loss, "in_pytorch"):
            raise MixflError(
                f"compute = {s.compute}: the loss of term '{term.name}' is written in PyTorch. "
                "Cast inside it (torch.autocast), or write it in JAX."
            )
    return problem.with_terms(
        [dataclasses.replace(t, loss=InBfloat16(t.loss)) for t in problem.terms]
    )


def algorithm_in_half(
    problem: Problem, algorithm: Algorithm, s: Settings
) -> tuple[Problem, Algorithm]:
    """The same for a problem with its algorithm."""
    changed, origin = in_half(problem, s), algorithm.own_origin()
    if changed is problem:
        return problem, algorithm
    if origin is None:
        raise MixflError(
            f"compute = {s.compute}, but the algorithm's functions were replaced after it was "
            "built. Make an algorithm of it (@algorithm)."
        )
    return changed, origin.of(changed)
