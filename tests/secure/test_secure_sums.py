"""Secure aggregation: the sum of the survivors bit for bit, whoever drops out where."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from secure_rounds import LAYOUT, STAGES, Cohort, played, summed, vectors

from mixfl.deploy.secure import client, graph, ring, shamir
from mixfl.deploy.secure.server import TooFew


def assert_equal(found, expected):
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        np.testing.assert_array_equal(f, e)


@pytest.mark.parametrize("dropped", [
    {}, {"share": {0}}, {"mask": {2, 5}}, {"reveal": {1, 4}},
    {"share": {6}, "mask": {0}, "reveal": {3}}, {"mask": {8, 7, 6}},
], ids=str)  # fmt: skip
def test_the_sum_of_the_survivors_bit_for_bit(dropped):
    """Who drops when it should reveal has sent its vector: it is in the sum."""
    given = vectors(9)
    gone = dropped.get("share", set()) | dropped.get("mask", set())
    expected = summed([v for i, v in enumerate(given) if i not in gone])
    assert_equal(played(Cohort(9), given, dropped), expected)


@given(st.integers(3, 12), st.data())
@settings(max_examples=40)
def test_any_clients_may_drop_above_the_threshold(n, data):
    most = n - graph.threshold(n)
    places = data.draw(st.lists(st.integers(0, n - 1), max_size=most, unique=True))
    stages = [data.draw(st.sampled_from(STAGES)) for _ in places]
    dropped = {s: {p for p, q in zip(places, stages, strict=True) if q == s} for s in STAGES}
    given = vectors(n)
    gone = dropped["share"] | dropped["mask"]
    alive = [v for i, v in enumerate(given) if i not in gone]
    assert_equal(played(Cohort(n), given, dropped), summed(alive))


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_there_is_no_sum(stage):
    """Of nine clients, six must stay."""
    with pytest.raises(TooFew, match="at least 6 wanted"):
        played(Cohort(9), vectors(9), {stage: {0, 1, 2, 3}})


def test_a_sparse_graph_has_the_same_sum(monkeypatch):
    # 7 of a client's 20 neighbours may drop out, so the 4 that do may all be neighbours.
    monkeypatch.setattr(graph, "DEGREE", 20)
    given = vectors(30)
    dropped = {"share": {3}, "mask": {17, 4}, "reveal": {9}}
    alive = [v for i, v in enumerate(given) if i not in {3, 17, 4}]
    cohort = Cohort(30)
    assert_equal(played(cohort, given, dropped), summed(alive))
    assert {len(near) for near in cohort.server.near} == {20}
    for i, near in enumerate(cohort.server.near):
        assert i not in near
        assert all(i in cohort.server.near[j] for j in near)


@pytest.mark.slow
def test_a_thousand_clients():
    layout = (ring.Segment(32, 100), ring.Segment(64, 2))
    given = vectors(1000, layout)
    rng = np.random.default_rng(1)
    places = rng.permutation(1000)[:90]
    dropped = {s: set(map(int, p)) for s, p in zip(STAGES, np.split(places, 3), strict=True)}
    gone = dropped["share"] | dropped["mask"]
    alive = [v for i, v in enumerate(given) if i not in gone]
    assert_equal(played(Cohort(1000, layout=layout), given, dropped), summed(alive, layout))


def test_masked_bytes_look_uniform():
    """Chi-square, of vectors that are all zero. The bytes of one that is not masked fail."""
    layout = (ring.Segment(32, 20_000), ring.Segment(13, 20_000))
    nothing = [ring.zeros(layout) for _ in range(3)]
    cohort, seen = Cohort(3, layout=layout), []
    take = cohort.server.take_masked
    cohort.server.take_masked = lambda i, reply: (seen.append(reply), take(i, reply))
    assert_equal(played(cohort, nothing), ring.zeros(layout))
    for masked in [*seen, bytes(a ^ b for a, b in zip(*seen[:2], strict=True))]:
        counts = np.bincount(np.frombuffer(masked, np.uint8), minlength=256)
        assert 1e-6 < stats.chisquare(counts).pvalue < 1 - 1e-6
        assert stats.chisquare(np.bincount([0] * len(masked), minlength=256)).pvalue < 1e-6


def test_what_masking_adds_to_the_bytes():
    """A masked vector is as long as the plain one. Keys and shares are a few dozen bytes for each
    neighbour, whatever the size of the model."""
    n = 10
    cohort, given = Cohort(n), vectors(n)
    assert ring.size(LAYOUT) == 50 * 4 + 18 + 24
    roster = cohort.server.roster(0)
    assert len(roster) <= 74 * n + 10
    cohort.share()
    boxes = cohort.server.deliver(LAYOUT, b"")[0]
    assert len(boxes) <= 54 * n + 10
    state = client.receive(cohort.states[0], boxes)
    state, masked = client.mask(state, 0, b"", LAYOUT, given[0])
    assert len(masked) == len(ring.pack(given[0], LAYOUT)) == ring.size(LAYOUT)


@pytest.mark.parametrize("bits", [1, 3, 8, 11, 16, 23, 32, 33, 47, 64])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 29])
def test_packing(bits, length):
    layout = (ring.Segment(bits, length),)
    (vector,) = vectors(1, layout)
    packed = ring.pack(vector, layout)
    assert len(packed) == -(-bits * length // 8)
    assert_equal(ring.unpack(packed, layout), vector)
    number = sum(int(v) << bits * i for i, v in enumerate(vector[0]))
    assert packed == number.to_bytes(len(packed), "little")


def test_masks_of_many_chunks_are_one_stream(monkeypatch):
    layout = (ring.Segment(32, 1000), ring.Segment(11, 1000), ring.Segment(64, 100))
    whole, parts = ring.zeros(layout), ring.zeros(layout)
    ring.add_mask(whole, layout, bytes(32))
    monkeypatch.setattr(ring, "CHUNK", 64)
    ring.add_mask(parts, layout, bytes(32))
    assert_equal(parts, whole)
    # RFC 8439's cipher: the first block of the key of zeros
    assert whole[0][:4].tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


@given(st.integers(1, 9), st.integers(0, 6), st.binary(min_size=16, max_size=16), st.randoms())
@settings(max_examples=30)
def test_any_shares_of_the_threshold_give_the_seed(threshold, more, seed, random):
    shares = dict(enumerate(shamir.split(seed, threshold, threshold + more)))
    some = dict(random.sample(sorted(shares.items()), threshold))
    assert shamir.combine(some, threshold) == seed
    some.popitem()
    assert shamir.combine(some, threshold) is None


def test_fewer_shares_fit_any_seed():
    """What is missing decides: for two shares of three, and any seed, there is a third one."""
    shares = shamir.split(b"a seed of client", 3, 3)
    points = {0: 0, 1: int.from_bytes(shares[0], "big"), 2: int.from_bytes(shares[1], "big")}
    for other in (b"another, of 16 b", b"one more, as lon"):
        points[0] = int.from_bytes(other, "big")
        third = 0
        for x, y in points.items():
            term = y
            for z in set(points) - {x}:
                term = term * (3 - z) * pow(x - z, -1, shamir.PRIME) % shamir.PRIME
            third = (third + term) % shamir.PRIME
        forged = {0: shares[0], 1: shares[1], 2: third.to_bytes(shamir.SHARE, "big")}
        assert shamir.combine(forged, 3) == other
