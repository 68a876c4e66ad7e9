"""Who is in a cohort of a deployment: quarantine, the server's secret, populations by keys."""

import json

import numpy as np
import pytest
from deployed import SETTINGS, deploy, placed
from flower_grid import FIRST_NODE, InProcess, hang, late
from flower_superlink import honest

import mixfl
import mixfl.flower
from mixfl.deploy.flower import messages
from mixfl.deploy.flower.config import Deployment
from mixfl.deploy.flower.keys import make_keys
from mixfl.deploy.flower.members import FILE, Members, fingerprint
from mixfl.deploy.flower.quarantine import LONGEST, Quarantine
from mixfl.engine.cohort import cohort
from mixfl.errors import MixflError

# Quarantine


def test_the_pause_doubles_and_good_replies_shorten_it():
    q = Quarantine()
    pauses = [q.failed("a", 10, "late") for _ in range(10)]
    assert pauses == [0, 0, 1, 2, 4, 8, 16, 32, 64, 64]
    assert q.remaining("a", 10) == 1 + LONGEST
    assert q.remaining("a", 11 + LONGEST) == 0
    q.good("a")
    assert q.remaining("a", 11) == 0
    assert q.failed("a", 11, "shape") == 4
    assert q.failed("b", 0, "oversized") == LONGEST
    assert [q.failed("c", 0, reason) for reason in ("gone", "unsent", "stale")] == [0, 0, 0]
    again = Quarantine(json.loads(json.dumps(q.kept())))
    assert (again.failures, again.until) == (q.failures, q.until)


def test_to_be_stale_is_excused_once():
    """Data may change, and the next reply is a good one."""
    q = Quarantine()
    assert [q.failed("a", t, "stale") for t in range(5)] == [0, 0, 0, 1, 2]
    for _ in range(10):
        assert q.failed("b", 0, "stale") == 0
        q.good("b")
    assert q.failures.keys() == {"a"}


def test_no_quarantine_outlasts_a_return_to_an_earlier_round():
    q = Quarantine([("a", 5, 1000)])
    assert q.remaining("a", 10) == 1 + LONGEST
    assert q.remaining("a", 11 + LONGEST) == 0


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
    assert late_in == [0, 1, 2, 4, 7, 12, 21]
    assert [row["clients/quarantined"] for row in result.metrics][:8] == [0, 0, 0, 1, 0, 1, 1, 0]
    assert result.metrics[-1]["clients/accepted"] == 3 * 32
    assert 70 <= grid.clock.now < 72
    assert f"node {FIRST_NODE + 2} is in quarantine for 1 round: it failed repeatedly" in "\n".join(
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
    assert "was damaged" in lines[0]
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
        (
            5,
            dict(population="federated", **{"partition-id": 2}),
            "it claims a population or number",
        ),
        (0, {"partition-id": 1}, "it claims a population or number that is not its key's"),
        (2, {"partition-id": 1}, "number 1 belongs to another node"),
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
    assert any("its key is not assigned to a population" in line for line in lines)


def test_without_a_list_it_is_said_that_nodes_choose(keyed):
    row, lines = with_keys(keyed, {5: dict(population="federated", **{"partition-id": 3})})
    assert any("each node chooses its own population" in line for line in lines)
    # The first who had the number keeps it.
    assert any("number 3 belongs to another node" in line for line in lines)
    assert row["clients/federated"] == 4


BOTH = {"key a", "key b"}


def members(folder, notes=None, **given):
    found = Members(placed("two populations")[0], Deployment(**given), folder,
                    (notes if notes is not None else []).append)  # fmt: skip
    found.begin()
    return found


def test_a_number_stays_its_keys_own_across_restarts(tmp_path):
    """While its owner is connected."""
    first = members(tmp_path)
    first.check("key a", "federated", 7, BOTH)
    first.save()
    again = members(tmp_path)
    with pytest.raises(messages.Rejected, match="number 7 belongs to another node"):
        again.check("key b", "federated", 7, BOTH)
    again.check("key a", "federated", 7, BOTH)


def test_a_number_is_free_while_its_owner_is_not_connected(tmp_path):
    """A SuperNode without a key of its own has a new one at each start."""
    notes: list[str] = []
    there = members(tmp_path, notes)
    there.check("key a", "federated", 7, {"key a"})
    there.check("key b", "federated", 7, {"key b"})
    assert "number 7 of 'federated' now belongs to another key" in notes[-1]
    with pytest.raises(messages.Rejected, match="number 7 belongs to another node"):
        there.check("key a", "federated", 7, BOTH)


def test_a_number_that_the_list_fixes_is_nobody_elses(keyed, tmp_path):
    path = str(keyed[0] / "populations.toml")
    there = members(tmp_path, populations=path)
    owner, other = [fingerprint(0, key) for key in keyed[1][:2]]
    with pytest.raises(messages.Rejected, match="number 0 belongs to another node"):
        there.check(other, "federated", 0, {other})  # though its owner never was there
    there.check(owner, "federated", 0, {owner, other})
    with pytest.raises(messages.Rejected, match="number 0 belongs to another node"):
        there.check(other, "federated", 0, {other})


def test_a_key_has_one_number(tmp_path):
    """It may say another; it can't collect them."""
    there = members(tmp_path)
    for number in range(50):
        there.check("key a", "federated", number, BOTH)
    there.check("key b", "federated", 7, BOTH)
    there.save()
    kept = json.loads((tmp_path / FILE).read_text())["numbers"]
    assert kept == [["federated", 7, "key b"], ["federated", 49, "key a"]]
    with pytest.raises(messages.Rejected, match="number 49 belongs to another node"):
        there.check("key b", "federated", 49, BOTH)
    assert there.numbers["federated", 7] == "key b"


class Rekeyed(InProcess):
    """All nodes are started anew before the second round, each with another key."""

    def get_nodes(self):
        if ("push", "0") in self.events:
            self.key = lambda node: b"another key of node %d" % node
        return super().get_nodes()


def test_nodes_that_come_back_with_new_keys_take_part():
    there, nodes = placed("two terms")
    config = SETTINGS | dict(cohort_size=4, rounds=3, round_deadline=5.0, algorithm="fedavg")
    grid = Rekeyed(mixfl.flower.client_app(there), nodes, config)
    grid.gone = lambda now: set(range(4)) if away(grid) else set()
    result, _, lines = deploy(grid=grid, **config)
    assert result.metrics[-1]["clients/federated"] == 4
    assert not any("does not take part" in line for line in lines)


def away(grid):
    """Once, between two rounds: so that the server sees them go."""
    grid.looks = getattr(grid, "looks", 0) + (("push", "0") in grid.events)
    return grid.looks == 1


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
