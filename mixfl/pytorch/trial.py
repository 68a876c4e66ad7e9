"""A trial of a loss on a few examples: is it pure, and is it the same when torchax compiles it?

The trial takes place at three models (`models`), each with examples of its own if there are enough.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mixfl.engine.dispatch import QUICK
from mixfl.errors import MixflError
from mixfl.pytorch.norms import BATCH_NORMS
from mixfl.pytorch.own_derivatives import own_derivatives
from mixfl.pytorch.tensors import to_numpy
from mixfl.randomness import KEYS

TOLERANCE = 1e-4  # of the largest number of a gradient
ROUNDING = 1e-6  # of the largest number of all gradients
OTHERS = 1e-3  # of a loss: what rounding may change if other examples are in its batch
LARGE = 300.0  # times the first model
DEPENDS = (
    "what it returns depends on the data in a way that is not known when the program is compiled "
    "(.item(), an `if` on a tensor, x[mask])"
)
STILL_DRAWS = (
    "in evaluation mode (module.eval()) it draws too, so what torchax compiles can't be compared "
    "with PyTorch. Draw in layers, such as nn.Dropout, that evaluation mode turns off"
)
CHECKS = (
    "a check of data, which a compiled program can't do. That of torch.distributions is left out "
    "with validate_args=False"
)
UNKNOWN_WHEN_COMPILED = (
    jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError,
)  # fmt: skip


class Verdict(NamedTuple):
    compiled: Callable | None = None  # of parameters, frozen arrays and a batch
    note: str = ""  # why it is not compiled
    refused: str = ""  # why it can't be used


class Point(NamedTuple):
    """A model and a batch, and what PyTorch computes there."""

    params: dict[str, np.ndarray]
    batch: tuple
    losses: np.ndarray
    slopes: dict[str, np.ndarray]
    exact: bool = True  # else, only finite where PyTorch's are


def tried(loss, batches: Sequence[tuple]) -> Verdict:
    """All of one shape. A batch is empty for a regularizer."""
    model, batch = loss.model, batches[0]
    module = model.fresh()
    first = {n: to_numpy(p).copy() for n, p in module.named_parameters() if n in model.names}
    model.fill(module, nudged(first))
    _check_tables(loss, module)
    refused = _impure(loss, module, batch)
    if refused:
        return Verdict(refused=refused)
    if not loss.compile:
        return Verdict()
    if loss.takes_key:
        module.eval()  # what PyTorch and JAX draw can't be compared
        if _draws(loss, module, batch):
            return Verdict(note=STILL_DRAWS)
    if own := own_derivatives(module, lambda: loss.at(module, *batch)):
        return Verdict(note=own)
    rows = loss.at(module, *batch).shape
    weights = np.asarray(np.random.default_rng(1).normal(size=rows), np.float32)
    points = _points(loss, module, first, weights, batches)
    here = next(points)  # what PyTorch itself can't compute is the user's mistake
    return _compared(loss, weights, itertools.chain([here], points))


def _points(loss, module, first, weights, batches) -> Iterator[Point]:
    for i, (params, exact) in enumerate(models(first)):
        batch = batches[i % len(batches)]
        try:
            losses = loss.at(loss.model.fill(module, params), *batch)
            slopes = loss._slopes(module, params, losses, torch.from_numpy(weights))
        except Exception:
            if i == 0:
                raise
            continue  # PyTorch itself can't compute it there
        found = {n: to_numpy(g) for n, g in slopes.items()}
        yield Point(params, batch, to_numpy(losses.float()), found, exact)


def models(first: dict[str, np.ndarray]) -> Iterator[tuple[dict[str, np.ndarray], bool]]:
    """Where a loss is compared, and whether numbers must be equal. With noise, because zeros would
    hide mistakes; the first model, whose zeros are where functions bend; and a large one, where
    functions end: its numbers are too rounded to be compared, but should be finite."""
    yield nudged(first), True
    yield first, True
    yield {name: np.asarray(LARGE * a, a.dtype) for name, a in nudged(first).items()}, False


def nudged(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def moved(a):
        size = 0.1 * float(np.sqrt(np.mean(np.square(a)))) if a.size else 0.0
        return a + (size or 0.02) * rng.normal(size=a.shape).astype(a.dtype)

    return {name: np.asarray(moved(a), a.dtype) for name, a in params.items()}


def _check_tables(loss, module: torch.nn.Module) -> None:
    """With rows=..., a client numbers its own rows anew, and padding_idx would name another one."""
    for name in getattr(loss.term, "rows", ()):
        place = name.rpartition(".")[0]
        layer = module.get_submodule(place) if name in loss.model.names else None
        if getattr(layer, "padding_idx", None) is not None:
            raise MixflError(
                f"{place} has padding_idx = {layer.padding_idx}, which does not work with "  # type: ignore[union-attr]
                f"rows={{'{name}': ...}}: leave one of them out."
            )


def _impure(loss, module: torch.nn.Module, batch: tuple) -> str:
    """What is wrong with the loss; empty if nothing is."""
    tensors = dict(module.state_dict(keep_vars=True)) | dict(module.named_buffers())
    before = {name: t.detach().clone() for name, t in tensors.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = torch.random.get_rng_state()
        first = loss.at(module, *batch)
        drew = not torch.equal(torch.random.get_rng_state(), start)
        _check_result(loss, module, first, batch)
        again = loss.at(module, *batch)
    changed = [n for n, t in tensors.items() if not _equal(t.detach(), before[n])]
    if trained := [n for n in changed if n in loss.model.names]:
        return (
            f"changes {', '.join(trained[:3])} itself, which is trained (max_norm of a table?): "
            "leave that out, or scale what is looked up."
        )
    if changed:
        return (
            f"changes {', '.join(changed[:3])} of the module, such as a BatchNorm in training mode "
            "does, and these are not trained. Convert the module in the function that makes it, "
            "mixfl.pytorch.with_group_norm(module), or fix them there with module.eval()."
        )
    same = _equal(first.detach(), again.detach())
    if loss.takes_key and not same:
        return (
            "draws random numbers that its key does not determine: only PyTorch's own operators, "
            "such as Dropout and torch.rand, draw from it."
        )
    if drew or not same:
        return (
            "draws random numbers (Dropout?): the same inputs must give the same loss. Let it take "
            "a key, function(module, batch, key). Or call module.eval() in the function that makes "
            "the module, or in the loss, or set dropout to 0."
        )
    return _of_the_batch(loss, module, batch, first)


def _draws(loss, module: torch.nn.Module, batch: tuple) -> bool:
    """Do other keys give other losses?"""
    (data,) = batch
    other = {**data, KEYS: data[KEYS] ^ np.uint32(0x9E3779B9)}
    return not _equal(loss.at(module, data).detach(), loss.at(module, other).detach())


def _of_the_batch(loss, module: torch.nn.Module, batch: tuple, losses: torch.Tensor) -> str:
    """Batches have padding and are cut: an example's loss must be the same whatever is with it."""
    if not batch:
        return ""
    first = {name: np.repeat(np.asarray(c)[:1], len(c), 0) for name, c in batch[0].items()}
    try:
        alone = loss.at(module, first, *batch[1:])[:1].detach()
    except Exception:
        return ""  # equal examples are a special case of its own
    names = [
        name or type(layer).__name__
        for name, layer in module.named_modules()
        if isinstance(layer, BATCH_NORMS) and layer.running_mean is None
    ]
    found, expected = to_numpy(alone.float()), to_numpy(losses[:1].detach().float())
    if np.allclose(found, expected, 0 if names else OTHERS, 0, equal_nan=True):
        return ""
    if loss.term is None and not names:
        return ""  # called by its user, with batches that nobody pads
    if names:
        return (
            f"depends on the other examples of its batch: {', '.join(names[:3])} has no statistics "
            "of its own (track_running_stats=False). Convert the module in the function that makes "
            "it: mixfl.pytorch.with_group_norm(module)."
        )
    return (
        "depends on the other examples of its batch, which may be padding or in another part. "
        "Compute each example's loss from that example alone; what it is compared with, such as "
        "other examples, can be columns of it."
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return np.array_equal(to_numpy(a.float()), to_numpy(b.float()), equal_nan=True)


def _check_result(loss, module: torch.nn.Module, losses: Any, batch: tuple) -> None:
    name = loss.name
    if not isinstance(losses, torch.Tensor):
        raise MixflError(f"{name} returned a {type(losses).__name__}: it must return a tensor.")
    rows = len(next(iter(batch[0].values()))) if batch else None
    shape = tuple(losses.shape)
    if rows is None and shape != ():
        raise MixflError(f"{name} must return one number (it has no data), got shape {shape}.")
    if rows is not None and shape != (rows,):
        raise MixflError(
            f"{name} returned shape {shape} for a batch of {rows} examples: it must return one "
            f"loss per example, shape ({rows},). Leave out the mean or sum over the batch "
            "(reduction='none')."
        )
    if not losses.dtype.is_floating_point:
        raise MixflError(f"{name} returned {losses.dtype}: it must return floating-point numbers.")
    if not losses.requires_grad:
        raise MixflError(f"{name} does not depend on any parameter that is trained.")
    trained = [p for p in module.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(losses.sum(), trained, allow_unused=True, retain_graph=True)
    if all(g is None for g in slopes):
        raise MixflError(
            f"{name} depends on parameters of another module only: call the module that it is "
            "given, function(module, batch)."
        )


def _compared(loss, weights: np.ndarray, points: Iterable[Point]) -> Verdict:
    """Compiled, if that gives what PyTorch gave."""
    try:
        from mixfl.pytorch.compiled import compiled

        keyed = loss.takes_key
        function, held = compiled(loss.model, loss.function, keyed), loss.model.frozen_arrays
        frozen = held.arrays if held else {}
        fixed = compiled(loss.model, loss.function, keyed, drawing=False) if keyed else function

        def both(params, frozen, *batch):
            losses, back = jax.vjp(lambda p: fixed(p, frozen, *batch), params)
            return losses, back(jnp.asarray(weights))[0]

        options = QUICK if jax.default_backend() == "cpu" else None
        program = jax.jit(both, compiler_options=options)
        for point in points:
            if wrong := _differs(point, *program(point.params, frozen, *point.batch)):
                return Verdict(note=f"compiled by torchax, its values or gradients are {wrong}")
            if keyed:
                jax.eval_shape(function, point.params, frozen, *point.batch)  # with its draws
    except Exception as error:
        return failed(error)
    return Verdict(function)


def _differs(point: Point, losses, slopes) -> str:
    """How what was compiled differs from PyTorch; empty if it does not."""
    found, expected = [slopes[n] for n in point.slopes], [*point.slopes.values()]
    if not point.exact:
        finite = _finite([point.losses, *expected])
        missed = finite and not _finite([losses, *found])
        return "not finite for large parameters, where PyTorch's are" if missed else ""
    off = max(_off([losses], [point.losses]), _off(found, expected))
    return "" if off <= TOLERANCE else f"off by {off:.0e}"


def _finite(arrays: list) -> bool:
    return all(np.isfinite(a).all() for a in arrays)


def _off(found: list, expected: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest number of each array."""
    largest = max(float(np.abs(e).max(initial=0)) for e in expected)
    worst = 0.0
    for f, e in zip(found, expected, strict=True):
        same = (np.asarray(f) == e) | (np.isnan(f) & np.isnan(e))
        difference = np.where(same, 0, np.abs(np.asarray(f) - e))
        size = max(float(np.abs(e).max(initial=0)), ROUNDING / TOLERANCE * largest)
        worst = max(worst, float(difference.max(initial=0)) / max(size, 1e-30))
    return worst


def failed(error: Exception) -> Verdict:
    """The note names the operator."""
    operator = getattr(error, "operator", None)
    name = "" if operator is None else f"{_name(operator)}: "
    if isinstance(error, ImportError):
        return Verdict(note=f"torchax is missing ({error}): pip install 'mixfl[torch]'")
    if name.startswith("aten._is_all_true"):
        return Verdict(note=name + CHECKS)
    if isinstance(error, UNKNOWN_WHEN_COMPILED):
        return Verdict(note=name + DEPENDS)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return Verdict(note=f"{name}torchax can't compile it ({lines[0][:200]})")


def _name(operator: Any) -> str:
    overload = isinstance(operator, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return str(operator) if overload else getattr(operator, "__name__", str(operator))
