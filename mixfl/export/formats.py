"""A trained model in another format. The written file is read back and its outputs are compared."""

import contextlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mixfl.errors import MixflError
from mixfl.export.trained import Columns, Trained
from mixfl.runs.model_file import filled, model_bytes, model_paths
from mixfl.trees import params_of

ENDINGS = {
    "torch": ".pt",
    "onnx": ".onnx",
    "jax-export": ".jax_export",
    "safetensors": ".safetensors",
}
CLOSE = 1e-4  # relative to the largest output; float32 in another order of operations


class Checked(NamedTuple):
    """How far the outputs of the written file are from the model's, on how many examples."""

    rows: int  # 0: there was no `predict` or no example; the arrays are the same
    difference: float


def export(model: Trained, to: str, out: Path, data: Columns | None = None) -> Checked:
    """`data`: rows to compare outputs on; without it, some of the problem's own."""
    columns = data if data is not None else model.some()
    columns = {k: a[:8] for k, a in columns.items()}
    if to in ("onnx", "jax-export"):
        model.predict  # noqa: B018 (without it, there is nothing to export)
        if not columns:
            raise MixflError(
                "the problem has no examples here, so the shapes of a batch are not known: give "
                "some rows with --data."
            )
    if model.problem.predict is not None and columns:
        columns = model.used(columns)
    if not out.parent.is_dir():
        raise MixflError(f"there is no folder {out.parent}: choose another --out.")
    partial = out.with_name(f".{out.name}.partial")
    try:
        written = WRITERS[to](model, partial, columns)
        checked = _compared(model, written, columns)
        partial.replace(out)
    except OSError as error:
        raise MixflError(f"{out} can't be written: {error.strerror or error}.") from None
    finally:
        partial.unlink(missing_ok=True)
    return checked


Outputs = Callable[[Columns], Columns]  # of the written file


def _compared(model: Trained, written: Outputs, columns: Columns) -> Checked:
    if model.problem.predict is None or not columns:
        return Checked(0, 0.0)
    expected, found = model.outputs(columns), written(columns)
    worst = 0.0
    for name, a in expected.items():
        b = np.asarray(found[name])
        if a.shape != b.shape:
            raise MixflError(f"the written model returns {name} of shape {b.shape}, not {a.shape}.")
        a, b = a.astype(np.float64), b.astype(np.float64)
        odd = ~np.isfinite(a)
        if not np.array_equal(odd, ~np.isfinite(b)) or not np.array_equal(a[odd], b[odd], True):
            raise MixflError(
                f"the written model's {name} is not finite where the model's is, or the other way "
                "round: nothing is written."
            )
        a, b = a[~odd], b[~odd]
        largest = np.max(np.abs(a), initial=0) or 1.0
        worst = max(worst, float(np.max(np.abs(a - b), initial=0) / largest))
    if not worst <= CLOSE:
        raise MixflError(
            f"the written model's outputs differ from the model's by {worst:.2g} of the largest "
            f"(at most {CLOSE:g} was expected): nothing is written."
        )
    return Checked(len(next(iter(columns.values()))), worst)


def _arrays(model: Any) -> dict[str, np.ndarray]:
    return dict(zip(model_paths(model), map(np.asarray, jax.tree.leaves(model)), strict=True))


def _same(model: Trained, arrays: dict[str, np.ndarray], path: Path) -> Outputs:
    """The model again, from arrays that must be the same bit for bit."""
    own = _arrays(model.model)
    wrong = [k for k, a in own.items() if k not in arrays or a.tobytes() != arrays[k].tobytes()]
    if wrong:
        raise MixflError(f"{wrong[0]} was not written as it is: nothing is written.")
    again = filled(model.model, arrays, path)
    return Trained(model.path, model.config, model.problem, again, []).outputs


def to_safetensors(model: Trained, path: Path, columns: Columns) -> Outputs:
    from safetensors.numpy import load_file

    path.write_bytes(model_bytes(model.model, model.problem.frozen_digest()))
    return _same(model, load_file(path), path)


def to_torch(model: Trained, path: Path, columns: Columns) -> Outputs:
    """A state_dict for a model in PyTorch, otherwise a dict of tensors by their names."""
    torch = _needed("torch", "torch", "--to torch")
    source = _torch_model(model)
    if source is not None:
        torch.save(source.state_dict(params_of(model.model)), path)
        module = source.make()
        module.load_state_dict(torch.load(path, weights_only=True))
        named = {n: p.detach().numpy() for n, p in module.named_parameters()}
        return _same(model, {n: named[n] for n in model.model}, path)
    tensors = {k: torch.from_numpy(a.copy()) for k, a in _arrays(model.model).items()}
    torch.save(tensors, path)
    read = torch.load(path, weights_only=True)
    return _same(model, {k: t.numpy() for k, t in read.items()}, path)


def _torch_model(model: Trained) -> Any:
    """The mixfl.pytorch.Model of the problem, if it has one."""
    losses = [t.loss for t in model.problem.terms]
    found = [getattr(loss, "model", None) for loss in losses if hasattr(loss, "of_term")]
    return next((m for m in found if hasattr(m, "state_dict")), None)


def _in_jax(model: Trained, to: str) -> Callable:
    """The outputs as a function of the used columns, with the parameters in it."""
    if model.in_torch:
        raise MixflError(
            f"--to {to} is for models in JAX, and this one's `predict` is in PyTorch: export it "
            "with --to torch, and use torch.onnx or torch.export on the module."
        )
    params = jax.tree.map(jax.numpy.asarray, model.model)
    return lambda batch: model.predict(params, batch)


def to_jax_export(model: Trained, path: Path, columns: Columns) -> Outputs:
    """A serialized program that takes batches of any size."""
    from jax import export

    _needed("flatbuffers", "", "--to jax-export")
    (size,) = export.symbolic_shape("batch")
    shapes = {k: jax.ShapeDtypeStruct((size, *a.shape[1:]), _dtype(a)) for k, a in columns.items()}
    try:
        program = export.export(jax.jit(_in_jax(model, "jax-export")))(shapes)
    except MixflError:
        raise
    except Exception as error:
        raise _refused("jax.export", error) from error
    path.write_bytes(program.serialize())
    read = export.deserialize(bytearray(path.read_bytes()))
    return lambda batch: {k: np.asarray(v) for k, v in read.call(_cast(batch)).items()}


def to_onnx(model: Trained, path: Path, columns: Columns) -> Outputs:
    with _quiet():
        jax2onnx = _needed("jax2onnx", "onnx", "--to onnx")
    onnx, runtime = (
        _needed("onnx", "onnx", "--to onnx"),
        _needed("onnxruntime", "onnx", "--to onnx"),
    )
    function, names = _in_jax(model, "onnx"), list(columns)
    kinds: list[str] = []  # the outputs' names

    def positional(*arrays):
        outputs = function(dict(zip(names, arrays, strict=True)))
        kinds[:] = list(outputs)
        return tuple(outputs.values())

    shapes = [jax.ShapeDtypeStruct(("B", *a.shape[1:]), _dtype(a)) for a in columns.values()]
    try:
        with _quiet():
            graph = jax2onnx.to_onnx(positional, shapes, model_name=model.problem.name)
        for old, new in zip(graph.graph.input, names, strict=True):
            _rename(graph, old.name, new)
        for old, new in zip(graph.graph.output, kinds, strict=True):
            _rename(graph, old.name, new)
        onnx.checker.check_model(graph)
        path.write_bytes(graph.SerializeToString())
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except OSError:
        raise
    except Exception as error:
        raise _refused("jax2onnx", error) from error
    return lambda batch: dict(zip(kinds, session.run(kinds, _cast(batch)), strict=True))


def _rename(graph: Any, old: str, new: str) -> None:
    """A tensor of an ONNX graph, everywhere."""
    for node in graph.graph.node:
        node.input[:] = [new if n == old else n for n in node.input]
        node.output[:] = [new if n == old else n for n in node.output]
    for value in (*graph.graph.input, *graph.graph.output, *graph.graph.value_info):
        if value.name == old:
            value.name = new


def _dtype(a: np.ndarray) -> Any:
    """JAX's own, without 64 bits."""
    return jax.dtypes.canonicalize_dtype(a.dtype)


def _cast(batch: Columns) -> Columns:
    return {k: np.asarray(a, _dtype(a)) for k, a in batch.items()}


def _refused(by: str, error: Exception) -> MixflError:
    lines = str(error).strip().splitlines()
    return MixflError(
        f"{by} can't export this `predict`: {type(error).__name__}: {''.join(lines[:1])[:300]}. "
        "(It must take batches of any size: write x.shape[0], not len(x), and no `if` on it.)"
    )


@contextlib.contextmanager
def _quiet():
    """jax2onnx prints what its plugins for other libraries lack, and warns of every shape."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _needed(module: str, extra: str, what: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"'mixfl[{extra}]'" if extra else module
        raise MixflError(f"{what}: {error}. Install it: pip install {install}") from None


WRITERS: dict[str, Callable[[Trained, Path, Columns], Outputs]] = {
    "torch": to_torch, "onnx": to_onnx, "jax-export": to_jax_export, "safetensors": to_safetensors,
}  # fmt: skip
