"""What a round releases: bounded for each client, noised once everywhere, and nothing else."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import mixfl
from mixfl.aggregation import private
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.privacy import rules
from mixfl.privacy.rules import applied

NUMBERS = pytest.mark.numbers
EVERY = [a for a in rules.ALGORITHMS if a in ALGORITHMS]
SIZES = (9,) * 6  # three batches of three each


def settings(algorithm, **changes):
    defaults = dict(
        rounds=4, cohort_size=6, dp_noise_multiplier=0.0, dp_clip=1e20, dp_delta=1e-6, dp_seed=1,
        devices=1,
    )  # fmt: skip
    return applied(algorithm, problems.settings(**(defaults | changes)))


def terms(algorithm):
    people = problems.population(sizes=SIZES)
    other = problems.penalty() if algorithm == "baseline" else problems.datacenter()
    return mixfl.Problem(problems.init, [people, other], name="test")


def simulator_of(p, algorithm, s):
    return Simulator(p, ALGORITHMS[algorithm].build(p, s), s)


def last_state(p, algorithm, s):
    simulator = simulator_of(p, algorithm, s)
    *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
    return last


def without_privacy(s):
    return dataclasses.replace(
        s, dp_noise_multiplier=None, dp_delta=None, dp_seed=None, weighting="uniform", clip="off"
    )


CASES = [
    *((a, "sgd") for a in EVERY),
    *((a, "adam") for a in ("1wgt", "2wgt")),
    *(pytest.param(a, o, marks=NUMBERS) for a in EVERY for o in ("momentum", "adam")),
]


@pytest.mark.parametrize(("algorithm", "client_opt"), CASES)
def test_without_noise_and_limit_it_is_the_algorithm(algorithm, client_opt, monkeypatch):
    monkeypatch.setattr(private.Private, "cohort_seed", lambda self, state: 0)  # in the same order
    opt = problems.OPTIMIZERS.get(client_opt, client_opt)
    s, p = settings(algorithm, client_opt=opt), terms(algorithm)
    found = last_state(p, algorithm, s).state.algorithm
    expected = last_state(p, algorithm, without_privacy(s)).state.algorithm
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


class Rounds:
    """Single rounds of a simulator, on what it reads with changes to some clients."""

    def __init__(self, algorithm, p=None, **changes):
        self.s = settings(algorithm, **changes)
        self.p = terms(algorithm) if p is None else p
        self.simulator = simulator_of(self.p, algorithm, self.s)
        self.algorithm = self.simulator.at(self.s.rounds - 1)

    def __call__(self, change=lambda data, drawn: None, state=None):
        t = self.s.rounds - 1
        state = self.simulator.init() if state is None else state
        (piece,) = self.simulator.feeder.pieces(self.algorithm, t)
        feeds = [[f.batches.data for f in feeds] for feeds in piece.clients]
        drawn = [d.data for d in piece.drawn if d is not None and d.data is not None]
        change(feeds[0][0], drawn)
        program = self.simulator.program(self.algorithm, t)
        given = self.simulator.given(program, t)
        copy = jax.tree.map(jnp.array, state)
        after, info, _ = program.run(program.whole, copy, piece.drawn, piece.clients, given=given)
        return after, info


def flat(tree):
    return np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)]).astype(float)


def moved(rounds, who, loud, aug):
    """How far the release moves if a client adds nothing, in clip norms: by x, and by gt_f."""

    def with_all(data, drawn):
        data["x"][who] *= loud
        for d in drawn:
            d["x"] *= aug

    def without(data, drawn):
        with_all(data, drawn)
        data["x"][who] = np.nan

    s = rounds.s
    (a, info), (b, other) = rounds(with_all), rounds(without)
    assert {k: v for k, v in info.items() if "train" not in k} == {
        k: v for k, v in other.items() if "train" not in k
    }
    merge = 0.5 if hasattr(a.algorithm, "gt") else 1.0
    by_x = np.linalg.norm(flat(a.x) - flat(b.x)) * s.cohort_size / merge
    if not hasattr(a.algorithm, "gt"):
        return (by_x / s.dp_clip,)
    by_gt = np.linalg.norm(flat(a.algorithm.gt[0]) - flat(b.algorithm.gt[0]))
    return by_x / s.dp_clip, by_gt * s.client_lr * s.cohort_size * s.local_steps / s.dp_clip


def check_sensitivity(algorithm, clip=0.05, **changes):
    rounds = Rounds(algorithm, dp_clip=clip, **changes)
    most = 0.0
    for who in (0, 4):
        for loud, aug in ((1.0, 1.0), (1e3, 1.0), (1.0, 1e3), (1e18, 1.0)):
            found = moved(rounds, who, loud, aug)
            # The model is in float32: 1e-6 of what the augmenting gradient moves.
            assert max(found) <= 1 + 1e-4 * aug, (who, loud, aug, found)
            most = max(most, *found)
    assert most > 0.9  # clients do reach the bound


SOME = ["fedavg", "1wgt", "2wgt"]


@pytest.mark.parametrize(
    "algorithm", [*SOME, *(pytest.param(a, marks=NUMBERS) for a in EVERY if a not in SOME)]
)
def test_no_client_moves_the_release_further_than_the_clip_norm(algorithm):
    check_sensitivity(algorithm)


@pytest.mark.numbers
@pytest.mark.parametrize("client_opt", ["momentum", "adam"])
@pytest.mark.parametrize("algorithm", EVERY)
def test_no_client_moves_it_further_with_any_optimizer(algorithm, client_opt):
    check_sensitivity(algorithm, client_opt=problems.OPTIMIZERS[client_opt])


def check_augmentation():
    """What the server sent is not clipped: clients without a gradient of their own."""
    rounds = Rounds("1wgt", dp_clip=1e-6)

    def silent(data, drawn):
        data["x"][:] = 0
        data["y"][:] = 0

    after, _ = rounds(silent)
    s, state = rounds.s, rounds.simulator.init()
    g = jax.grad(
        lambda x: 0.4 * jnp.mean(problems.logistic(x, rounds.p.central[0].examples.all()))
    )(state.x)
    moved_by = flat(after.x) - flat(state.x)
    direction = flat(g) / np.linalg.norm(flat(g))
    assert moved_by @ direction < -0.5 * s.client_lr * s.local_steps * np.linalg.norm(flat(g))


def test_the_central_gradient_is_never_clipped():
    check_augmentation()


def check_denominators():
    """A client whose own part is zero may be there or not, and take few steps or many."""
    rounds = Rounds("2wgt", dp_clip=0.05)

    def zero(data, drawn):
        data["x"][2] = 0
        data["y"][2] = 0

    def missing(data, drawn):
        data["x"][2] = np.nan

    (a, _), (b, _) = rounds(zero), rounds(missing)
    for one, other in zip(*map(jax.tree.leaves, (a.algorithm, b.algorithm)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_denominators_are_constants():
    check_denominators()


# Noise

TABLE = (3000, 8)


def looked_up(params, batch):
    return 0.0 * jnp.sum(params["table"][batch["row"]], axis=-1) + batch["y"]


def table_problem():
    rng = np.random.default_rng(0)
    data = {"row": rng.integers(0, 50, 48).astype(np.int32), "y": np.zeros(48, np.float32)}
    people = mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(6), 8))
    init = lambda key: {"table": jnp.zeros(TABLE)}  # noqa: E731
    return mixfl.Problem(init, [mixfl.Federated(looked_up, people)], name="table")


def check_noise(**changes):
    s = settings("fedavg", **({"dp_noise_multiplier": 1.5, "dp_clip": 0.2, "rounds": 1} | changes))
    after = np.asarray(last_state(table_problem(), "fedavg", s).state.x["table"], float)
    deviation = 1.5 * 0.2 / s.cohort_size
    for part in (after[:50], after[50:]):  # rows that clients hold, and rows that nobody holds
        error = 4 / np.sqrt(2 * part.size)
        assert np.std(part) == pytest.approx(deviation, rel=max(0.01, error))
        assert abs(np.mean(part)) < 5 * deviation / np.sqrt(part.size)
    return after


@pytest.mark.parametrize("changes", [{}, {"tables": "dense"}, {"cohort_chunk": 2}, {"devices": 2}])
def test_noise_is_on_every_row_once(changes):
    after = check_noise(**changes)
    if changes in ({"tables": "dense"}, {"devices": 2}):  # the same in all forms and places
        np.testing.assert_allclose(after, check_noise(), atol=1e-6)


def check_secret():
    p, s = table_problem(), settings("fedavg", dp_noise_multiplier=1.0, dp_clip=0.2, rounds=1)
    s = dataclasses.replace(s, dp_seed=None)
    a, b = (np.asarray(last_state(p, "fedavg", s).state.x["table"]) for _ in range(2))
    assert not np.any(a == b)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.05


def test_noise_does_not_follow_from_the_seed():
    check_secret()


def test_rounds_have_independent_noise():
    p = table_problem()
    s = settings("fedavg", dp_noise_multiplier=1.0, dp_clip=0.2, rounds=2)
    simulator = simulator_of(p, "fedavg", s)
    models = [np.asarray(r.state.x["table"]) for r in simulator.rounds(simulator.init(), 0, 2)]
    first, second = models[0].ravel(), (models[1] - models[0]).ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_banded_noise_cancels():
    """In the sum of all rounds; as the matrix says."""
    from mixfl.privacy.banded import coefficients

    s = settings(
        "fedavg", dp_noise_multiplier=1.0, dp_clip=0.2, rounds=12, cohort_size=1,
        dp_mechanism="banded", dp_min_sep=4,
    )  # fmt: skip
    after = np.asarray(last_state(table_problem(), "fedavg", s).state.x["table"], float)
    column = np.concatenate([coefficients(4), np.zeros(8)])
    matrix = np.array([[column[i - j] if i >= j else 0 for j in range(12)] for i in range(12)])
    expected = 0.2 * np.linalg.norm(np.ones(12) @ np.linalg.inv(matrix))
    assert np.std(after) == pytest.approx(expected, rel=0.02)


def test_a_client_waits_its_turn():
    s = settings("fedavg", cohort_size=1, dp_min_sep=5, rounds=20)
    simulator = simulator_of(table_problem(), "fedavg", s)
    last: dict[int, int] = {}
    for t in range(20):
        (who,) = simulator.feeder.joining[0].at(t).clients
        assert t - last.get(int(who), -5) >= 5
        last[int(who)] = t


# Adaptive clipping


def test_an_adaptive_norm_follows_its_quantile():
    """Without noise: C grows by the paper's rule until half of the clients are below it."""
    rounds = Rounds("fedavg", dp_clip="adaptive", dp_clip_start=1e-3)
    state, clips = rounds.simulator.init(), []
    for _ in range(60):
        state, _ = rounds(state=state)
        clips.append(float(state.aggregation[0][0].clip))
    assert clips[0] == pytest.approx(1e-3 * np.exp(0.2 * 0.5), rel=1e-5)  # all are above it
    assert clips[-1] == pytest.approx(clips[-3], rel=0.25)
    assert clips[-1] > 5e-3


def test_bits_are_paid_with_more_noise_on_the_sum():
    s = settings("fedavg", dp_clip="adaptive", dp_noise_multiplier=2.0, cohort_size=6)
    state = private.Private(s).init({"w": jnp.zeros(3)}, 0)
    z, bits = float(state.noise), float(state.bits)
    assert bits == 2.0  # max(S / 20, z)
    assert z**-2 + (2 * bits) ** -2 == pytest.approx(2.0**-2)


def test_nothing_else_is_told():
    s = settings("2wgt", dp_noise_multiplier=1.0, dp_clip=0.1)
    info = last_state(terms("2wgt"), "2wgt", s).info
    assert set(info) == {"train/central/loss", "clients/rejected", "finite"}
    assert int(info["clients/rejected"]) == 0


def test_a_round_without_clients_looks_like_any_other():
    s = settings(
        "fedavg", dp_noise_multiplier=1.0, dp_clip=0.1, cohort_size=1, rounds=8,
        sampling="poisson", dp_sampling="poisson",
    )  # fmt: skip
    simulator = simulator_of(terms("fedavg"), "fedavg", s)
    models, told = [], set()
    for result in simulator.rounds(simulator.init(), 0, s.rounds):
        models.append(flat(result.state.x))
        told.add(frozenset(result.info))
    sizes = [len(simulator.feeder.joining[0].at(t).clients) for t in range(s.rounds)]
    assert 0 in sizes
    assert all(np.any(a != b) for a, b in itertools.pairwise(models))
    assert told == {frozenset({"clients/rejected", "finite"})}


# Each mutant is caught by one of the checks above


def unclipped(monkeypatch):
    encode = private.Private.encode
    monkeypatch.setattr(
        private.Private, "encode", lambda self, told, s, key: (s, encode(self, told, s, key)[1])
    )


def changes_clipped(monkeypatch):
    from mixfl.algorithms import steps

    monkeypatch.setattr(steps, "own_part", lambda s, broadcast, delta, k: delta)
    monkeypatch.setattr(
        steps, "carried", lambda s, broadcast, by_steps: jax.tree.map(jnp.zeros_like, broadcast.aug)
    )


def noise_on_touched_rows(monkeypatch):
    """As if it were added to what clients sent of a table, before it is spread out."""
    release = private.Private.release

    def touched(self, state, sums):
        noised, after = release(self, state, sums)
        keep = lambda n: n.at[50:].set(0) if n.shape == TABLE else n  # noqa: E731
        return noised._replace(weighted=jax.tree.map(keep, noised.weighted)), after

    monkeypatch.setattr(private.Private, "release", touched)


def true_steps(monkeypatch):
    release = private.Private.release

    def told(self, state, sums):
        noised, after = release(self, state, sums)
        return noised._replace(steps=sums.steps), after

    monkeypatch.setattr(private.Private, "release", told)


def noise_from_seed(monkeypatch):
    keys = private.secret_keys
    monkeypatch.setattr(private, "secret_keys", lambda seed, population: keys(0, population))


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (unclipped, lambda: check_sensitivity("fedavg")),
        (changes_clipped, check_augmentation),
        (noise_on_touched_rows, check_noise),
        (true_steps, check_denominators),
        (noise_from_seed, check_secret),
    ],
)
def test_mutants_are_caught(mutant, check, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()


# Forms


@pytest.mark.parametrize("algorithm", ["2wgt", pytest.param("1wgt", marks=NUMBERS)])
def test_low_rank_layers_are_clipped_exactly(algorithm):
    import layer_problem

    s = settings(algorithm, dp_clip=0.03, cohort_size=6, rounds=2)
    simulator, _ = layer_problem.agree(layer_problem.problem(), algorithm, s)
    assert simulator.forms.low_rank


@pytest.mark.parametrize("algorithm", ["2wgt", pytest.param("1wgt", marks=NUMBERS)])
def test_row_sparse_tables_are_clipped_alike(algorithm):
    import table_problem as tables

    p = mixfl.Problem(tables.init, tables.PROBLEMS["central data"]())
    s = settings(algorithm, dp_clip=0.03, cohort_size=3, rounds=2, dp_noise_multiplier=0.5)
    found = [
        flat(last_state(p, algorithm, dataclasses.replace(s, tables=form)).state.algorithm)
        for form in ("rows", "dense")
    ]
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)
