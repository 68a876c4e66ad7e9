"""Codes of summands: unbiased, they add up, and what a client can do to a range is bounded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixfl.aggregation import chain, codes
from mixfl.aggregation.quantize import BITS, NOT_FINITE, Quantize, histogram, level, needed, needs
from mixfl.algorithms.contract import Upload
from mixfl.algorithms.steps import weighted_summand
from mixfl.errors import MixflError
from mixfl.forms.base import add_to, zeros_for
from mixfl.forms.rows import Rows
from mixfl.settings import Settings

SHAPES = {"bias": (7,), "kernel": (3, 20), "one": ()}
DRAWS = 10_000


def own(seed=0):
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(rng.normal(size=s) ** 3, jnp.float32) for n, s in SHAPES.items()}


def made(tree, weight=1.0, steps=3, both=False, s=Settings(local_steps=3)):  # noqa: B008
    sums = weighted_summand(
        s, Upload(tree, jnp.float32(weight), jnp.float32(steps), None, jnp.zeros(()))
    )
    return sums._replace(unweighted=tree) if both else sums


def key(i):
    return jax.random.fold_in(jax.random.key(5), i)


class Compiled(Quantize):
    """Its functions in one piece each: eagerly, every operation of them would be compiled."""

    def __init__(self, s):
        super().__init__(s)
        self.encode = jax.jit(super().encode)
        self.decode = jax.jit(super().decode)
        self.next = jax.jit(super().next)


def ready(upload, clip="off", seed=0, weighting="examples"):
    """A step, and what it tells once it knows the needs of clients like `own(seed)`."""
    s = Settings(upload=upload, clip=clip, local_steps=3, weighting=weighting)
    step = Compiled(s)
    state = step.init(own(), 0)
    _, report = step.encode(step.told(state), made(own(seed)), key(0))
    reports = jax.tree.map(lambda a: a[None], report)
    return step, step.told(step.next(state, reports))


@given(st.integers(1, 2000))
def test_blocks_cover_a_row_once(row):
    at = 0
    for start, count, size in codes.blocks(row):
        assert start == at
        assert size & (size - 1) == 0
        assert size <= codes.MOST
        at += count * size
    assert at == row


@pytest.mark.parametrize("shape", [(), (7,), (1, 600), (5, 16), (3, 2, 11), (2, 1025)])
def test_a_rotation_goes_back_and_mixes_no_rows(shape):
    a = jax.random.normal(jax.random.key(1), shape)
    signs = codes.signs(jnp.array([1, 2], jnp.uint32))
    y = codes.rotated(a, signs)
    np.testing.assert_allclose(codes.restored(y, signs), a, rtol=1e-5, atol=1e-5)
    if shape and shape[0] > 1:
        y = codes.rotated(a.at[0].set(0), signs)
        assert not np.any(y[0])
        assert np.all(np.any(y[1:].reshape(len(y) - 1, -1), axis=1))
    if shape == (1, 600):  # a single large number is spread
        alone = jnp.zeros(shape).at[0, 3].set(100.0)
        assert np.abs(codes.rotated(alone, signs)).max() < 10


@pytest.mark.parametrize("upload", [*BITS, "bfloat16"])
def test_the_mean_of_many_draws_is_what_was_coded(upload):
    """Of 10,000, within 4 standard errors, for every number."""
    tree, keys = own(), jax.random.split(jax.random.key(2), DRAWS)
    if upload == "bfloat16":
        (step,) = chain(Settings(upload=upload, clip="off")).steps
        drawn = jax.jit(jax.vmap(lambda k: step.encode((), made(tree), k)[0].weighted))(keys)
    else:
        step, told = ready(upload)
        drawn = jax.vmap(lambda k: step.decode(told, step.encode(told, made(tree), k)[0]).weighted)(
            keys
        )
    for name, a in tree.items():
        values = np.asarray(drawn[name], np.float64)
        error = values.std(0) / np.sqrt(DRAWS)
        off = np.abs(values.mean(0) - np.asarray(a, np.float64))
        assert (off <= 4 * error + 2e-6 * np.abs(a).max()).all()
        if upload in ("int4", "int2"):
            assert values.std(0).max() > 0  # it is a draw


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("upload", ["int8", "int2"])
def test_decoding_a_sum_is_summing_what_is_decoded(upload, weighting):
    """Bit for bit. u_i and p_i u_i are sums of the same codes."""
    step, told = ready(upload, weighting=weighting)
    assert not step.each
    clients = [
        step.encode(told, made(own(i), 1.0 + (weighting == "examples") * i, both=True), key(i))[0]
        for i in range(8)
    ]
    total = zeros_for(clients[0])
    for code in clients:
        assert code.weighted["kernel"].dtype == jnp.int32
        total = add_to(total, code)
    at_once = step.decode(told, total)
    each = [step.decode(told, code) for code in clients]
    for name in SHAPES:
        for field in ("weighted", "unweighted"):
            unit = told.ranges[list(SHAPES).index(name)] / step.most
            found = np.asarray(getattr(at_once, field)[name])
            # In units of a step, decoded numbers are whole numbers over a power of two.
            parts = [np.asarray(getattr(e, field)[name]) / unit for e in each]
            summed = np.asarray(np.sum(np.float32(np.round(np.multiply(parts, 64))) / 64, axis=0))
            np.testing.assert_array_equal(np.float32(summed) * unit, found)


def test_codes_fit_the_modulus_and_masks_cancel():
    step, told = ready("int8")
    clients, weight = 50, 160
    k = step.modulus_bits(clients, weight)
    largest = clients * weight * step.most
    assert 2 ** (k - 1) > largest >= 2 ** (k - 2)
    codes_ = [np.asarray(step.encode(told, made(own(i), 7.0), key(i))[0].weighted["kernel"])
              for i in range(3)]  # fmt: skip
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 2**k, (3, *SHAPES["kernel"]))
    masked = [(c + m) % 2**k for c, m in zip(codes_, masks, strict=True)]
    total = (sum(masked) - masks.sum(0)) % 2**k
    signed = np.where(total >= 2 ** (k - 1), total - 2**k, total)
    np.testing.assert_array_equal(signed, sum(codes_))


@pytest.mark.parametrize("row", [(6,), ()])
def test_rows_of_tables_add_up(row):
    """Clients hold different rows; what they draw for a row does not depend on the others."""
    s = Settings(upload="int4", clip="off", local_steps=3)
    step = Compiled(s)
    table = jax.random.normal(jax.random.key(3), (9, *row))
    state = step.init({"t": table}, 0)
    told = step.told(state)._replace(ranges=jnp.full(2, 4.0))

    def of(ids):
        ids = jnp.array(ids)
        held = (ids < 9).reshape(-1, *[1] * len(row))
        values = jnp.where(held, table[jnp.minimum(ids, 8)], 0)
        summand = made({"t": values})
        held = summand._replace(weighted={"t": Rows(ids, summand.weighted["t"], 9)})
        return step.encode(told, held, key(1))[0]

    few, more = of([2, 5]), of([7, 5, 2, 9, 9])
    np.testing.assert_array_equal(few.weighted["t"].values[1], more.weighted["t"].values[1])
    total = add_to(add_to(zeros_for(few), few), more)
    decoded = step.decode(told, total).weighted["t"]
    assert total.weighted["t"].shape == (9, *row)
    assert not np.any(np.asarray(decoded)[[0, 1, 3, 4, 6, 8]])
    assert np.abs(decoded[2] - 2 * table[2]).max() < 2 * 4.0 / step.most * 6


def test_what_exceeds_the_range_is_shortened_and_counted():
    step, told = ready("int8")
    for factor, saturated in [(1.0, 0), (10.0, 1)]:
        tree = jax.tree.map(lambda a, f=factor: f * a, own())
        code, report = step.encode(told, made(tree), key(1))
        assert int(report.saturated) == saturated
        reports = jax.tree.map(lambda a: a[None], report)
        assert int(step.counted(told, reports)["clients/saturated"]) == saturated
        found = np.asarray(step.decode(told, code).weighted["kernel"]).ravel()
        wanted = np.asarray(tree["kernel"]).ravel()
        cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
        assert cosine > 0.99  # the direction stays
        assert np.abs(code.weighted["kernel"]).max() <= step.most


@pytest.mark.parametrize("clients", [10, 1000, 50_000])
def test_sums_of_many_codes_fit(clients):
    """Of 16 bits, 50,000 times the same: rotated back, they would exceed 32 bits."""
    a = jax.random.normal(jax.random.key(2), (3, 700))
    signs = codes.signs(jnp.array([1, 2], jnp.uint32))
    y = np.asarray(codes.rotated(a, signs), np.float64)
    code = np.rint(y / np.abs(y).max() * codes.largest(16)).astype(np.int32)
    one = codes.restored(jnp.asarray(code), signs)
    total = codes.restored(jnp.asarray(clients * code), signs)
    np.testing.assert_allclose(total / clients, one, rtol=1e-5, atol=1e-2)


def test_larger_sums_are_decoded_one_by_one():
    given = dict(upload="int16", clip="off", local_steps=10, client_batch=100)
    assert not Quantize(Settings(**given, cohort_size=30)).each
    assert Quantize(Settings(**given, cohort_size=100)).each
    assert not Quantize(Settings(**given, cohort_size=100, weighting="uniform")).each


def test_ranges_are_found_out_and_follow():
    """In the first round the codes are 0 until it is known what the clients need."""
    step = Compiled(Settings(upload="int8", clip="off", local_steps=3))
    state = step.init(own(), 0)
    told = step.told(state)
    code, report = step.encode(told, made(own()), key(0))
    assert not any(np.any(a) for a in jax.tree.leaves(code.weighted))
    assert int(report.saturated) == 0
    reports = jax.tree.map(lambda a: a[None], report)
    settled = step.settled(state, told, reports)
    assert step.changed(told, settled, reports)
    assert not step.changed(settled, settled, reports)
    used = np.asarray(settled.ranges[:3])
    y = codes.rotated(own()["kernel"], codes.signs(told.key))
    assert 1 < used[1] / np.abs(y).max() < 2
    # A client with fewer steps needs as much as one with all of them.
    _, short = step.encode(told, made(own(), steps=1), key(0))
    moved = np.asarray(short.levels[:3] - report.levels[:3])
    assert set(moved) <= {6, 7}  # 4 log2(3) levels are 6.3
    after = step.next(state, reports)
    assert np.any(np.asarray(after.key) != np.asarray(state.key))
    np.testing.assert_array_equal(step.told(after).ranges, settled.ranges)


def test_one_client_cannot_spoil_the_range():
    levels = np.full((20, 3), int(level(jnp.float32(0.01))))
    levels[0] = NOT_FINITE - 1
    largest, quartile = needed(histogram(jnp.asarray(levels)))
    assert largest[0] > 1e6
    assert quartile[0] < 0.012
    step = Quantize(Settings(upload="int8"))
    state = step.init({"a": jnp.zeros(3)}, 0)
    report = step.received(np.concatenate([levels[:, :2], np.zeros((20, 1))], axis=1))
    assert step.told(step.next(state, report)).ranges[0] < 0.04


@settings(deadline=None)
@given(st.floats(1e-11, 1e6))
def test_a_level_is_enough_and_not_much_more(need):
    assert need <= float(needs(level(jnp.float32(need)))) * 1.0001 < need * 1.2


def test_an_update_that_is_not_finite_is_told_apart():
    for clip in ("off", "quantile"):
        step, told = ready("int8", clip)
        bad = {**own(), "kernel": own()["kernel"].at[1, 2].set(jnp.nan)}
        code, report = step.encode(told, made(bad), key(0))
        assert not step.finite(report)
        reports = jax.tree.map(lambda a: a[None], report)
        assert step.changed(told, told, reports)
        if clip != "off":
            assert np.isnan(code.weighted["bias"]).all()


@pytest.mark.parametrize("upload", ["int8", "int2"])
def test_under_privacy_a_client_adds_at_most_the_clip_norm(upload):
    """Rounding adds to a norm, and the server shortens what it decodes."""
    s = Settings(
        upload=upload, dp_noise_multiplier=1.0, dp_clip=0.5, dp_delta=1e-5, dp_seed=1, clip="off",
        weighting="uniform", local_steps=3,
    )  # fmt: skip
    steps = chain(s)
    told = steps.told(steps.init(own(), 0))
    encode = jax.jit(steps.encode)
    assert np.all(np.asarray(told[0].ranges[:3]) <= 0.5)  # the others are those of gradients
    for scale in (1e-3, 0.1, 1e3):
        tree = jax.tree.map(lambda a, f=scale: f * a, own())
        code, _ = encode(told, made(tree), np.array([1, 2], np.uint32))
        norm = np.sqrt(sum(np.sum(np.square(a)) for a in jax.tree.leaves(code.weighted)))
        assert 0 < norm <= 0.5 * 1.0001
    state = steps.init(own(), 0)
    _, report = encode(told, made(own()), np.zeros(2, np.uint32))
    assert not np.any(report[0].levels)
    assert not np.any(report[0].saturated)
    after = steps.next(state, jax.tree.map(lambda a: a[None], report))
    np.testing.assert_array_equal(after[0].needs, state[0].needs)  # nothing is learned from clients


def test_fields_of_an_algorithms_own_are_refused():
    odd = made(own())._replace(extra={"a": jnp.ones(2)})
    for upload in ("int8", "bfloat16"):
        steps = chain(Settings(upload=upload, clip="off"))
        with pytest.raises(MixflError, match=f"upload = {upload}: the clients of this algorithm"):
            steps.encode(steps.told(steps.init(own(), 0)), odd, np.zeros(2, np.uint32))


def test_float32_has_no_step_of_its_own():
    assert chain(Settings()).steps[0].at_client is False
    assert len(chain(dataclasses.replace(Settings(), clip="off")).steps) == 0
