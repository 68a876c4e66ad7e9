"""The zoo: the JAX and the PyTorch version of a model are the same model, all loops train it alike,
and the summary says what the rows say. Nothing depends on how fast the machine is."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import mixfl_worker, operations, report, scan_worker, workloads
from benchmarks.peers import protocol
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo import in_jax, summary
from benchmarks.zoo.models import MODELS
from mixfl.forms import flops

SMALL = {
    "logistic": {"image": (5, 5), "classes": 3},
    "mlp": {"image": (5, 5), "classes": 3, "hidden": 4},
    "cnn": {"image": (10, 10), "classes": 4, "channels": (3, 5), "hidden": 6},
    "resnet": {"image": (8, 8, 3), "classes": 3, "stages": (4, 8), "blocks": 1, "groups": 2},
    "lstm": {"vocabulary": 7, "embedding": 3, "hidden": 5, "layers": 2, "length": 6},
    "gpt": {"vocabulary": 7, "width": 8, "layers": 2, "heads": 2, "length": 6},
    "factors": {"users": 6, "items": 20, "width": 3, "per_user": 8},
}


def small(name: str):
    return replace(
        MODELS[name].size, S=3, K=2, B=3, clients=6, per_client=8, central=12, model=SMALL[name]
    )


@pytest.fixture
def written(request, tmp_path):
    folder = tmp_path / request.param
    workloads.write(small(request.param), folder, rounds=2)
    return folder


def both(folder):
    """The workload, its JAX loss and parameters, and its module."""
    torch_models = pytest.importorskip("benchmarks.peers.torch_models", exc_type=ImportError)
    work = protocol.Workload(folder)
    params = jax.tree.map(jnp.asarray, protocol.tree(work.params))
    return work, partial(in_jax.LOSSES[work.task], model=work.model), params, torch_models


@pytest.mark.parametrize("written", MODELS, indirect=True)
def test_jax_and_torch_have_the_same_losses_and_gradients(written):
    work, loss, params, torch_models = both(written)
    module, data = torch_models.build(work), work.client(0, 0)
    losses = module.losses(**torch_models.tensors(data))
    np.testing.assert_allclose(losses.detach().numpy(), loss(params, data), rtol=1e-4, atol=1e-5)
    losses.mean().backward()
    grads = protocol.flat(jax.grad(lambda x: loss(x, data).mean())(params))
    assert set(grads) == set(module.translation())
    for name, (parameter, turn) in module.translation().items():
        theirs = turn.to_jax(parameter.grad.numpy())
        scale = np.abs(grads[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(theirs, grads[name], rtol=1e-3, atol=1e-3 * scale, err_msg=name)
    for name, value in torch_models.named(module).items():
        np.testing.assert_array_equal(value, work.params[name])


@pytest.mark.parametrize("written", MODELS, indirect=True)
def test_loops_agree(written):
    """A round of the bare loop is a round of the PyTorch loop."""
    pytest.importorskip("torch")
    from benchmarks.peers import torch_worker

    models = [after_rounds(e, written) for e in (scan_worker.Engine(), torch_worker.Engine())]
    start = protocol.Workload(written).params
    assert report.difference(*models, start) < 1e-2  # a ReLU near 0 may be rounded to either side
    assert report.difference(start, models[0], start) > 0.99  # and they moved


@pytest.mark.parametrize(
    "written",
    [pytest.param(m, marks=pytest.mark.slow if m in ("resnet", "gpt") else ()) for m in MODELS],
    indirect=True,
)
def test_mixfl_agrees(written):
    models = [after_rounds(e, written) for e in (mixfl_worker.Engine(), scan_worker.Engine())]
    assert report.difference(*models, protocol.Workload(written).params) < 1e-2


@pytest.mark.parametrize("written", ["mlp", "factors"], indirect=True)
def test_mixfl_agrees_with_a_module(written):
    pytest.importorskip("torch")
    from benchmarks.zoo import mixfl_torch_worker

    engines = (mixfl_torch_worker.Engine(), scan_worker.Engine())
    models = [after_rounds(e, written) for e in engines]
    assert report.difference(*models, protocol.Workload(written).params) < 1e-3


@pytest.mark.parametrize("algorithm", ["fedavg", "pt", "1wgt", "2wgt"])
def test_torch_loops_of_the_other_algorithms_agree_with_mixfl(algorithm, tmp_path):
    """Three rounds: 2-way uses the gradients of the round before."""
    pytest.importorskip("torch")
    from benchmarks.peers import torch_worker

    size = replace(small("mlp"), weight=0.7)  # the terms' weights differ
    workloads.write(size, tmp_path / "mlp", rounds=3, mixed=["pt", "1wgt", "2wgt"])
    engines = (mixfl_worker.Engine(algorithm), torch_worker.Engine(algorithm))
    models = [after_rounds(e, tmp_path / "mlp", 3) for e in engines]
    assert report.difference(*models, protocol.Workload(tmp_path / "mlp").params) < 1e-3


def after_rounds(engine, folder, rounds=1):
    engine.init(folder)
    engine.run(rounds)
    return engine.parameters()


@pytest.mark.system
def test_processes_of_the_torch_loop_divide_the_cohort(tmp_path):
    """Over the protocol: two processes compute what one does, and another start something else.
    In 2-way, they divide the server's batches too."""
    pytest.importorskip("torch")
    from benchmarks.engines import Worker, module

    workloads.write(small("mlp"), tmp_path / "mlp", rounds=2, mixed=["2wgt"])
    results = []
    for more in ({"TORCH_PROCESSES": "1"}, {"TORCH_PROCESSES": "2"}, {"TORCH_NUDGED": "1"}):
        worker = Worker(module("peers.torch_worker", "2wgt"), more)
        try:
            assert worker.ask("init", folder=str(tmp_path / "mlp"))["seconds"] > 0
            worker.run(2)
            results.append(worker.parameters())
        finally:
            worker.close()
    one, two, nudged = results
    start = protocol.Workload(tmp_path / "mlp").params
    assert report.difference(two, one, start) < 1e-4
    assert 0 < report.difference(nudged, one, start) < 0.1


def test_the_sizes_are_those_of_the_models():
    def parameters(name):
        shapes = jax.eval_shape(workloads.model(MODELS[name].size)[0], jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert parameters("logistic") == 7850
    assert parameters("mlp") == 199_210
    assert parameters("cnn") == 1_206_590  # McMahan et al.'s
    assert parameters("resnet") == pytest.approx(270_000, rel=0.02)
    assert parameters("lstm") == pytest.approx(820_000, rel=0.01)  # LEAF's


def test_flops_of_products():
    size = MODELS["mlp"].size
    layers = 784 * 200, 200 * 200, 200 * 10
    assert workloads.flops_per_example(size) == 4 * layers[0] + 6 * (layers[1] + layers[2])
    first, second = 26 * 26 * 9 * 32, 24 * 24 * 9 * 32 * 64
    dense = 12 * 12 * 64 * 128 + 128 * 62
    cnn = 4 * first + 6 * (second + dense)
    assert workloads.flops_per_example(MODELS["cnn"].size) == cnn
    assert workloads.flops_per_example(MODELS["factors"].size) is None
    h = 256
    step = (8 * 4 * h) + 3 * (h * 4 * h)  # the first layer's inputs have a gradient: the embedding
    assert workloads.flops_per_example(MODELS["lstm"].size) == 6 * (80 * step + h * 90)


def test_flops_of_a_strided_convolution_leave_out_the_padding():
    def loss(w, batch):
        return in_jax.conv(batch["x"], w, stride=2, padding=1).sum((1, 2, 3))

    shape = jax.ShapeDtypeStruct
    count = flops.of_gradient(
        loss, shape((3, 3, 4, 5), "float32"), {"x": shape((1, 8, 8, 4), "float32")}
    )
    taps = 4 * 3 - 1  # of 4 outputs per side, the first has one tap in the padding
    assert count == 2 * (2 * taps**2 * 4 * 5)  # the value and the kernel's gradient


def test_operations_by_kind():
    found = operations.shares(
        {"while.3": 100, "dot.4": 6, "ynn_fusion.1": 2, "convert_fusion": 1, "copy.11": 1}
    )
    assert found["kinds"] == {"products": 0.8, "elementwise and sums": 0.1, "copies": 0.1}
    assert next(iter(found["largest"].items())) == ("dot.4", 0.6)
    assert operations.kind("broadcast_add_fusion.2") == operations.OTHERS
    assert operations.kind("copy_multiply_fusion") == operations.OTHERS
    assert operations.kind("select-and-scatter.1") == "gathers, scatters, pools"


def test_profile_sees_a_product():
    a = jnp.ones((300, 300))
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    found = operations.profile(lambda: product(a).block_until_ready())
    assert found["kinds"].get("products", 0) > 0.3


def row(engine, ms, algorithm="fedavg", **more):
    return {
        "task": "cnn", "engine": engine, "algorithm": algorithm, "ms_median": ms, "ratio_to": {},
        "share_of_limit": None, "peak_mb": 100, "start_s": 5.0, "warm_s": 3.0, **more,
    }  # fmt: skip


ROWS = [
    row("mixfl", 10.0, ratio_to={"fedjax": 4.0, "torch": 2.4, "scan": 1.5}, peak_mb=150),
    row("mixfl-torch", 20.0, ratio_to={"torch": 1.6}, peak_mb=350),
    row("mixfl", 30.0, "2wgt"),
    row("scan", 15.0),
]


def test_judged_by_the_fastest_other_engine():
    jaxs, torchs, two_way, _ = summary.judged(ROWS, 2.5)
    assert jaxs["asked"] == {
        "times": 2.5, "fastest": "torch", "reached": False, "start": True, "warm": False,
        "memory": 1.5,
    }  # fmt: skip
    assert torchs["asked"]["reached"]
    assert torchs["asked"]["memory"] == 3.5
    assert "asked" not in two_way
    text = "\n".join(summary.lines([jaxs, torchs, two_way]))
    assert "2.4 times as fast as torch, asked: 2.5 (SHORT)" in text
    assert "1.6 times as fast as torch, asked: 1.5\n" in text
    assert "3.5 times the bare loop's, asked: 2 (SHORT)" in text


def test_no_verdict_where_another_engine_differs():
    differs = row("mixfl", 10.0, ratio_to={"torch": 3.0}, no_ratio={"fedjax": "results differ"})
    judged = summary.judged([differs], 2.0)
    assert "reached" not in judged[0]["asked"]
    assert "fedjax differ" in summary.lines(judged)[0]


def test_where_the_time_goes_in_a_line():
    parts = {
        "ms": {summary.LOOP: 10.0, summary.COMPILED: 9.0, summary.READING: 2.0},
        "kinds": {"products": 0.7, "copies": 0.3}, "largest": {"dot.1": 0.5},
    }  # fmt: skip
    line = summary.where(row("mixfl", 10.0, share_of_limit=0.5, parts=parts))
    assert "products take 5 ms" in line
    assert "products 70%, copies 30%" in line
    assert "unknown: it broke" in summary.where(row("mixfl", 1.0, parts_failed="it broke"))


def test_markdown_of_results(tmp_path):
    out = tmp_path / "zoo.json"
    said = CliRunner().invoke(zoo.main, ["--markdown", "--out", str(out)])
    assert said.exit_code == 2
    assert "run python -m benchmarks.zoo" in said.output
    out.write_text(json.dumps(summary.judged(ROWS, 2.5)))
    said = CliRunner().invoke(zoo.main, ["--markdown", "--out", str(out)])
    assert said.exit_code == 0
    tables = [line for line in said.output.splitlines() if line.startswith("| cnn")]
    assert [line.count("|") for line in tables] == [11, 8]
    assert "**2.4**" in tables[0]  # short of what is asked


def test_unknown_models_are_refused():
    said = CliRunner().invoke(zoo.main, ["--models", "cnn,vit"])
    assert said.exit_code == 2
    assert "'vit' is unknown; known: logistic, mlp" in said.output


@pytest.mark.parametrize("written", ["mlp"], indirect=True)
def test_parts_of_a_round(written):
    engine = mixfl_worker.Engine()
    engine.init(written)
    found = json.loads(json.dumps(engine.parts()))
    assert set(found["ms"]) == {summary.LOOP, summary.COMPILED, summary.READING}
    assert sum(found["kinds"].values()) == pytest.approx(1, abs=0.01)
    line = summary.where(row("mixfl", 1.0, parts=found))
    assert "products" in line
