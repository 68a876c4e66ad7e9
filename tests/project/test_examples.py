"""The examples: mixed FL learns what FL alone can't, and alike with every kind of model."""

import dataclasses
import functools
import importlib
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import mixfl
from mixfl.tasks import find

FOLDER = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(FOLDER))
plain, flax_module, equinox_module, pytorch_module, huggingface_lora = map(
    importlib.import_module,
    ("plain", "flax_module", "equinox_module", "pytorch_module", "huggingface_lora"),
)
MIXED = ("pt", "1wgt", "2wgt")
# More than four steps are compiled as a loop, which takes less time than written out.
FEW = dict(rounds=12, cohort_size=8, local_steps=5, eval_every=12)


def flax_params(params):
    """Plain params as Flax names them."""
    return {name: {"kernel": layer["w"], "bias": layer["b"]} for name, layer in params.items()}


def equinox_params(params):
    """Plain params as Equinox keeps them, matrices transposed."""
    return eqx.tree_at(
        lambda model: [a for layer in model.layers for a in (layer.weight, layer.bias)],
        equinox_module.init(jax.random.key(0)),
        [a for k in ("hidden", "out") for a in (params[k]["w"].T, params[k]["b"])],
    )


def pytorch_params(params):
    """Plain params as PyTorch names them, matrices transposed."""
    return {
        f"{name}.{own}": a for name, layer in params.items()
        for own, a in (("weight", layer["w"].T), ("bias", layer["b"]))
    }  # fmt: skip


def pytorch_logits(params, x):
    module = pytorch_module.model.module(params)
    return module(pytorch_module.torch.tensor(x, dtype=pytorch_module.torch.float32)).detach()


# The example, plain params in its form, and its logits.
MODELS = {
    "plain": (plain, lambda params: params, plain.logits),
    "flax": (flax_module, flax_params, lambda p, x: flax_module.merged(p)(x)),
    "equinox": (equinox_module, equinox_params, lambda p, x: equinox_module.combined(p)(x)),
    "pytorch": (pytorch_module, pytorch_params, pytorch_logits),
}


def predictions(kind, params) -> np.ndarray:
    """[test points, kinds of points]"""
    return np.asarray(MODELS[kind][2](params, plain.test["x"]))


@functools.cache
def trained(kind, algorithm):
    """From the parameters that plain.py begins with."""
    example, convert, _ = MODELS[kind]
    problem = dataclasses.replace(example.problem, init=lambda key: convert(plain.init(key)))
    return mixfl.train(problem, algorithm, **FEW)


@pytest.mark.parametrize("kind", MODELS)
def test_mixed_learns_what_federated_alone_can_not(kind):
    accuracy = {
        algorithm: trained(kind, algorithm).metrics[-1]["eval/accuracy"]
        for algorithm in ("fedavg", *MIXED)
    }
    assert 0.6 < accuracy["fedavg"] < 0.7  # a third of the points are of the kind it never sees
    for algorithm in MIXED:
        assert accuracy[algorithm] > accuracy["fedavg"] + 0.2, accuracy


@pytest.mark.parametrize("algorithm", MIXED)
def test_kinds_of_models_train_alike(algorithm):
    """One model written in four ways: the same function after training, to rounding."""
    before, after = (
        predictions("plain", params)
        for params in (plain.init(jax.random.key(0)), trained("plain", algorithm).params)
    )
    assert np.abs(after - before).max() > 1
    for kind in ("flax", "equinox", "pytorch"):
        found = predictions(kind, trained(kind, algorithm).params)
        np.testing.assert_allclose(found, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["flax", "equinox", "pytorch"])
def test_saved_model_predicts_the_same(kind, tmp_path):
    """The example as it is on the command line, with its own init; saved and read back."""
    problem = find(f"{FOLDER / MODELS[kind][0].__name__}.py:problem").build({}, None)
    result = mixfl.train(problem, "2wgt", **FEW, out=tmp_path / "run")
    assert result.metrics[-1]["eval/accuracy"] > 0.85
    like = problem.init(jax.random.key(7))
    loaded = mixfl.load(tmp_path / "run", like=like).params
    assert jax.tree.structure(loaded) == jax.tree.structure(like)
    np.testing.assert_array_equal(predictions(kind, loaded), predictions(kind, result.params))
    assert np.abs(predictions(kind, loaded) - predictions(kind, like)).max() > 1


@pytest.mark.system
def test_adapters_learn_the_datacenters_sequences():
    """LoRA on a GPT-2: 1 of 3 kinds of sequences is only at the datacenter."""
    results = {
        a: mixfl.train(huggingface_lora.problem, a, rounds=60, cohort_size=10).metrics[-1]
        for a in ("fedavg", "2wgt")
    }
    assert results["2wgt"]["eval/loss"] < results["fedavg"]["eval/loss"]
