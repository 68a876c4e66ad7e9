"""A user's own functions in a run: what they are told, and how they end it."""

import dataclasses
import json

import pytest
from run_folders import (
    assert_equal_trees,
    assert_same,
    timeless,
    train,
)

import mixfl
from mixfl.errors import MixflError
from mixfl.runs.loop import Loop
from mixfl.runs.sinks.folder import InFolder


class Watch:
    """Remembers everything."""

    def __init__(self):
        self.rounds, self.rows, self.models, self.events = [], [], {}, []

    def on_round(self, event):
        self.rounds.append(event.round)

    def on_evaluation(self, event):
        self.rows.append(event.metrics)
        self.models[event.round] = event.params
        self.events.append(event)


def status(out):
    return json.loads((out / "status.json").read_text())


def stop_at(round, reason="enough"):
    def callback(event):
        if event.round == round:
            event.stop(reason)

    return callback


class AtRounds:
    def __init__(self, on_round):
        self.on_round = on_round


def test_callbacks_are_told_rounds_rows_and_models():
    watch, plain = Watch(), train("2wgt", None, rounds=5, eval_every=2)
    result = train("2wgt", None, rounds=5, eval_every=2, callbacks=[watch])
    assert watch.rounds == [1, 2, 3, 4, 5]
    assert [row["round"] for row in watch.rows] == [2, 4, 5]
    assert watch.rows == result.metrics
    assert timeless(result.metrics) == timeless(plain.metrics)
    assert_equal_trees(watch.models[5], plain.params)
    assert_equal_trees(watch.models[4], train("2wgt", None, rounds=4).params)
    assert {(e.rounds, e.config["client_opt"]) for e in watch.events} == {(5, "sgd(momentum=0.9)")}


def test_functions_are_told_evaluations_and_rounds_have_numbers():
    rounds, per_round = [], []
    callbacks = [
        lambda event: rounds.append(event.round),
        AtRounds(lambda event: per_round.append(event.metrics)),
    ]
    result = train("pt", None, rounds=3, eval_every=3, callbacks=callbacks)
    assert rounds == [3]
    assert [row["round"] for row in per_round] == [1, 2, 3]
    (row,) = result.metrics
    assert "train/federated/loss" in per_round[2]
    assert per_round[2].items() <= row.items()


def test_a_round_is_waited_for_only_if_it_is_looked_at(monkeypatch):
    checked, seen = [], []
    check = Loop._check
    monkeypatch.setattr(
        Loop, "_check", lambda self, result: (checked.append(result.round), check(self, result))
    )
    callback = AtRounds(lambda event: seen.append((event.round, max(checked, default=0))))
    train("pt", None, rounds=5, eval_every=5, checkpoint_every=9, callbacks=[callback])
    assert seen == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 5)]


def test_an_event_is_over_after_its_callback():
    events = []
    train("pt", None, rounds=1, callbacks=[AtRounds(events.append)])
    for name in ("metrics", "params"):
        with pytest.raises(MixflError, match="event of round 1 is over"):
            getattr(events[0], name)


@pytest.mark.parametrize("callback", [3, object(), "loss", Watch, type("Empty", (), {})()])
def test_what_is_no_callback(callback, tmp_path):
    with pytest.raises(MixflError, match=r"is not a callback: expected a function"):
        train("pt", tmp_path / "run", callbacks=[callback])
    assert not (tmp_path / "run").exists()


# Stopping


@pytest.mark.parametrize(
    ("callback", "at"), [(stop_at(4), 4), (AtRounds(stop_at(3)), 3), (AtRounds(stop_at(1)), 1)]
)
def test_stopped_run_is_finished_with_that_model(callback, at, tmp_path):
    """Also after a round that is not evaluated otherwise."""
    keys = dict(rounds=9, eval_every=2, checkpoint_every=100)
    result = train("2wgt", tmp_path / "run", callbacks=[callback], **keys)
    whole = train("2wgt", None, rounds=at, eval_every=2)
    assert_equal_trees(result.params, whole.params)
    assert timeless(result.metrics) == timeless(whole.metrics)
    assert status(tmp_path / "run") == {"status": "finished", "round": at, "stopped": "enough"}
    assert mixfl.load(tmp_path / "run").status == "finished"
    again = train("2wgt", tmp_path / "run", callbacks=[callback], resume=True, **keys)
    assert again.metrics == result.metrics
    assert_equal_trees(again.params, result.params)


def test_stop_survives_a_kill_before_the_model_is_written(tmp_path, monkeypatch):
    keys = dict(rounds=9, callbacks=[stop_at(4)])
    train("2wgt", tmp_path / "whole", **keys)
    with monkeypatch.context() as patch:
        patch.setattr(InFolder, "finished", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            train("2wgt", tmp_path / "run", **keys)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    train("2wgt", tmp_path / "run", rounds=9, resume=True)  # the callback is not needed again
    assert_same(tmp_path / "run", tmp_path / "whole")
    assert status(tmp_path / "run") == status(tmp_path / "whole")


def test_stop_in_the_last_round_changes_nothing(tmp_path):
    train("pt", tmp_path / "run", rounds=2, callbacks=[stop_at(2)])
    assert status(tmp_path / "run") == {"status": "finished", "round": 2}


# Errors


class TrialPruned(Exception):
    """As Optuna's: it must reach the caller as it is."""


def raising(at):
    def callback(event):
        if event.round == at:
            raise TrialPruned("not promising")

    return callback


@pytest.mark.parametrize("callback", [raising(3), AtRounds(raising(3))])
def test_error_reaches_the_caller_and_the_run_is_saved(callback, tmp_path):
    keys = dict(rounds=5, checkpoint_every=100)
    out = tmp_path / "run"
    with pytest.raises(TrialPruned, match="not promising"):
        train("2wgt", out, callbacks=[callback], **keys)
    assert status(out) == {
        "status": "failed", "round": 3, "saved": 3, "message": "TrialPruned: not promising"
    }  # fmt: skip
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["3"]
    train("2wgt", out, resume=True, **keys)
    train("2wgt", tmp_path / "whole", **keys)
    assert_same(out, tmp_path / "whole")


def test_error_without_a_folder():
    with pytest.raises(TrialPruned):
        train("pt", None, rounds=5, callbacks=[raising(2)])


# Early stopping and the best model. The model is the number of the round.

LOSSES = [9.0, 5.0, 4.0, 4.5, 3.0, 3.5, 3.0, 3.2, 2.0, 1.0]


def counted(losses=LOSSES, **metrics):
    import jax.numpy as jnp

    def evaluate(params):
        t = int(params["w"])
        more = {k: v[t] for k, v in metrics.items()}
        return ({"loss": losses[t]} if losses else {}) | more

    return mixfl.Problem(
        lambda key: {"w": jnp.zeros(())}, [mixfl.Central(lambda p: -p["w"])], evaluate
    )


KEYS = dict(rounds=9, central_lr=1.0, central_steps=1, eval_every=1, checkpoint_every=4)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(("patience", "end", "best"), [(1, 3, 2), (2, 6, 4), (3, 7, 4), (4, 9, 9)])
def test_early_stop(patience, end, best, kept, tmp_path):
    out = tmp_path / "run" if kept else None
    result = mixfl.train(counted(), "central", out=out, early_stop=patience, **KEYS)
    assert [row["round"] for row in result.metrics] == [*range(1, end + 1)]
    assert result.params["w"] == end
    assert (result.best["round"], result.best_params["w"]) == (best, best)
    if kept:
        assert mixfl.load(out, best=True).params["w"] == best
        said = f"no better eval/loss than {LOSSES[best]:g} of round {best} in {patience} eval"
        assert status(out).get("stopped", "").startswith(said if end < 9 else "")
        again = mixfl.train(counted(), "central", out=out, early_stop=patience, resume=True, **KEYS)
        assert (again.best, again.best_params["w"]) == (result.best, best)


@pytest.mark.parametrize("at", [1, 3, 5, 6])
def test_resumed_run_decides_the_same(at, tmp_path):
    whole = mixfl.train(counted(), "central", out=tmp_path / "whole", early_stop=2, **KEYS)

    class Killed(BaseException):
        pass

    def kill(event):
        if event.round == at:
            raise Killed

    with pytest.raises(Killed):
        mixfl.train(
            counted(), "central", out=tmp_path / "run", early_stop=2, callbacks=[kill], **KEYS
        )
    result = mixfl.train(
        counted(), "central", out=tmp_path / "run", early_stop=2, resume=True, **KEYS
    )
    assert_same(tmp_path / "run", tmp_path / "whole")
    assert status(tmp_path / "run") == status(tmp_path / "whole")
    assert timeless([result.best]) == timeless([whole.best])
    assert result.best_params == whole.best_params


def test_best_by_another_metric(tmp_path):
    auc = [0.5, 0.6, 0.9, 0.7, 0.9, 0.8, 0.6, 0.6, 0.6, 0.6]
    problem = counted(auc=auc)
    for by, best in (("eval/auc", 2), ("min:eval/auc", 1), ("max:eval/loss", 1), ("eval/loss", 9)):
        out = tmp_path / by.replace("/", "-")
        result = mixfl.train(
            problem, "central", out=out, **{**KEYS, "keep_best": True, "best_by": by}
        )
        assert result.best["round"] == result.best_params["w"] == best, by
        assert mixfl.load(out, best=True).params["w"] == best
    early = mixfl.train(problem, "central", best_by="eval/auc", early_stop=3, **KEYS)
    assert early.metrics[-1]["round"] == 5
    with pytest.raises(MixflError, match=r"metric in best_by: 'eval/acu'.*'eval/auc'"):
        mixfl.train(problem, "central", best_by="eval/acu", **KEYS)


def test_validation_decides_if_there_is_any():
    validate = counted([9, 1, 2, 3, 4, 5, 6, 7, 8, 9]).evaluate
    result = mixfl.train(
        dataclasses.replace(counted(), validate=validate), "central", early_stop=3, **KEYS
    )
    assert (result.best["round"], result.params["w"]) == (1, 4)


def test_nothing_to_choose_by():
    with pytest.raises(MixflError, match="need a metric to choose by"):
        mixfl.train(counted(None, auc=LOSSES), "central", keep_best=True, **KEYS)
    assert mixfl.train(counted(None, auc=LOSSES), "central", **KEYS).best is None


def test_best_row_is_known_without_keeping_models(tmp_path):
    result = mixfl.train(counted(), "central", out=tmp_path / "run", **KEYS)
    assert (result.best["round"], result.best_params) == (9, None)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "8", "9"]


def test_not_finite_is_never_the_best():
    losses = [5.0, float("nan"), 4.0, float("nan"), float("nan"), 6.0, 7.0, 8.0, 9.0, 9.0]
    problem = counted(None, error=losses)
    result = mixfl.train(problem, "central", best_by="eval/error", early_stop=3, **KEYS)
    assert (result.best["round"], result.params["w"]) == (2, 5)
