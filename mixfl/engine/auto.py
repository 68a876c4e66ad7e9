"""What an engine chooses if the settings say `auto`: the clients' forms, devices, chunks.

`Recipe.resolve` replaces each `auto` that the algorithm and the problem determine.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from mixfl.aggregation import Chain
from mixfl.algorithms.contract import Algorithm, uses_own_loss_only
from mixfl.engine import processes
from mixfl.errors import MixflError
from mixfl.forms import CHOOSE, low_rank
from mixfl.forms.base import Candidate, Form, Refused
from mixfl.forms.low_rank import LowRank
from mixfl.forms.products import in_products, products_in
from mixfl.forms.rows import RowForm
from mixfl.problem import Federated, Params, Problem
from mixfl.settings import Settings
from mixfl.trees import named_leaves

LARGE_PARAMETER = 2**20  # numbers; measured, see docs/simulator.md
SMALL_MODEL = 2**14  # numbers that a client trains


def model_shapes(problem: Problem) -> Params | None:
    """None if init fails: the preflight then says what is wrong with it."""
    try:
        return jax.eval_shape(problem.init, jax.random.key(0))
    except Exception:
        return None


def in_fast_form(
    problem: Problem, x: Params | None, algorithm: Algorithm, s: Settings
) -> tuple[Problem, Algorithm]:
    """With convolutions as products, if any loss has some."""
    plain = s.convolutions == "auto" and jax.default_backend() != "cpu"
    if x is None or plain or s.convolutions == "plain":
        return problem, algorithm
    fast = in_products(problem, x)
    if fast is problem:
        return problem, algorithm
    origin = algorithm.own_origin()
    return fast, origin.of(fast) if origin else algorithm


class Forms(NamedTuple):
    """The forms of each population, by its name, and why others are not used."""

    of: Mapping[str, tuple[Form, ...]]
    refused: tuple[Refused, ...] = ()

    def at(self, algorithm: Algorithm) -> "Forms":
        """Those of a round's algorithm: none if its clients use the model beyond their own loss."""
        return self if uses_own_loss_only(algorithm) else Forms(dict.fromkeys(self.of, ()))

    @property
    def tables(self) -> dict[str, Mapping]:
        """Per population, the row-sparse tables."""
        return {n: f.tables for n, fs in self.of.items() for f in fs if isinstance(f, RowForm)}

    @property
    def low_rank(self) -> dict[str, list[str]]:
        """Per population, the weights in the low-rank form."""
        return {n: list(f.weights) for n, fs in self.of.items() for f in fs
                if isinstance(f, LowRank)}  # fmt: skip


def client_batches(term: Federated, s: Settings) -> tuple[int, int]:
    """The steps and batch that clients are padded to: what the largest client can fill."""
    if not term.here:
        return s.local_steps, s.client_batch
    largest = int(term.clients.sizes().max())
    return min(s.local_steps, -(-largest // s.client_batch)), min(s.client_batch, largest)


def choose_forms(
    problem: Problem, x: Params | None, algorithm: Algorithm, s: Settings, aggregation: Chain
) -> Forms:
    """No forms if the algorithm has no clients, or if the model's shapes are not known."""
    if s.tables == "rows" and not any(t.rows for t in problem.populations):
        raise MixflError("tables = rows, but no term marks a table (rows=... of Federated).")
    if x is None or not algorithm.feed.clients:
        return Forms({t.name: () for t in problem.populations})
    forms, refused = {}, dict[Refused, str]()  # reason -> module of the form
    for term in problem.populations:
        steps, batch = client_batches(term, s)
        chosen: list[Form] = []
        for choose in CHOOSE:
            form = choose(
                Candidate(term, x, algorithm, s, steps, batch, s.aggregation != "mean",
                          aggregation.squares, aggregation.elements, chosen)
            )  # fmt: skip
            if isinstance(form, Refused):
                refused[form] = choose.__module__
            elif form is not None:
                chosen.append(form)
        forms[term.name] = tuple(chosen)
    reasons = [why for why, module in refused.items() if module == low_rank.__name__]
    chosen_forms = Forms(forms, tuple(why for why in refused if why not in reasons))
    if s.first_layer == "low-rank" and not chosen_forms.low_rank:
        raise low_rank.required([*reasons, "the clients' data is elsewhere"][0])
    return chosen_forms


def trains_few_numbers(x: Params, forms: tuple[Form, ...]) -> bool:
    """Does a client train so few numbers that starting a step costs more than the step itself?"""
    numbers = {n: leaf.size for n, leaf in named_leaves(x).items()}
    for form in forms:
        numbers = form.trained(numbers)
    return sum(numbers.values()) <= SMALL_MODEL


def choose_devices(
    problem: Problem, x: Params | None, algorithm: Algorithm, s: Settings, forms: Forms
) -> int:
    """The number of devices that share a cohort. On a CPU, `auto` means, in each process:

    one if there are no clients, or if products are large enough to use all cores by themselves
    (large parameters, low-rank layers); all but one for small models, where reading takes nearly as
    long as training; otherwise all."""
    available, count = processes.available(), jax.process_count()
    if s.aggregation != "mean" and algorithm.feed.clients:
        return _one_device(s, count)
    if s.devices == "auto":
        if jax.default_backend() != "cpu":
            return available
        if x is None or forms.low_rank or not algorithm.feed.clients:
            return count
        if any(p.size >= LARGE_PARAMETER for p in jax.tree.leaves(x)):
            return count
        small = all(trains_few_numbers(x, forms.of[t.name]) for t in problem.populations)
        return max(count, available - count) if small else available
    if s.devices % count:
        raise MixflError(
            f"devices = {s.devices}, but there are {count} processes: give a multiple of {count} "
            "(each process uses its share)."
        )
    if s.devices > available:
        raise MixflError(
            f"devices = {s.devices}, but JAX has {available}. On a CPU, the command line makes as "
            "many as are asked for; a program of your own does so at its start, with "
            f"mixfl.prepare_process(devices=n) ({os.cpu_count()} cores here)."
        )
    return s.devices


def _one_device(s: Settings, processes: int) -> int:
    """For aggregations that hold all summands of a cohort at once."""
    chunked = s.cohort_chunk != "auto" and s.cohort_chunk < s.cohort_size
    if processes > 1 or s.devices not in ("auto", 1) or chunked:
        raise MixflError(
            f"aggregation = {s.aggregation} compares the changes of all clients in one place: set "
            "devices = 1 and leave cohort_chunk out, and train in one process."
        )
    return 1


def resolved(
    problem: Problem, s: Settings, chunk: int, devices: int, forms: Forms, host: bool
) -> Settings:
    """The settings with each `auto` replaced by what was chosen."""
    chosen: dict[str, Any] = dict(
        cohort_chunk=chunk,
        devices=devices,
        tables="rows" if any(forms.tables.values()) else "dense",
        first_layer="low-rank" if forms.low_rank else "plain",
        loops="host" if host else "compiled",
        convolutions="products" if products_in(problem) else "plain",
    )
    return dataclasses.replace(s, **{k: v for k, v in chosen.items() if getattr(s, k) == "auto"})
