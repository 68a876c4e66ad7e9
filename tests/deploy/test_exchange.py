"""A deployment's server against what a SuperLink's end, or a registered client, can do to it.

There is a SuperLink in one process (flower_superlink.py): Flower's own handlers and database.
"""

import http.server
import threading
import tracemalloc

import httpx
import numpy as np
import pytest
from deployed import SETTINGS, Notes, assert_same, deploy, placed
from flower_grid import InProcess, hang
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
from flwr.app import Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_object_id, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from hypothesis import given, settings
from hypothesis import strategies as st

import mixfl
import mixfl.flower
from mixfl.deploy.flower import link as link_module
from mixfl.deploy.flower import messages, server
from mixfl.deploy.flower.engine import LONGEST_PAUSE
from mixfl.deploy.flower.link import Client, TooLong
from mixfl.deploy.flower.reply_limits import Reply, bounds
from mixfl.errors import MixflError
from mixfl.runs.folder import load
from mixfl.runs.training import run


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
    engine = server.deployed(there, grid, SETTINGS, Notes(), grid.clock).engine()
    engine.failures = 5000
    engine._failed(3, ["0 of 3 clients"])
    assert grid.clock.now == LONGEST_PAUSE


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
    assert any("it did not identify itself in time" in line for line in lines)
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
        assert any("asking it again in 3600 s" in line for line in lines)


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
    reply = Message(RecordDict({"weighted": messages.arrays(arrays)}), 1, "train")
    _, tree, contents = honest(reply)
    found = put_together(tree, contents, bounds((n, a.nbytes) for n, a in arrays.items()))
    like = messages.parsed_tree(found.content["weighted"], arrays)
    np.testing.assert_array_equal(like["a/ü"], arrays["a/ü"])
    assert like["zeros"].nbytes == size


def test_a_tree_that_is_too_deep():
    tree = get_object_tree(RecordDict())
    for _ in range(50):
        tree = type(tree)(object_id=tree.object_id, children=[tree])
    with pytest.raises(messages.Rejected):
        Reply(tree.object_id, tree, bounds([("w", 12)]))


SMALL = Message(RecordDict({"weighted": messages.arrays({"w": np.ones(3, "f4")})}), 1, "train")


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
        ((layout, own),) = reply.content["weighted"].items()
        nines = np.full(len(own.data) // 4, 9, np.float32)
        reply.content["weighted"][layout] = messages.flat(nines.tobytes())
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


@pytest.mark.parametrize(("length", "reason"), [(1000, "failed"), (10 << 20, "oversized")])
def test_a_clients_error_with_a_long_text(length, reason):
    def forge(reply):
        error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "x" * length)
        return honest(make_message(metadata=reply.metadata, error=error))

    result, link, lines = served(None, {("1", 2): forge}, rounds=2)
    row = result.metrics[-1]
    assert row[f"clients/rejected/{reason}"] == row["clients/rejected"] == 1
    assert not any("xxx" in line for line in lines)
    assert nothing_left(link)


@pytest.mark.parametrize("code", [3, 4, 5])
def test_only_the_superlink_can_say_that_a_node_is_gone_or_late(code):
    """A node that says it of itself, to be excused, has failed."""

    def forge(reply):
        return honest(make_message(metadata=reply.metadata, error=Error(code, "not my fault")))

    result, _, lines = served(None, {(str(t), 2): forge for t in range(3)})
    row = result.metrics[-1]
    assert row["clients/rejected/failed"] == row["clients/rejected"] >= 2
    assert any("is in quarantine for 1 round" in line for line in lines)


def test_messages_that_a_node_sends_to_the_server_unasked_are_dropped():
    """Flower hands them out with the replies."""
    there, nodes = placed("two terms")
    config = SETTINGS | dict(cohorts="seed", rounds=2, cohort_size=4, algorithm="fedavg")

    def forge(reply):
        unasked = Message(RecordDict(), SUPERLINK_NODE_ID, "train")
        link.send(link.ids[2], *honest(unasked))
        return honest(reply)

    link = SuperLink(mixfl.flower.client_app(there), nodes, config, forged={("0", 2): forge})
    plan = server.deployed(there, link.link(), config, Notes(), link.clock)
    row = run(plan, None, True, Notes()).metrics[-1]
    assert (row["clients/accepted"], row["clients/rejected"]) == (8, 0)
    assert nothing_left(link)


def with_junk(wanted, idle=0):
    """Two rounds. A node sends an announcement of 20,000 objects that nobody asked for, just
    before the pulls that are wanted, by the messages that they ask for and their number. The nodes
    do no work for the first pulls."""
    there, nodes = placed("two terms")
    config = SETTINGS | dict(cohorts="seed", rounds=2, cohort_size=4, algorithm="fedavg")
    link = SuperLink(mixfl.flower.client_app(there), nodes, config)
    pulls, work = [], link.nodes_work
    link.nodes_work = lambda: None if len(pulls) < idle and begun else work()
    begun = []

    def broken(name, request, after):
        if name == "push_messages" and request.messages_list[0].metadata.group_id == "0":
            begun.append(True)
        if name != "pull_messages" or after or not begun:
            return
        pulls.append(request.message_ids)
        if wanted(request.message_ids, len(pulls)):
            unasked = Message(RecordDict(), SUPERLINK_NODE_ID, "train")
            _, tree, contents = wide(20_000)(unasked)
            tree.object_id = get_object_id(b"junk %d" % len(pulls))
            link.send(link.ids[2], unasked, tree, contents)

    link.broken = broken
    plan = server.deployed(there, link.link(), config, Notes(), link.clock)
    engine = plan.engine()
    infos = [found.info for found in engine.rounds(engine.init(), 0, 2)]
    return infos, engine, link


@pytest.mark.parametrize("shared", [True, False])
def test_what_one_node_sends_unasked_is_not_held_against_another(shared):
    """Flower adds it to the next answer, whosever reply that has."""
    infos, engine, link = with_junk(lambda ids, n: bool(ids) is shared)
    assert [info["clients/accepted"] for info in infos] == [4, 4]
    assert engine.members.quarantine.kept() == []
    assert nothing_left(link)


def test_a_reply_that_comes_with_too_much_that_nobody_asked_for_is_lost(monkeypatch):
    """The SuperLink has forgotten it: the node is left out of the round, and not blamed."""
    monkeypatch.setattr(link_module, "OTHER_ANSWER", 1 << 20)
    infos, engine, _ = with_junk(lambda ids, n: n == 2)
    assert infos[0]["clients/rejected/lost"] == infos[0]["clients/rejected"] == 1
    assert (infos[0]["clients/accepted"], infos[1]["clients/accepted"]) == (3, 4)
    assert engine.members.quarantine.kept() == []


def test_a_reply_that_was_not_there_yet_is_not_lost(monkeypatch):
    """What could not be read had no reply in it."""
    monkeypatch.setattr(link_module, "OTHER_ANSWER", 1 << 20)
    infos, _, _ = with_junk(lambda ids, n: bool(ids) and n < 8, idle=8)
    assert [info["clients/accepted"] for info in infos] == [4, 4]


def test_unasked_messages_are_deleted_after_the_replies_and_in_bounded_number(monkeypatch):
    """Each may take as long as a call may."""
    monkeypatch.setattr(link_module, "MOST_DELETED", 3)
    there, nodes = placed("two terms")
    config = SETTINGS | dict(cohorts="seed", rounds=1, cohort_size=4, algorithm="fedavg")
    calls = []

    def forge(reply):
        for n in range(5):
            unasked = Message(RecordDict(), SUPERLINK_NODE_ID, "train", group_id=str(n))
            link.send(link.ids[2], *honest(unasked))
            junk.append(unasked.metadata.message_id)
        return honest(reply)

    def broken(name, request, after):
        if name == "confirm_message_received" and after:
            calls.append(request.message_object_id)

    junk = []
    link = SuperLink(mixfl.flower.client_app(there), nodes, config, forged={("0", 2): forge})
    link.broken = broken
    plan = server.deployed(there, link.link(), config, Notes(), link.clock)
    run(plan, None, True, Notes())
    assert sum(call in junk for call in calls) == 3
    assert all(call in junk for call in calls[-3:])


def test_no_pause_is_negative():
    """The deadline passes between two looks at the clock."""
    there, nodes = placed("two terms")
    grid = InProcess(mixfl.flower.client_app(there), nodes, SETTINGS, faults={("0", 2): hang})
    slept, clock = [], grid.clock

    class Passing(type(clock)):
        def monotonic(self):
            self.now += 0.3
            return self.now

        def sleep(self, seconds):
            slept.append(seconds)
            super().sleep(seconds)

    grid.clock = Passing()
    given = SETTINGS | dict(rounds=1, cohort_size=4, algorithm="fedavg", round_deadline=20.5)
    run(server.deployed(there, grid, given, Notes(), grid.clock), None, True, Notes())
    assert min(slept) >= 0
    assert grid.clock.now > 20
