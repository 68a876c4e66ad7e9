"""Convolutions as products, and poolings, are those of XLA; losses and rounds with them too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.engine.round import SOONER
from mixfl.forms import blocks, convolution
from mixfl.forms.jaxpr import inner_names, jaxprs_in_params
from mixfl.forms.products import InProducts, found_in, most_layers, products_in
from mixfl.settings import Settings

LAST, FIRST = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
#        lhs           rhs           strides padding           dilations        layout groups
CASES = {
    "plain": ((3, 9, 8, 4), (3, 3, 4, 8), (1, 1), "VALID", (1, 1), (1, 1), LAST, 1),
    "channels first": ((3, 4, 9, 8), (8, 4, 3, 3), (2, 1), "SAME", (1, 1), (1, 1), FIRST, 1),
    "dilated": ((3, 9, 8, 4), (3, 2, 4, 6), (2, 3), ((1, 2), (0, 3)), (1, 1), (2, 1), LAST, 1),
    "stride 1": ((3, 9, 8, 4), (2, 3, 4, 5), (1, 1), ((0, 3), (4, 1)), (1, 1), (2, 1), LAST, 1),
    "stride 1, cut": (
        (3, 9, 8, 4), (3, 2, 4, 3), (1, 1), ((-1, 4), (5, -2)), (1, 1), (1, 3), LAST, 1
    ),
    "1x1": ((3, 9, 8, 4), (1, 1, 4, 6), (1, 1), "VALID", (1, 1), (1, 1), LAST, 1),
    "cut": ((3, 9, 8, 4), (1, 1, 4, 6), (2, 2), ((-1, 0), (2, -1)), (1, 1), (1, 1), LAST, 1),
    "groups": ((3, 4, 9, 8), (6, 2, 3, 3), (1, 2), "SAME", (1, 1), (1, 2), FIRST, 2),
    "depthwise": ((3, 4, 9, 8), (8, 1, 3, 3), (2, 1), "SAME", (1, 1), (1, 1), FIRST, 4),
    "transposed": ((3, 5, 6, 4), (3, 3, 4, 6), (1, 1), ((1, 2), (2, 2)), (2, 2), (1, 1), LAST, 1),
    "transposed, groups": (
        (3, 5, 6, 4), (2, 3, 2, 6), (1, 1), ((1, 0), (0, 2)), (3, 1), (1, 2), LAST, 2
    ),
    "transposed, depthwise": (
        (3, 5, 6, 4), (2, 3, 1, 8), (1, 1), ((1, 0), (0, 2)), (2, 1), (1, 2), LAST, 4
    ),
    "transposed, cut": (
        (3, 5, 6, 4), (2, 2, 4, 6), (1, 1), ((-1, 0), (0, -2)), (2, 2), (1, 1), LAST, 1
    ),
    "1-D": ((2, 10, 3), (3, 3, 5), (2,), "SAME", (1,), (1,), ("NHC", "HIO", "NHC"), 1),
    "3-D": (
        (2, 4, 5, 4, 3), (2, 3, 2, 3, 5), (1, 2, 1), "SAME", (1, 1, 1), (1, 1, 1),
        ("NDHWC", "DHWIO", "NDHWC"), 1,
    ),
}  # fmt: skip


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def operators(function, *args) -> set[str]:
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return {n for e in jaxpr.eqns for n in (e.primitive.name, *inner_names(e))}


def value_and_gradients(function, args):
    y = jax.eval_shape(function, *args)
    d = normal(9, y.shape)
    scalar = lambda *args: jnp.sum(function(*args) * d)  # noqa: E731
    both = jax.jit(lambda *args: (function(*args), jax.grad(scalar, range(len(args)))(*args)))
    return both(*args)


def assert_close(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["depthwise", "transposed, depthwise"])
def test_parts_of_a_kernel_change_nothing(case, monkeypatch):
    monkeypatch.setattr(convolution, "WRITTEN_OUT", 4)  # 9 offsets: three parts; 6: two
    test_products_are_xlas_convolutions(case)


def test_a_long_depthwise_kernel_is_not_written_out():
    """Such programs took minutes to compile."""

    def loss(x, w):
        y = lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=4
        )
        return jnp.sum(y**2)

    def operations(jaxpr) -> int:
        inner = (j for e in jaxpr.eqns for j in jaxprs_in_params(e.params))
        return len(jaxpr.eqns) + sum(map(operations, inner))

    form = InProducts(loss)
    sizes = [
        operations(jax.make_jaxpr(jax.grad(form, (0, 1)))(
            normal(0, (2, 600, 4)), normal(1, (n, 1, 4))
        ).jaxpr)
        for n in (60, 600)
    ]  # fmt: skip
    assert sizes[1] < 3 * sizes[0]


@pytest.mark.parametrize("case", ["plain", "stride 1", "transposed"])
def test_blocks_change_nothing(case, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 700)
    assert blocks.block_of(3, 7 * 6 * 9 * 4) == 1  # as in "plain": three blocks
    test_products_are_xlas_convolutions(case)


@pytest.mark.parametrize("case", CASES)
def test_products_are_xlas_convolutions(case):
    lhs, rhs, strides, padding, lhs_dilation, rhs_dilation, layout, groups = CASES[case]

    def conv(x, w):
        return lax.conv_general_dilated(
            x, w, strides, padding, lhs_dilation, rhs_dilation, layout, groups
        )

    args = normal(0, lhs), normal(1, rhs)
    products = InProducts(conv)
    assert "conv_general_dilated" not in operators(products, *args)
    assert_close(value_and_gradients(products, args), value_and_gradients(conv, args))


def test_blocks_divide_the_batch():
    each = 7 * 7 * 9 * 2**8
    assert blocks.block_of(12, each) == 4  # 4 x each numbers fit, 6 x each do not
    assert 4 * each <= blocks.BLOCK < 6 * each
    assert blocks.block_of(7, 64 * each) == 1
    assert blocks.block_of(7, 0) == 7


def pool(x, window, strides, padding):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        ((1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
        ((1, 1, 2, 3), (1, 1, 1, 2), ((0, 0), (0, 0), (1, 1), (2, 0))),
    ],
)
def test_pooling_is_xlas_and_so_is_its_gradient_at_ties(window, strides, padding):
    x = np.random.default_rng(0).integers(0, 3, (2, 8, 7, 5)).astype(np.float32)  # many ties

    def plain(x):
        return pool(x, window, strides, padding)

    products = InProducts(plain)
    assert not {"reduce_window_max", "reduce_window"} & operators(products, x)
    (y, (dx,)), (y2, (dx2,)) = (value_and_gradients(f, (x,)) for f in (products, plain))
    np.testing.assert_array_equal(y, y2)
    np.testing.assert_allclose(dx, dx2, rtol=1e-6, atol=1e-6)


def test_what_is_left_to_xla():
    x, w = normal(0, (2, 8, 8, 3)), normal(1, (3, 3, 3, 4))
    conv = lambda x, w: lax.conv_general_dilated(  # noqa: E731
        x, w, (2, 2), ((1, 1), (1, 1)), (2, 2), dimension_numbers=LAST
    )
    assert "conv_general_dilated" in operators(InProducts(conv), x, w)
    assert_close(InProducts(conv)(x, w), conv(x, w))


def conv_in(kind):
    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAST)

    def plain(x, w):
        return conv(x, w)

    def jitted(x, w):
        return jax.jit(conv)(x, w)

    def looped(x, w):
        return lax.scan(lambda x, _: (conv(x, w), x.sum()), x, length=2)[0]

    def branched(x, w):
        return lax.cond(x.sum() > 0, lambda: conv(x, w), lambda: 2 * conv(x, w))

    def checkpointed(x, w):
        return jax.checkpoint(conv)(x, w)

    def mapped(x, w):
        return jax.vmap(lambda one: conv(one[None], w)[0])(x)

    return locals()[kind]


@pytest.mark.parametrize(
    "kind", ["plain", "jitted", "looped", "branched", "checkpointed", "mapped"]
)
def test_found_wherever_it_stands(kind):
    args = normal(0, (2, 5, 4, 3)), normal(1, (3, 3, 3, 3))
    function = conv_in(kind)
    found = found_in(function, *args)
    assert found.convolutions or found.others
    products = InProducts(function)
    assert "conv_general_dilated" not in operators(products, *args)
    assert_close(value_and_gradients(products, args), value_and_gradients(function, args))


# In a round


def net(params, batch):
    z = lax.conv_general_dilated(batch["x"], params["w"], (1, 1), "SAME", dimension_numbers=LAST)
    z = pool(jnp.tanh(z), (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.square(z.reshape(len(z), -1) @ params["out"] - batch["y"])


def init(key):
    return {"w": 0.3 * jax.random.normal(key, (3, 3, 2, 4)), "out": jnp.full((16,), 0.1)}


def rows(seed, n):
    return {"x": normal(seed, (n, 4, 4, 2)), "y": normal(seed + 1, (n,))}


def problem():
    clients = mixfl.ClientData.from_arrays(rows(0, 40), client=np.repeat(np.arange(8), 5))
    return mixfl.Problem(
        init, [mixfl.Federated(net, clients, 0.6), mixfl.Central(net, rows(5, 30), 0.4)]
    )


BASE = Settings(
    rounds=3, cohort_size=4, client_batch=2, local_steps=6, client_lr=0.05, devices=1,
    central_chunk=4,
)  # fmt: skip


def models(algorithm, s, problem):
    simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)
    state = simulator.init()
    for result in simulator.rounds(state, 0, s.rounds):
        state = result.state
    return simulator, jax.tree.map(np.array, state.x)


MORE = [pytest.param(name, marks=pytest.mark.numbers) for name in ("fedavg", "pt", "1wgt")]


@pytest.mark.parametrize("algorithm", ["2wgt", "oracle", *MORE])
def test_rounds_are_the_same_with_products(algorithm):
    with_products, x = models(algorithm, BASE, problem())
    s = dataclasses.replace(BASE, convolutions="plain", loops="compiled")
    plain, y = models(algorithm, s, problem())
    assert with_products.resolved().convolutions == "products"
    assert products_in(with_products.problem) == ["federated", "central"]
    assert plain.resolved().convolutions == "plain"
    assert any("as larger products: federated, central" in note for note in with_products.notes())
    for a, b, start in zip(*map(jax.tree.leaves, (x, y, init(jax.random.key(0)))), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b - start).max())


def deep(params, batch):
    z = batch["x"]
    for _ in range(8):
        z = jnp.tanh(lax.conv_general_dilated(z, params["w"][..., :2], (1, 1), "SAME",
                                              dimension_numbers=LAST))  # fmt: skip
    return jnp.square(z.mean((1, 2, 3)) - batch["y"]) + 0 * params["out"].sum()


def deep_in_a_loop(params, batch):
    return lax.fori_loop(0, 2, lambda _, z: z + deep(params, batch), 0 * batch["y"])


@pytest.mark.parametrize(("loss", "layers"), [(net, 1), (deep, 8), (deep_in_a_loop, 0)])
def test_many_layers_compile_sooner_unless_the_loss_has_loops(loss, layers, monkeypatch):
    """XLA's work on loops is left out only where the loops are ours."""
    options = []
    jit = jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda *a, **k: options.append(k.pop("compiler_options", None)) or jit(*a, **k)
    )
    clients = mixfl.ClientData.from_arrays(rows(0, 40), client=np.repeat(np.arange(8), 5))
    simulator, x = models("fedavg", BASE, mixfl.Problem(init, [mixfl.Federated(loss, clients)]))
    assert most_layers(simulator.problem) == layers
    assert (SOONER in options) == (layers >= 8)
    assert np.isfinite(x["w"]).all()


def test_a_round_has_no_convolution_left():
    simulator, _ = models("2wgt", BASE, problem())
    names = {n for e in simulator._jaxpr().jaxpr.eqns for n in (e.primitive.name, *inner_names(e))}
    assert "dot_general" in names
    assert "conv_general_dilated" not in names


@pytest.mark.parametrize("side", [4, 60])
def test_large_parameters_share_a_cohort_unless_they_are_the_work(side):
    """A large dense layer alone uses all cores; large convolutions before it do not."""

    def loss(params, batch):
        z = lax.conv_general_dilated(
            batch["x"], params["w"], (1, 1), "SAME", dimension_numbers=LAST
        )
        z = lax.conv_general_dilated(z, params["v"], (1, 1), "SAME", dimension_numbers=LAST)
        return jnp.sum(jnp.tanh(z.mean((1, 2)) @ params["dense"]), 1)

    def start(key):
        return {"w": jnp.zeros((3, 3, 1, 64)), "v": jnp.zeros((3, 3, 64, 64)),
                "dense": jnp.zeros((64, 2**14))}  # fmt: skip

    x = np.zeros((8, side, side, 1), np.float32)
    clients = mixfl.ClientData.from_arrays({"x": x}, client=np.arange(8))
    problem = mixfl.Problem(start, [mixfl.Federated(loss, clients)])
    s = dataclasses.replace(BASE, devices="auto")
    simulator = Simulator(problem, ALGORITHMS["fedavg"].build(problem, s), s)
    assert simulator.devices == (1 if side == 4 else jax.device_count())
