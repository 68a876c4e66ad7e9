"""What an engine chooses if the settings say `auto`: the clients' forms, devices, chunks.

`Recipe.resolve` replaces each `auto` that the algorithm and the problem determine.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mixfl.aggregation import Chain
from mixfl.algorithms.contract import Algorithm
from mixfl.algorithms.marks import uses_own_loss_only
from mixfl.engine import processes
from mixfl.engine.first_model import first_shapes
from mixfl.engine.sizes import Shape, client_shapes
from mixfl.errors import MixflError
from mixfl.forms import CHOOSE, flops, low_rank
from mixfl.forms.base import Candidate, Form, Refused
from mixfl.forms.low_rank import LowRank
from mixfl.forms.products import in_products, original, products_in
from mixfl.forms.rows import RowForm
from mixfl.model_state import carries_state
from mixfl.problem import Federated, Params, Problem
from mixfl.randomness import batch_shapes
from mixfl.settings import Settings
from mixfl.trees import named_leaves

LARGE_PARAMETER = 2**20  # numbers; measured, see docs/simulator.md
FLOPS_PER_NUMBER = 500  # of a step's products, above which a large parameter is not what takes time
BEHIND = 0.2  # numbers trained behind low-rank layers, as a part of theirs: above it, all devices
SMALL_MODEL = 2**14  # numbers that a client trains
GROUPED_MODEL = 2**12  # below it, clients train in groups on a CPU, also without any form
GROUP = 10  # clients of such a group
AT_ONCE = 2**28  # numbers that clients train at once on an accelerator, 1 GB of float32
NATIVE_GROUP = 2**23  # numbers that the clients of one call of PyTorch train


def model_shapes(problem: Problem) -> Params | None:
    """None if init fails: the preflight then says what is wrong with it."""
    try:
        return first_shapes(problem)
    except Exception:
        return None


def in_fast_form(
    problem: Problem, x: Params | None, algorithm: Algorithm, s: Settings, platform: str = "cpu"
) -> tuple[Problem, Algorithm]:
    """With convolutions and recurrent layers as products, if any loss has some."""
    plain = s.convolutions == "auto" and platform != "cpu"
    if x is None or plain or s.convolutions == "plain":
        return problem, algorithm
    fast = in_products(problem, x, s)
    if fast is problem:
        return problem, algorithm
    origin = algorithm.own_origin()
    return fast, origin.of(fast) if origin else algorithm


class Forms(NamedTuple):
    """The forms of each population, by its name, and why others are not used."""

    of: Mapping[str, tuple[Form, ...]]  # of clients of the largest size
    refused: tuple[Refused, ...] = ()
    smaller: Mapping[str, Mapping[Shape, tuple[Form, ...]]] = {}  # of smaller ones (sizes.py)

    def at(self, algorithm: Algorithm) -> "Forms":
        """Those of a round's algorithm: none if its clients use the model beyond their own loss."""
        return self if uses_own_loss_only(algorithm) else Forms(dict.fromkeys(self.of, ()))

    def sized(self, population: str, shape: tuple[int, int]) -> tuple[Form, ...]:
        """Those of clients that are padded to a shape."""
        return self.smaller.get(population, {}).get(Shape(*shape), self.of.get(population, ()))

    def _every(self) -> Iterator[tuple[str, Form]]:
        for population, forms in self.of.items():
            for some in (forms, *self.smaller.get(population, {}).values()):
                yield from ((population, form) for form in some)

    @property
    def tables(self) -> dict[str, Mapping]:
        """Per population, the row-sparse tables."""
        return {n: f.tables for n, fs in self.of.items() for f in fs if isinstance(f, RowForm)}

    @property
    def low_rank(self) -> dict[str, list[str]]:
        """Per population, the weights in the low-rank form."""
        return {n: list(f.weights) for n, f in self._every() if isinstance(f, LowRank)}


def choose_forms(
    problem: Problem, x: Params | None, algorithm: Algorithm, s: Settings, aggregation: Chain,
    platform: str = "",
) -> Forms:  # fmt: skip
    """No forms if the algorithm has no clients, or if the model's shapes are not known."""
    if s.tables == "rows" and not any(t.rows for t in problem.populations):
        raise MixflError("tables = rows, but no term marks a table (rows=... of Federated).")
    if x is None or not algorithm.feed.clients:
        return Forms({t.name: () for t in problem.populations})
    refused = dict[Refused, str]()  # reason -> module of the form

    def of_shape(term: Federated, shape: Shape) -> tuple[Form, ...]:
        chosen: list[Form] = []
        if carries_state(term.loss):
            return ()  # forms compute losses alone
        for choose in CHOOSE:
            form = choose(
                Candidate(term, x, algorithm, s.of(term), *shape, s.aggregation != "mean",
                          aggregation.squares, aggregation.elements, chosen,
                          platform or jax.default_backend())
            )  # fmt: skip
            if isinstance(form, Refused):
                refused[form] = choose.__module__
            elif form is not None:
                chosen.append(form)
        return tuple(chosen)

    forms, smaller = {}, {}
    for term in problem.populations:
        *small, largest = client_shapes(term, s.of(term))
        forms[term.name] = of_shape(term, largest)
        smaller[term.name] = {shape: of_shape(term, shape) for shape in small}
    reasons = [why for why, module in refused.items() if module == low_rank.__name__]
    chosen_forms = Forms(forms, tuple(why for why in refused if why not in reasons), smaller)
    if s.first_layer == "low-rank" and not chosen_forms.low_rank:
        if problem.state is not None:
            raise low_rank.required("losses have a state")
        raise low_rank.required([*reasons, "the clients' data is elsewhere"][0])
    return chosen_forms


def trained_numbers(x: Params, forms: Sequence[Form]) -> int:
    """How many numbers a client usually trains."""
    numbers = {n: leaf.size for n, leaf in named_leaves(x).items()}
    for form in forms:
        numbers = form.trained(numbers)
    return sum(numbers.values())


def mostly_low_rank(x: Params, forms: Sequence[Form], weights: Sequence[str]) -> bool:
    """Is the layers' work most of it, because few numbers are trained behind them?"""
    numbers = {n: leaf.size for n, leaf in named_leaves(x).items()}
    return trained_numbers(x, forms) < BEHIND * sum(numbers[n] for n in weights)


def trains_few_numbers(x: Params, forms: Sequence[Form]) -> bool:
    """Does a client train so few numbers that starting a step costs more than the step itself?"""
    return trained_numbers(x, forms) <= SMALL_MODEL


def clients_at_once(platform: str, clients: int, x: Params, forms: Sequence[Form]) -> int:
    """How many of so many clients train at once, in one batched step: a divisor of their number.

    On a CPU one by one, because batched products of weights are slow. Small models are the
    exception: there, starting a step is most of its cost. On an accelerator, as many as memory
    allows: it has far more arithmetic units than one client keeps busy."""
    if platform != "cpu":
        most = max(1, AT_ONCE // max(1, trained_numbers(x, forms)))
    elif not trains_few_numbers(x, forms) or any(form.alone for form in forms):
        most = 1
    elif any(form.large_groups for form in forms):
        most = clients
    else:
        # Rows of tables are gathered, not multiplied.
        tables = any(isinstance(form, RowForm) for form in forms)
        most = GROUP if tables or trained_numbers(x, forms) <= GROUPED_MODEL else 1
    return largest_divisor(clients, most)


def native_group(threads: int, clients: int, x: Params) -> int:
    """How many of so many clients one call of PyTorch trains, in so many threads: a divisor of
    their number. A thread takes the next client of the call when it is done with one, so in large
    groups no thread waits for long; but the group's models are in memory at once."""
    return largest_divisor(clients, max(threads, NATIVE_GROUP // max(1, trained_numbers(x, ()))))


def largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, min(most, number) + 1) if number % n == 0)


def flops_per_number(term: Federated, x: Params, s: Settings) -> float:
    """Of the products of a client's step, per number of the model. 6 |B_i| in dense layers; more
    in convolutions, and where a layer is used several times."""
    batch = batch_shapes(term, s.of(term).client_batch)
    try:
        return flops.of_gradient(original(term.loss), x, batch) / trained_numbers(x, ())
    except Exception:  # can't be counted; or the preflight says what is wrong with the loss
        return 0.0


def choose_devices(
    problem: Problem, x: Params | None, algorithm: Algorithm, s: Settings, forms: Forms,
    platform: str = "cpu",
) -> int:  # fmt: skip
    """The number of devices that share a cohort. `auto` means all accelerators; on a CPU, in each
    process:

    one if there are no clients, or if products with large parameters (or of low-rank layers), which
    use all cores by themselves, are most of the work; all but one for small models, where reading
    takes nearly as long as training; otherwise all."""
    available, count = processes.available(), jax.process_count()
    if s.aggregation != "mean" and algorithm.feed.clients:
        return _one_device(s, count)
    if s.devices == "auto":
        if platform != "cpu":
            return available
        if x is None or not algorithm.feed.clients:
            return count
        layers = forms.low_rank
        if layers and all(
            mostly_low_rank(x, forms.of[t.name], layers.get(t.name, ()))
            for t in problem.populations
        ):
            return count
        if any(p.size >= LARGE_PARAMETER for p in jax.tree.leaves(x)) and not all(
            flops_per_number(term, x, s) > FLOPS_PER_NUMBER for term in problem.populations
        ):
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
    problem: Problem, s: Settings, chunk: int, devices: int, forms: Forms, loops: str = "compiled"
) -> Settings:
    """The settings with each `auto` replaced by what was chosen."""
    chosen: dict[str, Any] = dict(
        cohort_chunk=chunk,
        devices=devices,
        tables="rows" if any(forms.tables.values()) else "dense",
        first_layer="low-rank" if forms.low_rank else "plain",
        loops=loops,
        convolutions="products" if products_in(problem) else "plain",
    )
    return dataclasses.replace(s, **{k: v for k, v in chosen.items() if getattr(s, k) == "auto"})
