"""The algorithms on Flower: what the simulator computes, whatever becomes of the messages.

All in one process (flower_grid.py), with the unchanged apps; the clock is the grid's.
"""

import dataclasses
import functools
import subprocess
import sys
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
import table_problem
from deployed import ADAM, PROBLEMS, SETTINGS, assert_same, deploy, placed, simulate
from flower_grid import (
    FIRST_NODE,
    InProcess,
    changed,
    crash,
    failed,
    hang,
    late,
    on_time,
    twice,
    wired,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

import mixfl
import mixfl.flower
from mixfl.aggregation.packing import pack_rows
from mixfl.deploy.flower import client, engine, messages
from mixfl.deploy.flower.client import Client
from mixfl.engine.cohort import cohort
from mixfl.errors import MixflError
from mixfl.runs.folder import load, read_metrics

MIXED = ("fedavg", "pt", "1wgt", "2wgt")
SAME = [
    *(("two terms", a, ADAM) for a in MIXED),
    ("two populations", "2wgt", {}),
    ("random", "2wgt", {}),
    ("two terms", "2wgt", dict(local_epochs=2, local_steps=5, central_steps=4)),
    *(("tables", a, {}) for a in MIXED),
    ("two terms", "central", {}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            *(("two populations", a, {}) for a in MIXED[:3]),
            ("a table of one population of two", "2wgt", {}),
            ("two terms", "2wgt", dict(client_opt="sgd(momentum=0.5)", weighting="uniform")),
            ("two terms", "pretrain", {}),
            ("tables", "baseline", {}),
        ]
    ),
]


@pytest.mark.parametrize(("problem", "algorithm", "changes"), SAME)
def test_deployment_is_the_simulator(problem, algorithm, changes):
    found, _, _ = deploy(problem, algorithm=algorithm, **changes)
    used = mixfl.ALGORITHMS[algorithm].uses
    keys = {k: v for k, v in (SETTINGS | changes).items() if k in used}
    there, nodes = placed(problem)
    expected = mixfl.train(mixfl.flower.simulated(there, nodes), algorithm, **keys)
    assert_same(found.params, expected.params)
    moved = [np.abs(p - q).max() for p, q in zip(
        jax.tree.leaves(found.params), jax.tree.leaves(there.init(jax.random.key(0))), strict=True
    )]  # fmt: skip
    assert max(moved) > 1e-2
    for f, e in zip(found.metrics, expected.metrics, strict=True):
        same = {k for k in e if not k.startswith(("time", "comm"))}
        assert {k: f[k] for k in same} == pytest.approx({k: e[k] for k in same}, rel=1e-4)


def test_central_work_is_done_while_the_clients_train(monkeypatch):
    there, nodes = placed("two terms")
    grid = InProcess(mixfl.flower.client_app(there), nodes, SETTINGS)
    real = engine.DeployedEngine._programs

    def watched(deployed, algorithm, round):
        found = real(deployed, algorithm, round)

        def central(*args):
            grid.events.append(("central", ""))
            return found.central(*args)

        return found._replace(central=central)

    monkeypatch.setattr(engine.DeployedEngine, "_programs", watched)
    deploy(grid=grid, rounds=2)
    kinds = [kind for kind, group in grid.events if group != "hello"][len(nodes) :]
    assert kinds == 2 * (["push"] * 3 + ["central"] + ["reply"] * 3)


# What goes wrong


def poison(name, value):
    """A reply in which one array is another."""

    def change(content):
        ((layout, own),) = content["weighted"].items()
        content["weighted"][layout] = value(own)

    return name, changed(change)


def numbers(**values):
    def change(content):
        content["numbers"] = MetricRecord({**content["numbers"], **values})

    return changed(change)


def raw(a, dtype=None, shape=None, data=None, form=messages.FORMAT) -> Array:
    return Array(dtype or a.dtype, shape or a.shape, form, data if data is not None else a.data)


def all_of(a, value) -> bytes:
    """As many float32 numbers as it has, all the same."""
    return np.full(len(a.data) // 4, value, np.float32).tobytes()


def replaced(**records):
    def change(content):
        for name, record in records.items():
            content[name] = record

    return changed(change)


def without(name):
    return changed(lambda content: content.pop(name))


FAULTS = dict([
    ("failed", crash(ErrorCode.CLIENT_APP_RAISED_EXCEPTION)),
    ("crashed", crash(ErrorCode.CLIENT_APP_CRASHED)),
    ("gone", crash(ErrorCode.NODE_UNAVAILABLE)),
    ("error", crash(77)),
    ("late", late(601)),
    ("late, never", hang),
    poison("shape", lambda a: raw(a, shape=(4,))),
    poison("shape, huge", lambda a: raw(a, shape=(2**40, 2**40))),
    poison("shape, negative", lambda a: raw(a, shape=(-3,))),
    poison("dtype", lambda a: raw(a, dtype="float64")),
    poison("dtype, object", lambda a: raw(a, dtype="object")),
    poison("size, short", lambda a: raw(a, data=a.data[:-1])),
    poison("size, long", lambda a: raw(a, data=a.data * 1000)),
    poison("nonfinite", lambda a: raw(a, data=all_of(a, np.nan))),
    poison("nonfinite, infinite", lambda a: raw(a, data=all_of(a, np.inf))),
    poison("too_large", lambda a: raw(a, data=all_of(a, 3e38))),
    poison("malformed, pickled", lambda a: raw(a, form="numpy.ndarray", data=b"\x80\x04K\x01.")),
    ("malformed, no own part", without("weighted")),
    ("malformed, no numbers", without("numbers")),
    ("malformed, another record", replaced(weighted=ConfigRecord({"w": 1}))),
    ("malformed, no array", replaced(weighted=ArrayRecord())),
    ("malformed, another layout", replaced(weighted=messages.arrays({"v": np.zeros(3, "f4")}))),
    ("malformed, weight", numbers(weight=1e9)),
    ("malformed, negative weight", numbers(weight=-1.0)),
    ("malformed, steps", numbers(steps=0.5)),
    ("malformed, many steps", numbers(steps=1000)),
    ("malformed, list", numbers(loss=[1.0, 2.0])),
    ("nonfinite, loss", numbers(loss=float("nan"))),
    ("nonfinite, large loss", numbers(loss=1e300)),
])  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_a_client_that_fails_is_left_out_and_counted(kind):
    """All clients take part; one of them fails in the second of two rounds."""
    faults = {("1", 2): FAULTS[kind]}
    result, _, lines = deploy(
        algorithm="fedavg", rounds=2, cohort_size=4, faults=faults, min_replies=0.75
    )
    reason = kind.split(",")[0]
    row = result.metrics[-1]
    assert row["clients/rejected"] == row[f"clients/rejected/{reason}"] == 1
    assert (row["clients/asked"], row["clients/accepted"], row["clients/federated"]) == (8, 7, 3)
    assert result.metrics[0]["clients/rejected"] == 0
    (line,) = [line for line in lines if f"({reason})" in line]
    assert line.startswith(f"round 2: client 2 (node {FIRST_NODE + 2}) of 'federated' is left out")
    assert_same(result.params, expected_without_client_2())


@functools.cache
def expected_without_client_2():
    """By hand: two rounds of FedAvg with the clients' own uploads, the second without client 2."""
    there, nodes = placed("two terms")
    config = SETTINGS | dict(algorithm="fedavg", cohort_size=4)
    clients = [Client(there, config, {**node, "node-id": i}) for i, node in enumerate(nodes)]
    x = jax.tree.map(np.asarray, there.init(jax.random.key(0)))
    for t, left_out in enumerate([None, 2]):
        uploads = [
            c.program(messages.Broadcast(x), c.feed(t), (), {})
            for i, c in enumerate(clients) if i != left_out
        ]  # fmt: skip
        total = sum(float(u.weight) for u in uploads)
        for u in uploads:
            x = jax.tree.map(lambda a, own, total=total: a + own / total, x, u.weighted)
    return x


def test_replies_that_come_twice_or_to_nothing_count_once():
    result, _, _ = deploy(rounds=2, cohort_size=4, faults={("0", 1): twice, ("1", 0): twice})
    expected, _, _ = deploy(rounds=2, cohort_size=4)
    assert_same(result.params, expected.params, 0)
    row = result.metrics[-1]
    assert (row["replies/duplicate"], row["clients/rejected"], row["clients/accepted"]) == (2, 0, 8)


def test_a_round_without_enough_replies_is_skipped():
    """Nothing but its number is lost: the following rounds are as if it had not been."""
    faults = {("1", i): hang for i in range(4)}
    result, grid, lines = deploy(rounds=3, faults=faults)
    assert [row.get("rounds/failed", 0) for row in result.metrics] == [0, 1, 1]
    assert result.metrics[1]["eval/loss"] == result.metrics[0]["eval/loss"]
    assert result.metrics[2]["eval/loss"] != result.metrics[1]["eval/loss"]
    assert result.metrics[-1]["clients/rejected/late"] == 3
    assert any("round 2 is skipped: good replies from 0 of 3 clients" in line for line in lines)
    assert 600 < grid.clock.now < 610


def test_without_clients_it_waits_and_says_so():
    def gone(now):
        return set(range(4)) if now < 500 else set()

    result, grid, lines = deploy(rounds=2, gone=gone)
    expected, _, _ = deploy(rounds=2)
    assert_same(result.params, expected.params, 0)
    waits = [line for line in lines if line.startswith("waiting for clients: 0 of 'federated'")]
    assert "checking again in 2 s" in waits[0]
    assert "checking again in 60 s" in waits[-1]
    assert len(waits) < 15
    assert 500 < grid.clock.now < 600


def test_it_begins_with_fewer_clients_than_wanted_only_after_a_while():
    result, grid, _ = deploy(rounds=2, cohort_size=4, gone=lambda now: {0})
    assert result.metrics[-1]["clients/federated"] == 3
    assert result.metrics[-1]["clients/asked"] == 6
    assert 600 < grid.clock.now < 700


def test_more_clients_may_be_asked_than_count():
    faults = {("0", 1): late(5), ("1", 0): hang}
    result, grid, _ = deploy(rounds=2, cohort_size=2, over_select=2, faults=faults)
    row = result.metrics[-1]
    assert (row["clients/asked"], row["clients/accepted"], row["clients/surplus"]) == (8, 4, 4)
    assert row["clients/federated"] == 2
    assert grid.clock.now < 5


def test_a_run_waits_for_its_first_clients():
    """Who says late who it is would else be in no cohort of the first round."""
    slow = {("hello", 0): late(5)}
    result, grid, _ = deploy(rounds=1, cohort_size=2, min_clients=4, faults=slow)
    assert grid.clock.now >= 5
    assert_same(
        result.params, simulate("two terms", mixfl.two_way_gt(), rounds=1, cohort_size=2).params
    )


def test_counts_add_up():
    """Many failures at random: every client that was asked is in one count."""
    rng = np.random.default_rng(0)
    kinds = [*FAULTS.values(), twice, on_time, on_time]
    faults = {(str(t), i): kinds[rng.integers(len(kinds))] for t in range(8) for i in range(4)}
    result, _, _ = deploy(rounds=8, cohort_size=3, over_select=1.3, min_replies=0.3, faults=faults)
    for row in result.metrics:
        reasons = [n for key, n in row.items() if key.startswith("clients/rejected/")]
        assert sum(reasons) == row["clients/rejected"]
        ended = row["clients/accepted"] + row["clients/rejected"] + row.get("clients/surplus", 0)
        assert ended == row["clients/asked"]
    assert result.metrics[-1]["clients/rejected"] > 5
    assert np.isfinite(problems.flat(result.params)).all()


def test_a_reply_in_the_name_of_another_node_is_no_reply():
    def forged(message, reply):
        answer = reply()
        answer.metadata.__dict__["_src_node_id"] = FIRST_NODE + 3
        return [(0.0, answer)]

    result, _, _ = deploy(rounds=1, cohort_size=4, faults={("0", 0): forged})
    row = result.metrics[-1]
    assert (row["replies/unknown"], row["clients/rejected/late"], row["clients/accepted"]) == (
        1,
        1,
        3,
    )


def test_a_message_that_flower_does_not_take(monkeypatch):
    there, nodes = placed("two terms")
    grid = InProcess(mixfl.flower.client_app(there), nodes, SETTINGS)
    real = grid.push_messages

    def push(messages):
        lost = [
            m.metadata.dst_node_id == FIRST_NODE and m.metadata.group_id == "0" for m in messages
        ]
        return [None if lost else i for lost, i in zip(lost, real(messages), strict=True)]

    monkeypatch.setattr(grid, "push_messages", push)
    result, _, _ = deploy(grid=grid, rounds=1, cohort_size=4)
    row = result.metrics[-1]
    assert (row["clients/rejected/unsent"], row["clients/accepted"]) == (1, 3)


def test_what_flower_cant_read_is_one_clients_fault(monkeypatch):
    there, nodes = placed("two terms")
    grid = InProcess(mixfl.flower.client_app(there), nodes, SETTINGS)
    real = grid.pull_messages

    def pull(ids):
        (message,) = ids
        train = grid.sent.get(message)
        if train and train.metadata.group_id == "0" and train.metadata.dst_node_id == FIRST_NODE:
            raise ValueError("secret data of a client")
        return real(ids)

    monkeypatch.setattr(grid, "pull_messages", pull)
    result, _, lines = deploy(grid=grid, rounds=1, cohort_size=4)
    assert result.metrics[-1]["clients/rejected/malformed"] == 1
    assert not any("secret" in line for line in lines)


def test_what_a_client_says_of_its_error_is_not_repeated():
    def secret(message, reply):
        return [(0.0, failed(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "of patient 17"))]

    faults = {("hello", 0): secret, ("0", 1): secret}
    result, _, lines = deploy(rounds=1, faults=faults)
    assert result.metrics[-1]["clients/rejected/failed"] == 1
    assert any(f"node {FIRST_NODE} does not take part for now" in line for line in lines)
    assert any("(failed): it failed (Flower's error code 2)" in line for line in lines)
    assert not any("patient" in line for line in lines)


# Runs


def files(out):
    """What a run leaves behind, but for its times."""
    rows = [{k: v for k, v in row.items() if k != "time/round_ms"} for row in read_metrics(out)]
    return rows, (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("algorithm", ["2wgt", "1wgt"])
def test_a_new_server_goes_on_from_the_last_round(algorithm, tmp_path):
    """The server dies in the third round, after its messages were sent; bit for bit the same."""
    settings = dict(algorithm=algorithm, rounds=4, faults={("1", 2): crash(8)}, **ADAM)
    deploy("two terms", tmp_path / "whole", **settings)

    def killed(now):
        if len([e for e in grid.events if e == ("push", "2")]):
            raise KeyboardInterrupt  # as hard as it gets in one process
        return set()

    there, nodes = placed("two terms")
    given = {k: v for k, v in settings.items() if k != "faults"}
    grid = InProcess(
        mixfl.flower.client_app(there), nodes, SETTINGS | given, faults=settings["faults"]
    )
    real = grid.pull_messages
    grid.pull_messages = lambda ids: (killed(0), real(ids))[1]
    with pytest.raises(KeyboardInterrupt):
        deploy("two terms", tmp_path / "killed", grid=grid, **given)
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    _, _, lines = deploy("two terms", tmp_path / "killed", **(settings | {"round_deadline": 50.0}))
    assert "going on from the checkpoint of round 2" in lines
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_the_apps_of_a_project(tmp_path):
    """A project of two files, as Flower starts it: by name, with its own clock."""
    _, nodes = placed("two terms")
    config = SETTINGS | dict(
        rounds=2, out=str(tmp_path / "run"), algorithm="1wgt", cohorts="seed", **{"own.key": 1}
    )
    grid = InProcess(mixfl.flower.client_app("test_flower:named"), nodes, config, time)
    app = mixfl.flower.server_app("test_flower:named")
    app(grid, Context(1, 1, {}, RecordDict(), config))
    found, expected = load(tmp_path / "run"), deploy(rounds=2, algorithm="1wgt")[0]
    assert_same(found.params, expected.params, 0)
    assert (found.status, found.config["round_deadline"]) == ("finished", 600.0)
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {
        "config.toml", "metrics.jsonl", "checkpoints", "tensorboard", "status.json",
    }  # fmt: skip


def named():
    return placed("two terms")[0]


def test_making_the_apps_needs_no_jax():
    code = (
        "import sys, mixfl.deploy.flower as f; f.client_app('a:b'); f.server_app('a:b');"
        "assert not {'jax', 'optax', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_the_rows_that_a_client_names_travel():
    """Bytes of the real messages: whole tables are longer by the rows that a client lacks. In the
    second round, as Flower sends arrays of equal bytes once, and zeros are."""
    rows, _, _ = deploy("tables", algorithm="2wgt", rounds=2)
    whole, _, _ = deploy("tables", algorithm="2wgt", rounds=2, tables="dense")
    assert_same(rows.params, whole.params)
    there, nodes = placed("tables")
    clients = [Client(there, SETTINGS | {"algorithm": "2wgt"}, node) for node in nodes]
    chosen = cohort(0, 1, 0, len(clients), SETTINGS["cohort_size"])
    held = np.mean([len(clients[i].rows["towers/items"]) for i in chosen])
    lacks = (table_problem.N - held) * 4 * (table_problem.DIM + 1)
    for key, times in (("comm/down_bytes", 2), ("comm/up_bytes", 1)):
        found = whole.metrics[1][key] - rows.metrics[1][key]
        assert found == pytest.approx(times * lacks, abs=40)  # digits of shapes in the headers


def test_a_client_whose_data_has_changed_is_asked_again():
    """It says that it holds other rows now, is left out of one round and then takes part."""
    there, nodes = placed("tables")
    clients = PROBLEMS["tables"]().populations[0].clients
    more = {}

    def own(node):
        i = node["partition-id"]
        return clients.examples.take(np.append(clients.rows(i), more.get(i, [])).astype(int))

    terms = [dataclasses.replace(there.terms[0], clients=own), *there.terms[1:]]
    growing = dataclasses.replace(there, terms=terms)

    def grows(message, reply):
        more[0] = clients.rows(3)
        client._clients.clear()  # as in a process of its own
        return [(0.0, reply())]

    given = SETTINGS | dict(rounds=2, cohort_size=4, algorithm="fedavg")
    grid = InProcess(mixfl.flower.client_app(growing), nodes, given, faults={("0", 0): grows})
    result, _, _ = deploy("tables", grid=grid, **given)
    first, second = result.metrics
    assert first["clients/rejected/stale"] == first["clients/rejected"] == 1
    assert (second["clients/rejected"], second["clients/federated"]) == (1, 4)


def test_hostile_sizes_take_no_memory():
    """A reply that declares a terabyte, or has a hundred megabytes, is refused where it lies."""
    like = jax.ShapeDtypeStruct((3,), np.float32)
    huge = bytes(100 << 20)
    tracemalloc.start()
    for given in (
        Array("float32", (2**38,), messages.FORMAT, b""),
        Array("float32", (3,), messages.FORMAT, huge),
        Array("float32", (25 << 20,), messages.FORMAT, huge),
    ):
        with pytest.raises(messages.Rejected):
            messages.parsed(given, like, "w")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
def test_arrays_come_back_as_they_were(dtype):
    a = {"a": np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype)), "b": {"c": np.float32(3)}}
    content = RecordDict({"x": messages.arrays(a)})
    sent = wired(Message(content, 1, "train"))
    found = messages.parsed_tree(sent.content["x"], a)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(a), strict=True):
        assert (f.dtype, f.shape) == (e.dtype, e.shape)
        assert np.asarray(f).tobytes() == np.asarray(e).tobytes()


HELLO = {
    "another population": dict(population="nobody"),
    "no number": dict(number="-1"),
    "a long number": dict(number="9" * 1000),
    "another release": dict(version=messages.VERSION + 1),
}


@pytest.mark.parametrize("kind", [*HELLO, "odd rows", "rows beyond", "many rows", "no rows"])
def test_a_node_that_says_nonsense_takes_no_part(kind):
    rows = {
        "odd rows": b"\x81\x00", "rows beyond": pack_rows(np.array([0, table_problem.N])),
        "many rows": pack_rows(np.arange(1000)), "no rows": b"",
    }  # fmt: skip

    def change(content):
        if kind in HELLO:
            content["hello"] = ConfigRecord({**content["hello"], **HELLO[kind]})
        else:
            (table, *_) = content["rows"]
            content["rows"][table] = messages.flat(rows[kind])

    faults = {("hello", 1): changed(change)}
    result, _, lines = deploy("tables", algorithm="fedavg", rounds=1, faults=faults)
    assert result.metrics[0]["clients/federated"] == 3
    (line,) = [line for line in lines if f"node {FIRST_NODE + 1} does not take part" in line]
    assert ("install the same release" in line) == (kind == "another release")


def test_a_client_refuses_a_task_of_another_release():
    there, nodes = placed("two terms")
    config = SETTINGS | dict(algorithm="fedavg", cohort_size=4)
    client = Client(there, config, {**nodes[0], "node-id": 0})
    task = messages.task(0, messages.Broadcast(there.init(jax.random.key(0))), {})
    head = {k: v for k, v in task["train"].items() if k != "version"}
    task["train"] = ConfigRecord(head)  # as the first release sent it
    with pytest.raises(MixflError, match="messages of version 1, this one of version 4: install"):
        client.train(task)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(algorithm="oracle"), "oracle can't be deployed: it trains on the clients' data"),
        (dict(algorithm="example-transfer"), "example-transfer can't be deployed"),
        (dict(round_dedline=3), "Did you mean 'round_deadline'?"),
        (dict(devices=2), "key 'devices' has no effect"),
        (dict(min_replies=1.5), "min_replies = 1.5: expected a number above 0 and at most 1"),
        (dict(round_deadline=0), "round_deadline = 0: expected a finite number above 0"),
        (dict(over_select=0.5), "over_select = 0.5"),
        (dict(drop_rate=0.5), "drop_rate = 0.5 can't be deployed: it simulates clients that drop"),
        (dict(sampling="examples"), "sampling = examples can't be deployed"),
    ],
)
def test_bad_settings_get_a_sentence(given, message):
    with pytest.raises(MixflError) as error:
        deploy(**given)
    assert message in str(error.value)


def test_data_at_nodes_is_not_for_the_simulator():
    there, _ = placed("two terms")
    with pytest.raises(MixflError, match=r"use mixfl\.flower\.simulated"):
        mixfl.train(there, "fedavg", rounds=1)
    with pytest.raises(MixflError, match="the data of 'federated' is in the problem itself"):
        Client(PROBLEMS["two terms"](), SETTINGS, {"partition-id": 0})


def test_callbacks_and_early_stopping_at_the_server(tmp_path):
    seen = []

    def callback(event):
        seen.append((event.round, event.metrics["eval/loss"], event.params))
        if event.round == 2:
            event.stop("enough")

    found, _, said = deploy(out=tmp_path / "run", algorithm="2wgt", eval_every=1,
                            callbacks=[callback])  # fmt: skip
    expected = simulate("two terms", "2wgt", rounds=2, eval_every=1)
    assert [round for round, *_ in seen] == [1, 2]
    assert_same(found.params, expected.params)
    assert_same(seen[-1][2], found.params, 0)
    assert "stopped after round 2: enough" in said
    # This loss grows: the first model is the best.
    found, _, _ = deploy(out=tmp_path / "early", algorithm="2wgt", eval_every=1, early_stop=1,
                         rounds=4)  # fmt: skip
    assert (len(found.metrics), found.best["round"]) == (2, 1)
    assert_same(found.best_params, simulate("two terms", "2wgt", rounds=1).params)
