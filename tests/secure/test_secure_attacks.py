"""What a server that breaks the rules of secure aggregation gets: nothing."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from secure_rounds import BROADCAST, LAYOUT, Cohort, played, summed, vectors

from mixfl.deploy.flower.keys import make_keys
from mixfl.deploy.secure import client, graph, keys, ring
from mixfl.deploy.secure.parts import Advert, Boxes, Refused, Roster, Survivors, packed, to_bits
from mixfl.deploy.secure.server import Round, TooFew


def masked(n=4) -> Cohort:
    """All clients have sent their masked vectors."""
    cohort = Cohort(n)
    cohort.share()
    cohort.mask(vectors(n))
    return cohort


def survivors(cohort, alive):
    return packed(Survivors(cohort.server.round, to_bits(set(alive), cohort.n)))


def test_both_kinds_of_shares_are_not_to_be_had():
    """First the shares of who survived, then the others, as if client 3 had dropped out."""
    cohort = masked()
    state, first = client.reveal(cohort.states[0], survivors(cohort, range(4)))
    with pytest.raises(Refused, match="a second time"):
        client.reveal(state, survivors(cohort, range(3)))
    with pytest.raises(Refused, match="a second time"):
        client.reveal(state, survivors(cohort, range(4)))
    kept = msgspec.msgpack.encode(state)
    own, pairwise = cohort.states[0].entered.held[3]
    assert own in first
    assert pairwise not in first
    assert own not in kept
    assert pairwise not in kept


def test_who_tells_clients_different_things_gets_neither_seed():
    """Half of the clients are told that client 4 dropped out. Of either kind of its shares, there
    are fewer than the threshold."""
    cohort = masked(6)
    found = {"own": set(), "pairwise": set()}
    for i in set(range(6)) - {4}:
        alive = set(range(6)) if i % 2 else set(range(6)) - {4}
        own, pairwise = cohort.states[i].entered.held[4]
        _, shares = client.reveal(cohort.states[i], survivors(cohort, alive))
        assert (own in shares) != (pairwise in shares)
        found["own" if own in shares else "pairwise"].add(i)
    assert {kind: len(holders) for kind, holders in found.items()} == {"own": 3, "pairwise": 2}
    assert graph.threshold(6) == 4


def test_a_client_is_not_cut_off_from_its_neighbours(monkeypatch):
    """On a sparse graph, a server may tell everybody that the neighbours of client 17 dropped out,
    and each of these that the others did: two thirds of the roster survive. Enough shares of all
    masks between client 17 and others would be there, if its neighbourhood did not refuse."""
    monkeypatch.setattr(graph, "DEGREE", 6)
    cohort = masked(30)
    near, least = set(cohort.server.near[17]), graph.threshold(7)
    found = dict.fromkeys(near, 0)
    for i in range(30):
        held = cohort.states[i].entered.held
        alive = set(range(30)) - near | {i}
        try:
            _, shares = client.reveal(cohort.states[i], survivors(cohort, alive))
        except Refused as refused:
            assert "of this client's neighbours" in str(refused)
            shares = b""
        for j in near & set(held):
            found[j] += held[j][1] in shares
        assert i != 17 or not shares
    assert min(found.values()) < least


def test_lies_about_survivors_are_too_few():
    """A client calls at most a third of its neighbours dead. Who wants the seeds of all neighbours
    of one client needs more shares than all clients around it then give."""
    degree, least = graph.DEGREE, graph.threshold(graph.DEGREE + 1)
    assert (2 * degree + 1) * (degree + 1 - least) < degree * least


def test_too_few_neighbours_end_a_round(monkeypatch):
    monkeypatch.setattr(graph, "DEGREE", 6)
    cohort = Cohort(30)
    cohort.share()
    cohort.mask(vectors(30), dropped=cohort.server.near[17][:3])
    with pytest.raises(TooFew, match="neighbours"):
        cohort.server.survivors()


@given(st.integers(1, 3000))
def test_nobody_has_shares_enough_of_both_kinds(n):
    assert 2 * graph.threshold(n) > n
    assert 3 * (2 * graph.threshold(n) - n) >= n  # so many would have to help


def test_a_round_is_not_replayed():
    cohort = masked()
    cohort.reveal()
    again = Cohort(4, states=cohort.states, round=0)
    with pytest.raises(Refused, match="took part in round 0 already"):
        again.share()
    with pytest.raises(Refused, match="took part in round 0 already"):
        Cohort(4, states=cohort.states, round=-1).share()
    later = Cohort(4, states=cohort.states, round=1)
    given = vectors(4, seed=1)
    for found, expected in zip(played(later, given), summed(given), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_vector_is_masked_once():
    """A second model in the same round, and boxes once more."""
    cohort = Cohort(4)
    cohort.share()
    boxes = cohort.server.deliver(LAYOUT, BROADCAST)[0]
    (given, *_) = vectors(1)
    state = client.receive(cohort.states[0], boxes)
    with pytest.raises(Refused, match="twice"):
        client.receive(state, boxes)
    state, _ = client.mask(state, 0, BROADCAST, LAYOUT, given)
    with pytest.raises(Refused, match="a second time"):
        client.mask(state, 1, b"another model", LAYOUT, given)
    with pytest.raises(Refused, match="shared nothing, or twice"):
        client.receive(state, boxes)


def test_a_training_round_is_sent_once():
    """Rounds of secure aggregation are tries of a training round. After a vector was sent, there
    is no other try, with other clients or another model."""
    cohort = masked()
    again = Cohort(4, states=cohort.states, round=1)
    again.share()
    state = client.receive(again.states[0], again.server.deliver(LAYOUT, BROADCAST)[0])
    (given,) = vectors(1)
    with pytest.raises(Refused, match=r"training round 0: .* already"):
        client.mask(state, 0, BROADCAST, LAYOUT, given)
    client.mask(state, 1, BROADCAST, LAYOUT, given)


@pytest.mark.parametrize("others", [{0}, {0, 1}], ids=str)
def test_two_models_give_noise(others):
    """Masks follow from the broadcast's digest: the sum of clients that got different ones is not
    theirs, nor any of them's."""
    cohort, given = Cohort(4), vectors(4)
    cohort.share()
    cohort.mask(given, broadcast=dict.fromkeys(others, b"another model"))
    cohort.reveal()
    found = cohort.server.unmask()
    for wanted in [summed(given), *given, summed([given[i] for i in others])]:
        assert np.mean(found[0] == wanted[0]) < 0.1
        assert np.mean(found[2] == wanted[2]) < 0.1


@pytest.mark.parametrize("n", [0, 1, 2])
def test_small_rosters_are_refused(n):
    state, advert = client.advertise(client.State("run"))
    adverts = [advert, *(client.advertise(client.State("run"))[1] for _ in range(n - 1))][:n]
    with pytest.raises(Refused, match=f"a roster of {n} clients: at least 3"):
        client.share(state, packed(Roster(0, 0, adverts)))


def test_a_node_may_want_more():
    with pytest.raises(Refused, match="a roster of 4 clients: at least 5"):
        Cohort(4, least=5).share()


@pytest.mark.parametrize("alive", [{0}, {0, 1}, set()], ids=str)
def test_small_sums_are_refused(alive):
    cohort = masked(4)  # at least 3
    with pytest.raises(Refused, match="at least 3 are wanted"):
        client.reveal(cohort.states[0], survivors(cohort, alive))


def test_a_roster_that_names_somebody_twice_is_refused():
    cohort = Cohort(4)
    adverts = cohort.server.adverts
    for wrong, told in [
        ([adverts[0], adverts[1], adverts[1]], "the same key twice"),
        ([adverts[0], adverts[1], Advert(adverts[2].seal, adverts[1].mask)], "the same key twice"),
        (adverts[1:], "not at its place"),
        ([adverts[0], adverts[3], adverts[2], adverts[1]], "another order"),
    ]:
        with pytest.raises(Refused, match=told):
            client.share(cohort.states[0], packed(Roster(0, 0, wrong)))


def test_shares_of_who_shared_nothing_are_refused():
    cohort = Cohort(4)
    cohort.share({3})
    cohort.mask(vectors(4))
    with pytest.raises(Refused, match="a survivor that has shared nothing"):
        client.reveal(cohort.states[0], survivors(cohort, range(4)))
    with pytest.raises(Refused, match="said to have dropped out"):
        client.reveal(cohort.states[0], survivors(Cohort(4), {1, 2, 3}))
    with pytest.raises(Refused, match="shares of round 7"):
        client.reveal(cohort.states[0], packed(Survivors(7, to_bits({0, 1, 2}, 4))))


def test_too_few_boxes_and_boxes_of_others_are_refused():
    cohort = Cohort(6)
    cohort.share()
    boxes = cohort.server.boxes
    for places, sealed, told in [
        ([1], [boxes[1][0]], "boxes of 1 neighbours: at least 3"),
        ([1, 2, 3], [boxes[1][0], boxes[2][0], boxes[3][1]], "not sealed for this client"),
        ([1, 2, 3], [boxes[1][0], boxes[3][0], boxes[2][0]], "not sealed for this client"),
        ([1, 2, 2], [boxes[1][0], boxes[2][0], boxes[2][0]], "twice"),
        ([1, 2, 0], [boxes[1][0], boxes[2][0], boxes[2][0]], "no neighbour"),
        ([1, 2, 3], [boxes[1][0], boxes[2][0]], "twice, or without one"),
    ]:
        with pytest.raises(Refused, match=told):
            client.receive(cohort.states[0], packed(Boxes(sealed, places)))


ANYTHING = st.recursive(
    st.none() | st.integers() | st.binary(max_size=40) | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)
REQUESTS = st.binary(max_size=60) | ANYTHING.map(
    lambda v: msgspec.msgpack.encode(v) if not _long(v) else b""
)


def _long(value) -> bool:
    if isinstance(value, list):
        return any(map(_long, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


@given(REQUESTS)
def test_malformed_messages_are_refused(request):
    """Nothing else is raised, at the client or at the server, and the round goes on."""
    cohort = masked()
    for step, state in [
        (client.share, Cohort(4).states[0]), (client.receive, SHARED.states[0]),
        (client.reveal, cohort.states[0]),
    ]:  # fmt: skip
        with pytest.raises(Refused):
            step(state, request)
    for step in (SHARED.server.take_boxes, cohort.server.take_masked, cohort.server.take_revealed):
        with pytest.raises(Refused):
            step(0, request)
    cohort.reveal()
    cohort.server.unmask()


SHARED = Cohort(4)
SHARED.share()


def test_odd_keys_are_refused():
    """Public keys of a small order, of another length, places out of range."""
    cohort = Cohort(4)
    adverts = cohort.server.adverts
    for seal in (bytes(32), b"\1" + bytes(31), b"short", b""):
        odd = sorted([*adverts[:3], Advert(seal, adverts[3].mask)], key=lambda a: a.seal)
        with pytest.raises(Refused, match="a public key"):
            client.share(cohort.states[0], packed(Roster(0, odd.index(adverts[0]), odd)))
    for place in (-1, 4, 2**40):
        with pytest.raises(Refused, match="not at its place"):
            client.share(cohort.states[0], packed(Roster(0, place, adverts)))


def test_wrong_shares_give_no_sum():
    """Of a client that dropped out: they don't fit its public key."""
    cohort = Cohort(4)
    cohort.share()
    cohort.mask(vectors(4), {3})
    request = cohort.server.survivors()
    for i in range(3):
        _, shares = client.reveal(cohort.states[i], request)
        cohort.server.take_revealed(i, bytes([shares[0] ^ 1]) + shares[1:-1] + b"\x07")
    with pytest.raises(TooFew, match="don't fit"):
        cohort.server.unmask()


def test_a_state_is_stored_between_messages():
    cohort, given = Cohort(3), vectors(3)

    def stored(state):
        return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=client.State)

    cohort.states = list(map(stored, cohort.states))
    cohort.share()
    cohort.states = list(map(stored, cohort.states))
    cohort.mask(given)
    cohort.states = list(map(stored, cohort.states))
    cohort.reveal()
    for found, expected in zip(cohort.server.unmask(), summed(given), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_signed_rosters(tmp_path):
    """With its peers' public keys, a client refuses a roster with anybody whom it does not know."""
    make_keys(tmp_path, 5)
    peers = keys.known_signers(sorted(tmp_path.glob("node-[1-4].pub")))
    signed = [
        client.advertise(client.State("run"), keys.signer(tmp_path / f"node-{i}"))
        for i in range(1, 6)
    ]
    states, adverts = zip(*signed, strict=True)

    def share(roster):
        ordered = sorted(roster, key=lambda advert: advert.seal)
        place = ordered.index(adverts[0])
        return client.share(states[0], Round("run", 0, ordered).roster(place), peers)

    share(adverts[:4])
    unsigned = client.advertise(client.State("run"))[1]
    forged = Advert(unsigned.seal, unsigned.mask, adverts[3].who, adverts[3].signature)
    twice = client.advertise(client.State("run"), keys.signer(tmp_path / "node-2"))[1]
    for other, told in [
        (adverts[4], "no key in secure-peers"), (unsigned, "no key in secure-peers"),
        (forged, "signature"), (twice, "twice"),
    ]:  # fmt: skip
        with pytest.raises(Refused, match=told):
            share([*adverts[:3], other])
    elsewhere = [
        client.advertise(client.State("other"), keys.signer(tmp_path / f"node-{i}"))[1]
        for i in (2, 3)
    ]
    with pytest.raises(Refused, match="signature"):
        share([adverts[0], *elsewhere])


def test_the_layout_is_checked():
    cohort = Cohort(3)
    cohort.share()
    state = client.receive(cohort.states[0], cohort.server.deliver(LAYOUT, BROADCAST)[0])
    with pytest.raises(ValueError, match="expected a vector of the layout"):
        client.mask(state, 0, BROADCAST, LAYOUT, ring.zeros(LAYOUT[:2]))
