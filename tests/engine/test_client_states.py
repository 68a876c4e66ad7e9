"""What clients keep between rounds: the files, and runs that stop, go back and go on."""

import os
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_problem
from problems import flat, problem, settings
from run_folders import adaptive, assert_same, train, train_until

import mixfl
from mixfl.algorithms import ALGORITHMS, CLIENT_KEYS, algorithm, fed_avg
from mixfl.engine import Simulator
from mixfl.engine.client_states import ClientStates

FIRST = {"a": np.full((2,), 7.0, np.float32), "n": np.int32(3)}
CLIENTS = 10**9  # of a population: a hole in a file costs nothing


def value(round, client):
    return {"a": np.float32([round, client % 1000]), "n": np.int32(round * 10)}


class Model:
    """The same in dicts."""

    def __init__(self):
        self.now, self.at = {}, {0: {}}

    def expect(self, states):
        for client in {*self.now, *(c for kept in self.at.values() for c in kept), 5}:
            found = states.read(0, [client, -1])
            expected = value(*self.now[client]) if client in self.now else FIRST
            np.testing.assert_array_equal(found["a"], [expected["a"], FIRST["a"]])
            np.testing.assert_array_equal(found["n"], [expected["n"], FIRST["n"]])


def write(states, model, round, clients):
    values = [value(round, c) for c in clients]
    stacked = {k: np.stack([v[k] for v in values]) for k in FIRST}
    states.write(round, 0, np.array(clients), stacked, np.array([c % 7 != 0 for c in clients]))
    model.now |= {c: (round, c) for c in clients if c % 7 and c >= 0}


@pytest.mark.parametrize("seed", range(8))
def test_the_states_go_back_to_every_kept_checkpoint(seed, tmp_path):
    """Writes, checkpoints, kills and returns in any order, against dicts."""
    rng, model = random.Random(seed), Model()
    some = [rng.randrange(CLIENTS) for _ in range(30)]
    states, round, kept = ClientStates(tmp_path / "c", [FIRST]), 0, []
    states.restore(0)
    killed = False  # just before the files know of a checkpoint
    for _ in range(60):
        act = "kill" if killed else rng.choice(["write", "write", "write", "save", "kill"])
        killed = False
        if act == "write":
            round += 1
            write(states, model, round, [*rng.sample(some, 5), -1])
        elif act == "save":
            model.at[round] = dict(model.now)
            kept = sorted({*kept[-rng.choice([1, 2, 3]) :], round})
            killed = rng.random() < 0.2
            if not killed:
                states.saved(round, kept)
        else:
            states.close()
            for journal in (tmp_path / "c").glob(f"old-0-{states.base}"):
                with open(journal, "ab") as file:  # killed while it wrote
                    file.write(os.urandom(rng.randrange(20)))
            round = rng.choice([*kept, kept[-1]]) if kept else 0
            kept = [r for r in kept if r <= round]
            states = ClientStates(tmp_path / "c", [FIRST])
            states.restore(round)
            model.now = dict(model.at[round])
        model.expect(states)
    size = sum(f.stat().st_blocks * 512 for f in (tmp_path / "c").iterdir())
    assert size < 4 << 20  # for up to 24 GB of rows


def test_missing_files_are_noticed(tmp_path):
    states, model = ClientStates(tmp_path / "c", [FIRST]), Model()
    write(states, model, 1, [1, 2])
    states.saved(1, [1])
    write(states, model, 2, [2, 3])
    with pytest.raises(mixfl.MixflError, match="is missing"):
        ClientStates(tmp_path / "other", [FIRST]).restore(1)
    (tmp_path / "c" / "old-0-1").unlink()
    with pytest.raises(mixfl.MixflError, match="can't go back to round 1"):
        ClientStates(tmp_path / "c", [FIRST]).restore(1)


# In rounds ----------------------------------------------------------------------------------------


@algorithm("turns", CLIENT_KEYS)
def turns(problem, s):
    """FedAvg whose clients count their rounds. The server learns the mean, and of how many."""
    base = fed_avg.build(problem, s)

    def client(term, broadcast, feed):
        upload = base.client(term, broadcast, feed)
        count = feed.state["turns"] + 1
        return upload._replace(extra=count, state={"turns": count})

    def update(state, broadcasts, sums, central):
        after, info = base.update(state, broadcasts, sums, central)
        return after, {**info, "turns": sums[0].extra}

    def client_state(x):
        return {"turns": jnp.zeros(())}

    return base._replace(client=client, update=update, client_state=client_state)


def cohorts(simulator, t):
    return [
        int(i)
        for piece in simulator.feeder.pieces(simulator.at(t), t)
        for who in piece.who[0]
        for i in who
        if i >= 0
    ]


@pytest.mark.parametrize("way", [{}, dict(cohort_chunk=2), dict(devices=2), dict(clip=0.01)])
def test_a_client_sees_what_it_kept_last(way):
    p, s = problem(), settings(rounds=6, **way)
    simulator = Simulator(p, turns.build(p, s), s)
    seen: dict[int, int] = {}
    for result in simulator.rounds(simulator.init(), 0, 6):
        chosen = cohorts(simulator, result.round - 1)
        assert len(set(chosen)) == 5
        for i in chosen:
            seen[i] = seen.get(i, 0) + 1
        assert float(result.info["turns"]) == sum(seen[i] for i in chosen)
    assert max(seen.values()) > 2
    # A second start begins anew.
    (first,) = simulator.rounds(simulator.init(), 0, 1)
    assert float(first.info["turns"]) == 5


def test_nothing_is_made_for_other_algorithms(tmp_path):
    train("fedavg", tmp_path / "run", rounds=2)
    assert not (tmp_path / "run" / "clients").exists()


def test_what_does_not_go_with_it_is_refused():
    p, s = problem(), settings(aggregation="median")
    with pytest.raises(mixfl.MixflError, match="does not go with client state"):
        Simulator(p, ALGORITHMS["scaffold"].build(p, s), s)
    simulator = Simulator(p, ALGORITHMS["scaffold"].build(p, settings()), settings())
    with pytest.raises(mixfl.MixflError, match="need the clients' states"):
        next(simulator.rounds(simulator.init(), 3, 4))


def test_it_is_not_deployed():
    from deployed import deploy

    with pytest.raises(mixfl.MixflError, match="scaffold can't be deployed"):
        deploy(algorithm="scaffold")


# Going on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 4])
def test_a_stopped_run_ends_with_the_same_bits(at, tmp_path):
    whole = train("scaffold", tmp_path / "whole")
    train_until("scaffold", tmp_path / "run", at)
    again = train("scaffold", tmp_path / "run", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "run")
    np.testing.assert_array_equal(flat(again.params), flat(whole.params))
    alone = mixfl.train(tiny_problem.problem, "scaffold", rounds=7, **adaptive("scaffold"))
    np.testing.assert_array_equal(flat(alone.params), flat(whole.params))


def test_it_goes_back_to_older_checkpoints(tmp_path):
    out = tmp_path / "run"
    train("scaffold", tmp_path / "whole")
    train_until("scaffold", out, 6)
    rounds = sorted(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())
    assert len(rounds) > 1
    shutil.rmtree(out / "checkpoints" / str(rounds[-1]))
    train("scaffold", out, resume=True)
    assert_same(tmp_path / "whole", out)


def test_it_starts_over(tmp_path):
    train("scaffold", tmp_path / "whole")
    train_until("scaffold", tmp_path / "run", 5)
    train("scaffold", tmp_path / "run", restart=True)
    assert_same(tmp_path / "whole", tmp_path / "run")
    assert (tmp_path / "run" / "aside-1" / "clients" / "rows-0").exists()
