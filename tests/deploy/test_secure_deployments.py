"""Secure aggregation on Flower: the simulator's rounds to the quantization, whoever drops out."""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from deployed import ADAM, assert_same, deploy, placed, simulate
from flower_grid import InProcess, crash, hang
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common.constant import ErrorCode
from scipy import stats

import mixfl.flower
from mixfl.aggregation.wire import Sent
from mixfl.deploy.flower import apps
from mixfl.deploy.flower.client import Client
from mixfl.deploy.flower.config import chosen
from mixfl.deploy.flower.secure_exchange import SecureRound, SecureRounds
from mixfl.deploy.flower.secure_node import digest
from mixfl.deploy.flower.secure_sums import Asked, Coding, Told
from mixfl.deploy.secure import client as secure_client
from mixfl.deploy.secure.parts import Advert, Refused, packed
from mixfl.errors import MixflError
from mixfl.privacy.accountant import Rounds
from mixfl.privacy.budget import Budget

SECURE = dict(secure=True, cohort_size=4, rounds=3, algorithm="2wgt")
PLAIN = SECURE | {"secure": False, "clip": "off"}


def at_stage(stage, fault):
    """A fault of the first message that has this in it: advertise, roster, boxes or survivors."""
    left = [fault]

    def faulty(message, reply):
        record = message.content.get("secure")
        there = record is not None and stage in record and left
        return left.pop()(message, reply) if there else [(0.0, reply())]

    return faulty


CRASH = crash(ErrorCode.CLIENT_APP_CRASHED)


@pytest.mark.parametrize(
    ("problem", "algorithm", "changes"),
    [
        ("two terms", "2wgt", {}),
        ("two terms", "fedavg", ADAM),
        *(
            pytest.param(*case, marks=pytest.mark.numbers)
            for case in [
                ("two terms", "pt", {}),
                ("two terms", "1wgt", {}),
                ("two terms", "pretrain", {}),
                ("tables", "baseline", {}),
                ("tables", "1wgt", {}),
                ("two populations", "2wgt", dict(cohort_size=3)),
                ("two terms", "2wgt", dict(client_opt="sgd(momentum=0.5)")),
                ("two terms", "2wgt", dict(weighting="uniform", clip=0.05)),
                ("two terms", "2wgt", dict(local_epochs=2, local_steps=5, central_steps=4)),
            ]
        ),
    ],
)
def test_a_secure_deployment_is_the_simulator(problem, algorithm, changes):
    given = {"clip": "off"} | SECURE | changes | {"algorithm": algorithm}
    found, _, _ = deploy(problem, **given)
    given = {k: v for k, v in given.items() if k not in ("secure", "algorithm")}
    expected = simulate(problem, algorithm, **given)
    assert_same(found.params, expected.params, 1e-5)
    for f, e in zip(found.metrics, expected.metrics, strict=True):
        same = {k for k in e if k.startswith(("train", "clients/rej", "loss"))}
        assert {k: f[k] for k in same} == pytest.approx({k: e[k] for k in same}, rel=1e-4)


@pytest.mark.parametrize(
    ("stage", "asked", "missing"),
    [("advertise", "0", "0"), ("roster", "0", "0"), ("boxes", "1", "1"), ("survivors", "0", "1")],
)
def test_clients_drop_at_each_stage(stage, asked, missing):
    """The sum is that of the survivors: the same as in a plain deployment without this client in
    the round. With the survivors comes the next round's roster: who does not answer is in the sum
    of the one, and not in the next."""
    found, _, _ = deploy(faults={(asked, 2): at_stage(stage, CRASH)}, **SECURE)
    expected, _, _ = deploy(faults={(missing, 2): CRASH}, **PLAIN)
    assert_same(found.params, expected.params, 1e-5)
    assert "rounds/failed" not in found.metrics[-1]
    everybody, _, _ = deploy(**PLAIN)
    assert not np.allclose(found.params["w"], everybody.params["w"], atol=1e-4)


@pytest.mark.parametrize("stage", ["roster", "boxes", "survivors"])
def test_below_the_threshold_a_round_is_skipped(stage):
    """Of four, three must stay. The next round has everybody again."""
    faults = {("1" if stage == "boxes" else "0", i): at_stage(stage, hang) for i in (1, 3)}
    found, _, notes = deploy(faults=faults, **SECURE, round_deadline=60.0)
    assert found.metrics[-1]["rounds/failed"] == 1
    assert any("is skipped" in line and "two thirds" in line for line in notes)
    expected, _, _ = deploy(
        faults={("1" if stage == "boxes" else "0", i): CRASH for i in range(4)}, **PLAIN
    )
    assert_same(found.params, expected.params, 1e-5)


def test_the_server_gets_nothing_but_masks(monkeypatch):
    """Every reply of a node: keys, sealed boxes, shares, and bytes that look uniform."""
    replies, real = [], InProcess.pull_messages

    def pull(grid, ids):
        found = real(grid, ids)
        replies.extend(r.content for r in found if r.has_content())
        return found

    monkeypatch.setattr(InProcess, "pull_messages", pull)
    found, _, _ = deploy(**SECURE)
    trained = [c for c in replies if "masked" in c]
    assert len(trained) == 4 * 3
    for content in replies:
        assert set(content) in ({"hello", "rows"}, {"secure"}, {"masked"})
        assert not any(
            isinstance(r, ArrayRecord) and r for n, r in content.items() if n != "masked"
        )
    masked = b"".join(c["masked"]["masked"].data for c in trained)
    counts = np.bincount(np.frombuffer(masked, np.uint8), minlength=256)
    assert 1e-6 < stats.chisquare(counts).pvalue < 1 - 1e-6
    assert found.metrics[-1]["clients/accepted"] == 12


def test_codes_of_few_bits_have_as_many_bits_when_masked():
    """The first round agrees on ranges, with 32 bits. Then 16 are enough to come close."""
    plain, _, _ = deploy(**PLAIN)
    rows = {}
    for upload in ("float32", "int16", "int8"):
        found, _, _ = deploy(**SECURE, upload=upload)
        rows[upload] = found
    difference = [np.abs(rows[u].params["w"] - plain.params["w"]).max() for u in rows]
    assert difference[0] < 1e-6 < difference[1] < 1e-3
    assert difference[1] < difference[2] < 0.1


def test_a_round_has_two_exchanges():
    """The first has four: keys and shares are asked for on their own."""
    _, grid, _ = deploy(**(SECURE | {"rounds": 4}))
    kinds = [group for kind, group in grid.events if kind == "push" and group != "hello"]
    first = kinds.count("0")
    assert first == 4 * 4  # keys, shares, training, unmasking
    assert [kinds.count(str(t)) for t in (1, 2, 3)] == [4 * 2] * 3


REFUSED = [
    (dict(aggregation="median"), "it compares the clients' changes"),
    (dict(aggregation="krum"), "it compares the clients' changes"),
    (dict(clip="quantile"), "which the server does not see"),
    (dict(cohort_size=2), "at least 3 clients"),
    (dict(upload="int4", cohort_size=8), "has no room in it"),
    (dict(upload="int4", cohort_size=4, over_select=2.0), "has no room in it"),
    (dict(upload="bfloat16"), "has no room in it"),
    (dict(algorithm="mimelite"), "send more than their change"),
    (dict(dp_noise_multiplier=1.0, dp_delta=1e-2, dp_clients=4), "a number as dp_clip"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED, ids=str)
def test_what_needs_single_changes_is_refused(changes, told):
    there, _ = placed("two terms")
    with pytest.raises(MixflError, match=told):
        chosen(there, SECURE | changes)


def test_a_secure_run_has_no_rows_and_no_quantile():
    there, _ = placed("tables")
    _, _, s, _ = chosen(there, SECURE)
    assert (s.tables, s.clip) == ("dense", "off")


def node(**config):
    there, nodes = placed("two terms")
    return there, Context(1, 5, {**nodes[0], **config}, RecordDict(), dict(SECURE))


def test_a_node_does_not_train_in_the_clear():
    """If the run is secure, or if its own configuration says so."""
    there, context = node()
    client = Client(there, SECURE, {**context.node_config, "node-id": 5})
    with pytest.raises(MixflError, match="asks for a plain change"):
        client.train(RecordDict({}))
    for key in ("secure-min", "secure-peers"):
        with pytest.raises(MixflError, match="only under secure aggregation"):
            Client(there, PLAIN, {**context.node_config, "node-id": 5, key: 3})


@pytest.mark.parametrize("content", [
    {}, {"roster": b"x"}, {"survivors": b""}, {"roster": 3, "advertise": True}, {"boxes": b"x"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["query", "train"])
def test_odd_requests_are_refused_without_a_traceback(kind, content):
    there, context = node()
    asked = RecordDict({"secure": ConfigRecord(content)})
    if kind == "query" and not content:
        return
    if kind == "query" and set(content) == {"boxes"}:
        assert set(apps.answer(there, kind, asked, context)["secure"]) == {"advert"}
        return
    with pytest.raises(MixflError):
        apps.answer(there, kind, asked, context)


def test_the_digest_is_of_everything_that_clients_get():
    one = mixfl.deploy.flower.messages.array(np.arange(3.0))
    two = mixfl.deploy.flower.messages.array(np.arange(3.0) + 1e-12)
    contents = [
        RecordDict({"train": ConfigRecord({"round": r}), "x": ArrayRecord({n: a})})
        for r, n, a in [(1, "w", one), (2, "w", one), (1, "v", one), (1, "w", two)]
    ]
    assert len({digest(c) for c in contents}) == 4
    boxes = RecordDict({**contents[0], "secure": ConfigRecord({"boxes": b"for one client"})})
    assert digest(boxes) == digest(contents[0])


PRIVATE = SECURE | dict(
    dp_noise_multiplier=0.5, dp_delta=1e-2, dp_clip=0.1, dp_clients=4, rounds=2, algorithm="fedavg"
)


def test_a_private_secure_deployment():
    """The clients' noise is in the sum, and nothing else is told."""
    found, _, _ = deploy(**PRIVATE)
    calm, _, _ = deploy(**(PRIVATE | {"dp_noise_multiplier": 1e-4}))
    told = {k for row in found.metrics for k in row}
    assert not {k for k in told if k.startswith(("clients/", "replies/"))} - {"clients/rejected"}
    assert not {k for k in told if k.startswith("train/federated")}
    assert found.metrics[-1]["privacy/epsilon"] > 1
    # noise of two rounds on the mean of four clients, three of whose noise would be enough
    wanted = 0.5 * 0.1 / 4 * np.sqrt(4 / 3) * np.sqrt(2)
    difference = np.concatenate([
        (a - b).ravel()
        for a, b in zip(*(jax.tree.leaves(r.params) for r in (found, calm)), strict=True)
    ])  # fmt: skip
    assert 0.3 * wanted < np.std(difference) < 3 * wanted


def test_a_restart_counts_as_a_round(tmp_path):
    """The server may have got the sum of the round that it repeats. Three rounds were planned: the
    run ends after two, and has spent what three cost."""
    given = PRIVATE | {"dp_epsilon": 8.0, "rounds": 3, "eval_every": 1}
    given.pop("dp_noise_multiplier")

    def stop(event):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        deploy(out=tmp_path, callbacks=[stop], **given)
    found, _, notes = deploy(out=tmp_path, **given)
    plan = Rounds(4, 4, "none", discrete=True)
    costs = [plan.epsilon(plan.noise_for(8.0, 3, 1e-2), t, 1e-2) for t in (1, 2, 3)]
    assert [row["privacy/epsilon"] for row in found.metrics] == pytest.approx([costs[0], costs[2]])
    assert costs[2] == pytest.approx(8, rel=1e-2)
    assert mixfl.load(tmp_path).status == "finished"
    assert any("1 restart: each counts as one more round" in line for line in notes)
    assert any("budget of epsilon = 8 is spent" in line for line in notes)
    apart = Budget((Rounds(40, 4, "none", min_sep=3, discrete=True),), 1e-2, 0)
    assert apart.spent(2.0, 7, repeated=1) == apart.spent(2.0, 10) > apart.spent(2.0, 8)


def test_too_many_for_the_mean_are_refused():
    there, _ = placed("two terms")
    with pytest.raises(MixflError, match=r"over_select = 2: two\s+thirds"):
        chosen(there, PRIVATE | {"over_select": 2.0})


def test_a_private_client_does_not_tell_that_its_change_is_odd():
    """It adds its noise alone."""
    told = Told(np.zeros(2), np.zeros(3), np.zeros(3), np.float32(1.0))
    s = dataclasses.replace(chosen(placed("two terms")[0], PRIVATE)[2], rounds=1)
    like = Sent({"w": np.zeros(5, np.float32)}, None, np.float32(1), np.float32(1), np.float32(0))
    coding = Coding(s, like, told, 4, Asked(32, False, 1))
    bad = like._replace(weighted={"w": np.full(5, np.nan, np.float32)}, loss=np.float32("nan"))
    (numbers, heads) = coding.vector(bad)
    assert heads.tolist() == [1]
    assert np.abs(numbers.astype(np.int32)).max() < 100 * coding.grid.sigma


def test_a_client_waits_for_its_turn():
    """Whatever the server asks: min_sep rounds after its last vector, and not sooner."""
    there, every = placed("two terms")
    assert Client(there, PRIVATE | {"dp_min_sep": 3, "cohort_size": 3}, every[0]).apart == 3
    assert Client(there, SECURE, every[0]).apart == 1
    for last, round, refused in [(-1, 0, False), (4, 5, True), (4, 6, True), (4, 7, False)]:
        state = secure_client.State("run", trained=last)
        with pytest.raises(Refused, match="waits 3") if refused else contextlib.nullcontext():
            secure_client.check_training(state, round, 3)


def test_a_server_cannot_ask_for_less_noise():
    there, every = placed("two terms")
    client = Client(there, PRIVATE, every[0])
    told = Told(np.zeros(2), np.zeros(3), np.zeros(3), np.float32(1e-3))
    with pytest.raises(MixflError, match=r"asks for noise of 0\.001"):
        client._check_noise(told)


def test_keys_that_are_none_do_not_reach_a_roster():
    rounds = SecureRounds(None)
    node = SimpleNamespace(id=7)
    good = secure_client.advertise(secure_client.State("r"))[1]
    take = SecureRound.__new__(SecureRound)
    take.rounds = rounds
    for odd in (Advert(b"", good.mask), Advert(good.seal, good.seal),
                Advert(bytes(32), good.mask)):  # fmt: skip
        content = RecordDict({"secure": ConfigRecord({"advert": packed(odd)})})
        with pytest.raises(Refused):
            take._keep_advert(node, content)
    take._keep_advert(node, RecordDict({"secure": ConfigRecord({"advert": packed(good)})}))
    assert rounds.adverts == {7: good}


def test_signed_keys(tmp_path):
    from mixfl.deploy.flower.keys import make_keys

    make_keys(tmp_path, 4)
    _, every = placed("two terms")

    def nodes(others):
        return [
            {**node, "secure-key": str(tmp_path / f"node-{i + 1}"), "secure-peers": str(others)}
            for i, node in enumerate(every)
        ]

    found, _, _ = deploy(nodes=nodes(tmp_path), **(SECURE | {"rounds": 1}))
    assert found.metrics[-1]["clients/accepted"] == 4
    (tmp_path / "few").mkdir()
    (tmp_path / "node-1.pub").rename(tmp_path / "few" / "node-1.pub")
    with pytest.raises(MixflError, match="too few clients gave a good reply"):
        deploy(nodes=nodes(tmp_path / "few"), **(SECURE | {"rounds": 1}))


def test_nodes_linger():
    """A task is followed by messages that want nothing. Nobody waits for the answers."""
    found, grid, _ = deploy(**(PLAIN | {"linger": 2, "rounds": 2}))
    groups = [group for kind, group in grid.events if kind == "push"]
    assert [groups.count(g) for g in ("0", "linger 0 0", "linger 0 1", "linger 1 1")] == [4] * 4
    assert found.metrics[-1]["clients/accepted"] == 8
    there, context = node()
    asked = RecordDict({"linger": ConfigRecord({})})
    assert not apps.answer(there, "query", asked, context)
