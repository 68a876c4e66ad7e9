"""Convolutions in fewer multiplications are those of XLA, to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mixfl.forms import blocks, convolution, winograd
from mixfl.forms.jaxpr import inner_names, jaxprs_in_params
from mixfl.forms.products import InProducts

#        kernel     places     C  D  tile
CASES = [
    ((3, 3), (9, 8), 3, 5, (4, 4)),  # 7 x 6 results: not whole tiles
    ((3, 3), (6, 6), 2, 3, (4, 2)),
    ((5, 5), (9, 8), 3, 2, (2, 2)),  # a tile's places reach into three tiles
    ((1, 3), (4, 7), 3, 4, (1, 4)),
    ((3,), (11,), 3, 4, (4,)),
    ((3, 3, 3), (5, 6, 4), 2, 3, (2, 4, 2)),
]


def normal(seed, shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def tiling(kernel, places, tile):
    out = tuple(n - r + 1 for n, r in zip(places, kernel, strict=True))
    return winograd.Tiling(kernel, tile, out, winograd.counts(out, tile))


def plain(x, w):
    letters = "XYZ"[: w.ndim - 2]
    layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    return lax.conv_general_dilated(x, w, (1,) * (w.ndim - 2), "VALID", dimension_numbers=layout)


def value_and_gradients(function, x, w, dy):
    y, vjp = jax.vjp(function, x, w)
    return y, *vjp(dy)


@pytest.mark.parametrize(("kernel", "places", "C", "D", "tile"), CASES)
@pytest.mark.parametrize("block", [1, 10**9])
def test_values_and_gradients_are_xlas(kernel, places, C, D, tile, block, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", block)
    t = tiling(kernel, places, tile)
    x, w, dy = normal(0, (4, *places, C)), normal(1, (*kernel, C, D)), normal(2, (4, *t.out, D))
    ours = jax.jit(lambda *a: value_and_gradients(lambda x, w: winograd.convolved(t, x, w), *a))
    for a, b in zip(ours(x, w, dy), value_and_gradients(plain, x, w, dy), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=5e-6 * np.abs(b).max())


def test_the_rounding_is_a_few_times_that_of_the_plain_product():
    """As docs/simulator.md says. Judged by float64."""
    C, D = 64, 16
    x, w = np.maximum(normal(0, (4, 18, 18, C)), 0), normal(1, (3, 3, C, D)) / 24
    t = tiling((3, 3), (18, 18), (4, 4))
    g = convolution.Geometry((18, 18), t.out, (1, 1), convolution.every_offset((3, 3), (1, 1)))
    patches = np.stack(
        [x[:, i : i + 16, j : j + 16].astype(np.float64) for i in range(3) for j in range(3)], -2
    )
    exact = patches.reshape(4, 16, 16, -1) @ w.reshape(-1, D).astype(np.float64)

    def error(y):
        return np.sqrt(np.mean((np.asarray(y) - exact) ** 2) / np.mean(exact**2))

    product = error(convolution.gathered(g, x, w.reshape(9, C, D)))
    assert error(winograd.convolved(t, x, w)) < min(5 * product, 2e-6)


@pytest.mark.parametrize(
    ("kernel", "out", "C", "D", "tile"),
    [
        ((3, 3), (24, 24), 32, 64, (4, 4)),
        ((3, 3), (6, 6), 64, 64, (2, 2)),  # larger tiles would be cut off too much
        ((5, 5), (14, 14), 32, 64, (2, 2)),
        ((3,), (128,), 64, 64, (4,)),
        ((3, 3), (26, 26), 1, 32, None),  # too few channels
        ((1, 1), (8, 8), 512, 512, None),
        ((7, 7), (8, 8), 64, 64, None),
    ],
)
def test_tiles_are_chosen_where_they_pay(kernel, out, C, D, tile):
    t = winograd.tiling(kernel, out, C, D)
    assert (t and t.tile) == tile


def shapes(function, *args) -> set:
    """Of all results of operations."""

    def of(jaxpr):
        for e in jaxpr.eqns:
            yield from (v.aval.shape for v in e.outvars)
            for inner in jaxprs_in_params(e.params):
                yield from of(inner)

    return set(of(jax.make_jaxpr(function)(*args).jaxpr))


def test_a_loss_uses_it_with_padding_and_channels_first():
    x, w = normal(0, (2, 32, 12, 12)), normal(1, (64, 32, 3, 3)) / 17

    def conv(x, w):
        layout = ("NCHW", "OIHW", "NCHW")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)

    dy = normal(2, (2, 64, 12, 12))
    ours = jax.jit(lambda *a: value_and_gradients(InProducts(conv), *a))
    assert (36, 32, 64) in shapes(InProducts(conv), x, w)  # at the points of 4 x 4 tiles
    for a, b in zip(ours(x, w, dy), value_and_gradients(conv, x, w, dy), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_bfloat16_and_strides_stay_plain_products():
    for dtype, strides in ((jnp.bfloat16, (1, 1)), (jnp.float32, (2, 2))):
        x, w = jnp.zeros((2, 12, 12, 32), dtype), jnp.zeros((3, 3, 32, 64), dtype)
        conv = InProducts(
            lambda x, w, s=strides: lax.conv_general_dilated(
                x, w, s, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
        assert (36, 32, 64) not in shapes(conv, x, w)


@pytest.mark.parametrize("way", ["tiles", "product"])
def test_each_device_computes_its_own_part_of_a_shared_batch(way):
    """A loop over blocks goes over one device's examples, not over those of all."""
    t = tiling((3, 3), (10, 10), (4, 4))
    g = convolution.Geometry((10, 10), t.out, (1, 1), convolution.every_offset((3, 3), (1, 1)))
    x, w, dy = normal(0, (8, 10, 10, 2)), normal(1, (3, 3, 2, 3)), normal(2, (8, 8, 8, 3))

    def conv(x, w):
        if way == "tiles":
            return winograd.convolved(t, x, w)
        return convolution.gathered(g, x, w.reshape(9, 2, 3))

    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))

    def shared(x, w, dy):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return value_and_gradients(conv, x, w, dy)

    split, whole = NamedSharding(mesh, P("clients")), NamedSharding(mesh, P())
    program = jax.jit(shared, in_shardings=(split, whole, split))
    eqns = program.trace(x, w, dy).jaxpr.eqns
    assert sum("shard_map" in (e.primitive.name, *inner_names(e)) for e in eqns) >= 2
    text = program.lower(x, w, dy).compile().as_text()
    assert "all-gather" not in text
    for a, b in zip(program(x, w, dy), value_and_gradients(plain, x, w, dy), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6 * np.abs(b).max())
