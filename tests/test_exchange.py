"""A deployment's server against what a SuperLink's end, or a registered client, can do to it.

Most have a SuperLink in one process (flower_superlink.py): Flower's own handlers and database.
"""

import http.server
import json
import threading
import tracemalloc

import httpx
import jax
import numpy as np
import pytest
from flower_grid import FIRST_NODE, InProcess, hang, late
from flower_superlink import (
    SuperLink,
    announced_only,
    honest,
    long_array,
    once,
    repeated,
    silent,
    wide,
    without_last,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flower import SETTINGS, Notes, assert_same, deploy, placed

import mixfl
import mixfl.flower
from mixfl.engine.cohort import cohort
from mixfl.errors import MixflError
from mixfl.flower import messages, server
from mixfl.flower.bounds import Reply, bounds
from mixfl.flower.config import Deployment
from mixfl.flower.keys import make_keys
from mixfl.flower.link import Client, TooLong
from mixfl.flower.members import FILE, Members
from mixfl.flower.quarantine import LONGEST, Quarantine
from mixfl.runs.directory import load
from mixfl.runs.training import run
from mixfl.sparse import Table


def served(tmp_path=None, forged=None, broken=None, problem="two terms", **given):
    """A run over a SuperLink in this process: its result, the SuperLink and what was said."""
    there, nodes = placed(problem)
    config = SETTINGS | dict(cohorts="seed", rounds=3, cohort_size=4, algorithm="fedavg") | given
    database = str(tmp_path / "state.sqlite") if tmp_path else ""
    link = SuperLink(mixfl.flower.client_app(there), nodes, config, database, forged)
    if broken:
        link.broken = broken
    notes = Notes()
    plan = server.deployed(there, link.link(), config, notes, link.clock)
    return run(plan, None, True, notes), link, notes.lines


def nothing_left(link):
    """In the SuperLink's database."""
    state = link.state
    return len(state.object_store) == state.num_message_ins() == state.num_message_res() == 0


def test_over_flowers_own_handlers_it_is_the_same_run(tmp_path):
    result, link, _ = served(tmp_path)
    expected, _, _ = deploy(rounds=3, cohort_size=4, algorithm="fedavg")
    assert_same(result.params, expected.params, 0)
    assert nothing_left(link)


# Sending


@pytest.mark.parametrize("call", ["push_messages", "push_object"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_superlink_that_ends_before_it_answers_loses_no_message(call, times):
    """The n-th answers are lost, in every round and among the first queries."""
    broken = once(call, lambda n: n % 7 < times)
    result, link, _ = served(broken=broken)
    expected, _, _ = deploy(rounds=3, cohort_size=4, algorithm="fedavg")
    assert_same(result.params, expected.params, 0)
    assert result.metrics[-1]["clients/accepted"] == 12
    assert nothing_left(link)


@pytest.mark.parametrize("times", [1, 3, 1000])
def test_an_object_that_is_refused_is_sent_with_its_message_again(times):
    """As Flower's own second try is: PushObject is told that nothing was to be stored. A client to
    whom nothing can be sent is counted, and the others go on."""
    refusals = [0]

    def broken(name, request, after):
        if name != "push_messages" or after or request.messages_list[0].metadata.group_id != "1":
            return
        if request.messages_list[0].metadata.dst_node_id == link.ids[2] and refusals[0] < times:
            refusals[0] += 1
            raise ObjectPushError("object", 1, "session")

    there, nodes = placed("two terms")
    config = SETTINGS | dict(cohorts="seed", rounds=3, cohort_size=4, algorithm="fedavg")
    link = SuperLink(mixfl.flower.client_app(there), nodes, config)
    link.broken = broken
    plan = server.deployed(there, link.link(), config, Notes(), link.clock)
    row = run(plan, None, True, Notes()).metrics[-1]
    lost = int(times == 1000)
    assert row.get("clients/rejected/unsent", 0) == row["clients/rejected"] == lost
    assert row["clients/accepted"] == 12 - lost
    assert refusals[0] == min(times, 5)
    assert link.clock.now < 30


def test_the_same_message_is_pushed_again_not_a_new_one():
    sent = []

    def broken(name, request, after):
        if name == "push_messages" and after:
            sent.append(request.messages_list[0].metadata.message_id)
            if len(sent) == 1:
                raise httpx.ReadError("gone")

    served(broken=broken, rounds=1)
    assert sent[0] == sent[1]
    assert len(set(sent)) == len(sent) - 1


# The SuperLink is away


def served_while_away(end, out=None):
    """No call gets through until then, by the clock."""
    there, nodes = placed("two terms")
    config = SETTINGS | dict(cohorts="seed", rounds=3, cohort_size=4, algorithm="fedavg")
    link = SuperLink(mixfl.flower.client_app(there), nodes, config)

    def broken(name, request, after):
        if link.clock.now < end:
            raise httpx.ConnectError("refused")

    link.broken, notes = broken, Notes()
    plan = server.deployed(there, link.link(), config, notes, link.clock, out)
    return run(plan, out, True, notes), link, notes.lines


def test_a_run_outlives_a_superlink_that_is_away():
    result, link, lines = served_while_away(90)
    expected, _, _ = deploy(rounds=3, cohort_size=4, algorithm="fedavg")
    assert_same(result.params, expected.params, 0)
    assert any("the SuperLink can't be reached; trying again in 1 s" in line for line in lines)
    assert 90 <= link.clock.now < 200


def test_replies_wait_while_the_superlink_is_away():
    """It goes in a round, after the messages were sent. One node never replies; that the others
    were not heard for a while is nobody's fault."""
    there, nodes = placed("two terms")
    config = SETTINGS | dict(cohorts="seed", rounds=2, cohort_size=4, algorithm="fedavg")
    link = SuperLink(mixfl.flower.client_app(there), nodes, config, forged={("0", 3): silent})
    pulls = [0]

    def broken(name, request, after):
        pulls[0] += name == "pull_messages" and not after
        if name == "pull_messages" and not after and 6 < pulls[0] < 40:
            raise httpx.ReadTimeout("away")

    link.broken = broken
    plan = server.deployed(there, link.link(), config, Notes(), link.clock)
    row = run(plan, None, True, Notes()).metrics[-1]
    assert (row["clients/accepted"], row["clients/rejected/late"]) == (7, 1)
    assert 599 < link.clock.now < 603


def test_a_superlink_that_stays_away_ends_the_run_with_a_sentence(tmp_path):
    with pytest.raises(MixflError, match="the SuperLink could not be reached for 600 s"):
        served_while_away(1e9, tmp_path / "run")
    assert load(tmp_path / "run").status == "failed"


@pytest.mark.parametrize("status", [401, 403])
def test_a_run_that_flower_has_ended_says_so(status):
    def broken(name, request, after):
        if name == "push_object":
            request = httpx.Request("POST", "https://superlink")
            answer = httpx.Response(status, request=request)
            raise httpx.HTTPStatusError("no", request=request, response=answer)

    with pytest.raises(MixflError, match="Flower has ended this run"):
        served(broken=broken)


def test_failed_rounds_can_go_on_for_ever():
    """2.0**1024 is too large for a float."""
    there, nodes = placed("two terms")
    grid = InProcess(mixfl.flower.client_app(there), nodes, SETTINGS)
    engine = server.deployed(there, grid, SETTINGS, Notes(), grid.clock).simulator()
    engine.failures = 5000
    engine._failed(3, ["0 of 3 clients"])
    assert grid.clock.now == server.LONGEST_PAUSE


# Replies that never end, or are too large


@pytest.mark.parametrize("sent", [announced_only, without_last])
def test_a_reply_that_is_announced_and_not_sent_is_late(sent, tmp_path):
    result, link, _ = served(tmp_path, {("1", 2): sent}, round_deadline=20)
    row = result.metrics[-1]
    assert (row["clients/rejected/late"], row["clients/rejected"]) == (1, 1)
    assert row["clients/accepted"] == 11
    assert 20 <= link.clock.now < 21
    assert nothing_left(link)


def test_a_node_that_announces_who_it_is_and_does_not_say_it(tmp_path):
    result, link, lines = served(tmp_path, {("hello", 1): announced_only}, round_deadline=20)
    assert result.metrics[-1]["clients/federated"] == 3
    assert any("it has not said who it is" in line for line in lines)
    assert link.clock.now < 25


BOMBS = {
    "a terabyte of one chunk": repeated(350_000, bytes(3 << 20)),
    "a chunk 20,000 times": repeated(20_000, bytes(12)),
    "a long array": long_array(50 << 20),
    "a wide tree": wide(5000),
}


@pytest.mark.parametrize("group", ["1", "hello"])
@pytest.mark.parametrize("kind", BOMBS)
def test_a_reply_that_is_too_large_is_not_inflated(kind, group):
    """The run is as if its sender had been silent since."""
    expected, _, _ = served(None, {(group, 2): silent, ("2", 2): silent}, round_deadline=5)
    result, link, lines = served(None, {(group, 2): BOMBS[kind]}, round_deadline=5)
    assert_same(result.params, expected.params, 1e-6)
    assert nothing_left(link)
    if group == "1":
        row = result.metrics[-1]
        assert row["clients/rejected/oversized"] == row["clients/rejected"] == 1
        assert row["clients/quarantined"] == 1  # in the third round
        assert any("is in quarantine for 64 rounds" in line for line in lines)
    else:
        assert any("it is asked again in 3600 s" in line for line in lines)


def test_a_terabyte_takes_no_memory():
    """3 MB of repeated chunk ids; and as many repetitions as fit where a model is large."""
    good = Message(RecordDict(), 1, "train")
    for times, chunk, size in [(350_000, 3 << 20, 12), (20_000, 4 << 20, 4 << 20)]:
        _, tree, contents = repeated(times, bytes(chunk))(good)
        tracemalloc.start()
        with pytest.raises(messages.Rejected) as rejected:
            put_together(tree, contents, bounds([("w", size)]))
        assert rejected.value.reason == "oversized"
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
        tracemalloc.stop()


def put_together(tree, contents, most):
    reply = Reply(tree.object_id, tree, most)
    for object_id in list(reply.missing):
        reply.add(object_id, contents[object_id])
    return reply.message()


@pytest.mark.parametrize("size", [0, 12, 20 << 20])
def test_an_honest_reply_of_any_size_passes(size):
    """Zeros, too: Flower sends their chunks, which are equal, once."""
    arrays = {"zeros": np.zeros(size // 4, np.float32), "a/ü": np.arange(size // 4, dtype="f4")}
    reply = Message(RecordDict({"delta": messages.arrays(arrays)}), 1, "train")
    _, tree, contents = honest(reply)
    found = put_together(tree, contents, bounds((n, a.nbytes) for n, a in arrays.items()))
    assert found.content["delta"]["a/ü"].data == arrays["a/ü"].tobytes()
    assert len(found.content["delta"]["zeros"].data) == size


def test_a_tree_that_is_too_deep():
    tree = get_object_tree(RecordDict())
    for _ in range(50):
        tree = type(tree)(object_id=tree.object_id, children=[tree])
    with pytest.raises(messages.Rejected):
        Reply(tree.object_id, tree, bounds([("w", 12)]))


SMALL = Message(RecordDict({"delta": messages.arrays({"w": np.ones(3, "f4")})}), 1, "train")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_its_parts_are_a_reply_is_read_or_rejected(data):
    """Bytes changed in an honest reply's objects, and heads of any kind."""
    _, tree, contents = honest(SMALL)
    which = list(contents)[data.draw(st.integers(0, len(contents) - 1))]
    good = contents[which]
    start = min(data.draw(st.integers(0, 400)), len(good))
    new = data.draw(st.binary(max_size=60) | st.sampled_from([
        b"Array  2\x00{}", b"ArrayRecord  2\x00[]", b'Array  0\x00{"arraychunk_ids":[0]}',
        b"[" * 5000, b"{" * 5000, b"Message  0\x00", b"9" * 5000,
    ]))  # fmt: skip
    contents[which] = good[:start] + new + good[start + data.draw(st.integers(0, 60)) :]
    try:
        put_together(tree, contents, bounds([("w", 12)]))
    except messages.Rejected:
        pass


def test_an_answer_that_is_too_long_is_not_read():
    """Over real HTTP: by its head."""
    read = []

    class Long(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("content-length", str(1 << 40))
            self.end_headers()
            try:
                while len(read) < 1000:
                    self.wfile.write(bytes(1 << 20))
                    read.append(1)
            except OSError:
                pass

        def log_message(self, *args): ...

    with http.server.HTTPServer(("127.0.0.1", 0), Long) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        client = Client.from_server_address(f"127.0.0.1:{httpd.server_port}", True, None, [])
        client.limit(1 << 20, 10)
        with pytest.raises(TooLong):
            client.PullObject(PullObjectRequest())
        client.close()
        httpd.shutdown()
    assert len(read) < 100


def test_who_sent_a_reply_is_not_the_replys_to_say():
    """A node answers in another's name: its own metadata say so, the SuperLink knows better."""
    known = {}

    def note(reply):
        known["victim"] = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        return honest(reply)

    def forge(reply):
        real = dict(reply.metadata.__dict__)
        message, src = known["victim"]
        reply.metadata.__dict__.update(_reply_to_message_id=message, _src_node_id=src)
        reply.content["delta"]["w"] = messages.array(np.full(3, 9, np.float32))
        sent = honest(reply)
        reply.metadata.__dict__.update(real)
        return sent

    result, _, _ = served(None, {("1", 1): note, ("1", 2): forge}, rounds=2)
    row = result.metrics[-1]
    assert row["clients/accepted"] == 8
    assert "replies/duplicate" not in row
    assert "replies/unknown" not in row


def test_surplus_replies_are_deleted_too(tmp_path):
    result, link, _ = served(tmp_path, cohort_size=2, over_select=2, rounds=4)
    row = result.metrics[-1]
    assert (row["clients/asked"], row["clients/accepted"], row["clients/surplus"]) == (16, 8, 8)
    assert nothing_left(link)


# Quarantine


def test_the_pause_doubles_and_good_replies_shorten_it():
    q = Quarantine()
    pauses = [q.offence("a", 10, "late") for _ in range(10)]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert q.remaining("a", 10) == 1 + LONGEST
    assert q.remaining("a", 11 + LONGEST) == 0
    q.good("a")
    assert q.remaining("a", 11) == 0
    assert q.offence("a", 11, "shape") == 8
    assert q.offence("b", 0, "oversized") == LONGEST
    assert [q.offence("c", 0, reason) for reason in ("gone", "unsent", "stale")] == [0, 0, 0]
    again = Quarantine(json.loads(json.dumps(q.kept())))
    assert (again.offences, again.until) == (q.offences, q.until)


def test_a_node_that_never_replies_is_asked_less_and_less():
    """Three others are enough. Without the quarantine every round would take the deadline."""
    faults = {(str(t), 2): hang for t in range(32)}
    result, grid, lines = deploy(
        algorithm="fedavg", rounds=32, cohort_size=4, faults=faults, round_deadline=10.0
    )
    late_in = [
        b["round"] - 1 for a, b in zip([{}, *result.metrics], result.metrics, strict=False)
        if b.get("clients/rejected", 0) > a.get("clients/rejected", 0)
    ]  # fmt: skip
    assert late_in == [0, 1, 3, 6, 11, 20]
    assert [row["clients/quarantined"] for row in result.metrics][:7] == [0, 0, 1, 0, 1, 1, 0]
    assert result.metrics[-1]["clients/accepted"] == 3 * 32
    assert 60 <= grid.clock.now < 62
    assert f"node {FIRST_NODE + 2} is in quarantine for 1 round: it has failed again" in "\n".join(
        lines
    )


def test_quarantine_never_starves_a_run():
    """All nodes but one fail in most rounds: so many are asked that a round may succeed."""
    rng = np.random.default_rng(0)
    faults = {(str(t), i): hang for t in range(40) for i in (1, 2, 3) if rng.random() < 0.7}
    result, _, _ = deploy(
        algorithm="fedavg", rounds=40, cohort_size=4, faults=faults, round_deadline=10.0
    )
    asked = np.diff([0, *(row["clients/asked"] for row in result.metrics)])
    assert asked.min() >= 2  # half of the cohort: min_replies
    assert result.metrics[-1]["rounds/failed"] < 35
    assert result.metrics[-1]["clients/accepted"] > 40


def test_an_answer_that_is_bad_again_and_again_is_asked_for_less_often():
    """Who it is, a node is asked again after 1, 2, 4 ... minutes."""
    slow = {(str(t), 0): late(200) for t in range(14)}
    faults = slow | {("hello", 3): hang}
    _, _, lines = deploy(rounds=14, cohort_size=3, faults=faults, min_clients=3, min_replies=1.0)
    told = [line for line in lines if f"node {FIRST_NODE + 3} does not take part" in line]
    assert [line.split()[-2] for line in told[:3]] == ["60", "120", "240"]


# Cohorts


def asked_of(grid):
    """Per round, the places of the nodes that were asked."""
    found = {}
    for message in grid.tasks:
        found.setdefault(message.metadata.group_id, []).append(message.metadata.dst_node_id)
    return [[n - FIRST_NODE for n in found[str(t)]] for t in range(len(found))]


class Watched(InProcess):
    def push_messages(self, messages):
        tasks = [m for m in messages if m.metadata.group_id != "hello"]
        self.__dict__.setdefault("tasks", []).extend(tasks)
        return super().push_messages(messages)


def watched(**given):
    there, nodes = placed("two terms")
    return Watched(mixfl.flower.client_app(there), nodes, SETTINGS | given)


def test_cohorts_are_the_servers_secret(tmp_path):
    """Kept in the run's folder, for its owner alone; in no message, nor in the configuration."""
    asked = []
    for name in ("a", "b"):
        grid = watched()
        out = tmp_path / name
        deploy(out=out, grid=grid, cohorts="secret", cohort_size=2, rounds=12)
        asked.append(asked_of(grid))
        secret = json.loads((out / FILE).read_text())["secret"]
        assert (out / FILE).stat().st_mode & 0o777 == 0o600
        sent = b"".join(p for m in grid.tasks for p in honest(m)[2].values())
        assert bytes.fromhex(secret) not in sent
        assert secret.encode() not in sent
        assert secret not in (out / "config.toml").read_text()
    foreseen = [list(cohort(0, t, 0, 4, 2)) for t in range(12)]
    assert asked[0] != asked[1]
    assert foreseen not in asked
    assert {len(set(c)) for c in asked[0]} == {2}


def test_a_resumed_run_draws_from_the_same_secret(tmp_path):
    class Killed(Watched):
        def pull_messages(self, ids):
            if any(m.metadata.group_id == "2" for m in getattr(self, "tasks", [])):
                raise KeyboardInterrupt
            return super().pull_messages(ids)

    out, there_nodes = tmp_path / "run", placed("two terms")
    first = Killed(mixfl.flower.client_app(there_nodes[0]), there_nodes[1], SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        deploy(out=out, grid=first, cohorts="secret", cohort_size=2, rounds=5)
    second = watched()
    deploy(out=out, grid=second, cohorts="secret", cohort_size=2, rounds=5)
    drawn = Members(there_nodes[0], Deployment(), out, print)
    drawn.begin()
    expected = [list(cohort(drawn.seed(t, 0), t, 0, 4, 2)) for t in range(5)]
    assert asked_of(first) == expected[:3]
    found = {}
    for m in second.tasks:
        found.setdefault(int(m.metadata.group_id), []).append(m.metadata.dst_node_id - FIRST_NODE)
    assert found == {t: expected[t] for t in range(min(found), 5)}


def test_a_damaged_file_is_set_aside(tmp_path):
    (tmp_path / FILE).write_text("{")
    lines = []
    members = Members(placed("two terms")[0], Deployment(), tmp_path, lines.append)
    members.begin()
    assert (tmp_path / f"{FILE}.damaged").read_text() == "{"
    assert "is damaged" in lines[0]
    assert json.loads((tmp_path / FILE).read_text())["secret"] == members.secret.hex()


def test_bad_keys_get_a_sentence():
    for keys, message in [
        (dict(cohorts="sead"), "Did you mean 'seed'?"),
        (dict(populations="nowhere.toml"), "populations = nowhere.toml"),
    ]:
        with pytest.raises(MixflError) as error:
            deploy(**keys)
        assert message in str(error.value)


# Who is of which population


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A folder with the keys of seven nodes, four of 'federated' and three of 'other', and the
    keys as Flower has them."""
    from flwr.cli.supernode.register import try_load_public_key

    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 7)
    (folder / "populations.toml").write_text("".join(
        f'node-{i + 1} = "{"federated" if i < 4 else "other"}"\n' if i else
        'node-1 = {population = "federated", number = 0}\n' for i in range(7)
    ))  # fmt: skip
    return folder, [try_load_public_key(folder / f"node-{i + 1}.pub") for i in range(7)]


class Keyed(InProcess):
    def key(self, node):
        return self.keys[node - FIRST_NODE]


def with_keys(keyed, changes, **given):
    """A run whose nodes' configurations are changed, by their places."""
    there, nodes = placed("two populations")
    nodes = [dict(node) | changes.get(i, {}) for i, node in enumerate(nodes)]
    given = dict(cohort_size=4, rounds=1, min_clients=1, round_deadline=5.0) | given
    config = SETTINGS | given
    grid = Keyed(mixfl.flower.client_app(there), nodes, config)
    grid.keys = keyed[1]
    result, _, lines = deploy("two populations", grid=grid, **config)
    return result.metrics[-1], lines


def test_nodes_with_the_populations_of_their_keys(keyed):
    path = str(keyed[0] / "populations.toml")
    row, lines = with_keys(keyed, {}, populations=path)
    assert (row["clients/federated"], row["clients/other"]) == (4, 3)
    assert not any("population" in line for line in lines)


@pytest.mark.parametrize(
    ("place", "changes", "told"),
    [
        (5, dict(population="federated", **{"partition-id": 2}), "it says that it is what its key"),
        (0, {"partition-id": 1}, "it says that it is what its key is not"),
        (2, {"partition-id": 1}, "the number 1 is another node's"),
    ],
    ids=["another population", "another number than its key's", "the number of another"],
)
def test_a_node_cant_choose_what_it_is(keyed, place, changes, told):
    path = str(keyed[0] / "populations.toml")
    row, lines = with_keys(keyed, {place: changes}, populations=path)
    assert row["clients/asked"] == row["clients/accepted"] == 6
    (line,) = [line for line in lines if told in line]
    assert line.startswith(f"node {FIRST_NODE + place} does not take part for now")


def test_a_key_that_is_not_listed(keyed):
    folder, _ = keyed
    path = folder / "six.toml"
    path.write_text("\n".join((folder / "populations.toml").read_text().splitlines()[:6]))
    row, lines = with_keys(keyed, {}, populations=str(path))
    assert row["clients/other"] == 2
    assert any("its key is of no population" in line for line in lines)


def test_without_a_list_it_is_said_that_nodes_choose(keyed):
    row, lines = with_keys(keyed, {5: dict(population="federated", **{"partition-id": 3})})
    assert any("each node chooses its population" in line for line in lines)
    # The first who had the number keeps it.
    assert any("the number 3 is another node's" in line for line in lines)
    assert row["clients/federated"] == 4


def test_a_number_stays_its_keys_own_across_restarts(tmp_path):
    there, _ = placed("two terms")
    first = Members(there, Deployment(), tmp_path, print)
    first.begin()
    first.check("key a", "federated", 7)
    first.save()
    again = Members(there, Deployment(), tmp_path, print)
    again.begin()
    again.check("key a", "federated", 7)
    with pytest.raises(messages.Rejected, match="the number 7 is another node's"):
        again.check("key b", "federated", 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('node-1 = "fedrated"', "Did you mean 'federated'?"),
        ("node-1 = 3", "unknown population"),
        ('node-1 = {population = "federated", number = "x"}', "expected {population"),
        ('node-99 = "federated"', "node-99.pub"),
        ("node-1 = ", "populations = "),
    ],
)
def test_a_mistake_in_the_list_of_populations(keyed, content, message):
    path = keyed[0] / "mistake.toml"
    path.write_text(content)
    with pytest.raises(MixflError) as error:
        deploy(populations=str(path))
    assert message in str(error.value)


# Whatever a client says


ODD = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.text(max_size=5),
    st.binary(max_size=5), st.lists(st.integers(0, 9), max_size=3), st.just("9" * 30),
)  # fmt: skip
SHAPES = st.lists(
    st.one_of(st.integers(-3, 2**70), st.floats(), st.none(), st.text(max_size=2), st.booleans(),
              st.lists(st.integers(), max_size=2)), max_size=3,
)  # fmt: skip
NAMES = st.sampled_from(
    ["w", "b", "weight", "steps", "loss", "population", "number", "t", "", "\0"]
)


def array_of(dtype, shape, form, data):
    array = Array("float32", (1,), messages.FORMAT, b"")
    array.__dict__.update(dtype=dtype, shape=tuple(shape), stype=form, data=data)
    return array


ARRAYS = st.builds(
    array_of, st.one_of(st.sampled_from(["float32", "int32", "object", "V8", ""]), st.integers()),
    SHAPES, st.one_of(st.just(messages.FORMAT), st.integers()), st.binary(max_size=24),
)  # fmt: skip


def record_of(kind, values):
    record = kind()
    record._data.update(values) if hasattr(record, "_data") else dict.update(record, values)
    return record


RECORDS = st.one_of(
    st.builds(record_of, st.just(ArrayRecord), st.dictionaries(NAMES, ARRAYS, max_size=3)),
    st.builds(record_of, st.just(ConfigRecord), st.dictionaries(NAMES, ODD, max_size=4)),
    st.builds(record_of, st.just(MetricRecord), st.dictionaries(NAMES, ODD, max_size=4)),
    st.builds(
        lambda loss, steps, weight: MetricRecord(
            dict(loss=float(loss), steps=float(steps), weight=float(weight))
        ),
        st.floats(), st.floats() | st.integers(0, 4), st.floats() | st.integers(0, 9),
    ),
    st.builds(
        lambda number: ConfigRecord({"population": "federated", "number": number}),
        st.text(max_size=25) | st.just("3"),
    ),
)  # fmt: skip
CONTENTS = st.dictionaries(
    st.sampled_from(["delta", "numbers", "grads", "hello", "rows", "stale", "more"]), RECORDS,
    max_size=5,
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(CONTENTS, st.sampled_from(["float32", "bfloat16", "float64"]))
def test_any_content_is_an_upload_or_rejected(content, dtype):
    shape = jax.ShapeDtypeStruct((3,), jax.numpy.dtype(dtype) if dtype != "float64" else np.float64)
    one = jax.ShapeDtypeStruct((), np.float32)
    like = mixfl.algorithm.Upload({"w": shape}, one, one, {"w": shape}, one)
    try:
        messages.parsed_upload(RecordDict(content), like, mixfl.Settings(local_steps=3), 1e6)
    except messages.Rejected as rejected:
        assert len(str(rejected)) < 300


@settings(max_examples=500, deadline=None)
@given(CONTENTS)
def test_any_content_is_a_hello_or_rejected(content):
    tables = {"federated": {"t": Table(("item",), 5)}, "other": {}}
    try:
        messages.parsed_hello(RecordDict(content), tables)
    except messages.Rejected as rejected:
        assert len(str(rejected)) < 300


def test_shapes_that_are_no_numbers():
    tables = {"federated": {"t": Table(("item",), 5)}}
    for shape in (["a"], [None], [[1]], [2.0], [float("nan")], [2**70], [True]):
        rows = record_of(ArrayRecord, {"t": array_of("int32", shape, messages.FORMAT, b"\0" * 8)})
        who = ConfigRecord({"population": "federated", "number": "1"})
        with pytest.raises(messages.Rejected):
            messages.parsed_hello(RecordDict({"hello": who, "rows": rows}), tables)
