"""A search for good settings by Optuna: it proposes runs, prunes them and learns how they ended.

    tune.journal   what Optuna knows, as lines of JSON
    tune.json      what was asked for, and what was found

A run that was under way when the search stopped is still `running` in the journal; the next search
in the folder goes on with it.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError
from mixfl.metrics import lower_is_better
from mixfl.runs.reading import read_status
from mixfl.studies.space import Space
from mixfl.studies.sweep import folder_name
from mixfl.studies.trials import Done, Trial

JOURNAL = "tune.journal"
PRUNERS = ("median", "hyperband", "none")
PRUNED = "pruned"  # begins the reason in the run's status.json
FIRST = 5  # complete runs before the median prunes


@dataclass(frozen=True)
class Algorithm:
    """One that may be chosen, with the keys that have an effect on it."""

    name: str  # what finds it
    id: str
    given: Mapping[str, Any]  # keys set by hand
    space: Space


@dataclass(frozen=True)
class Asked:
    """What a search is about."""

    task: str
    algorithms: Mapping[str, Algorithm]  # by id
    metric: str
    rounds: int
    seed: int
    preset: str | None = None
    data: str | None = None
    track: str | None = None


@dataclass
class Found:
    """A run of the search."""

    number: int
    algorithm: str
    keys: Mapping[str, Any]
    folder: str
    state: str  # finished, pruned, diverged, failed
    value: float | None
    rows: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @property
    def name(self) -> str:
        return f"{self.algorithm}, " + ", ".join(f"{k} = {v}" for k, v in self.keys.items())


def loaded() -> Any:
    try:
        import optuna
    except ImportError:
        raise MixflError("mixfl tune needs Optuna: pip install 'mixfl[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def pruner(name: str, rounds: int) -> Any:
    optuna = loaded()
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=FIRST, n_warmup_steps=rounds // 5)
    if name == "hyperband":
        least = max(rounds // 27, 1)
        return optuna.pruners.HyperbandPruner(min_resource=least, max_resource=rounds)
    return optuna.pruners.NopPruner()


class Search:
    """A trials.Source: the runs that Optuna proposes, up to `trials` in all."""

    def __init__(self, asked: Asked, out: Path, trials: int, prune: str = "median"):
        optuna = self.optuna = loaded()
        self.asked, self.out = asked, out
        out.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(out / JOURNAL))
        storage = optuna.storages.JournalStorage(backend)
        self.lower = lower_is_better(asked.metric)
        self.study = optuna.create_study(
            study_name="mixfl", storage=storage, load_if_exists=True,
            direction="minimize" if self.lower else "maximize",
            pruner=pruner(prune, asked.rounds),
        )  # fmt: skip
        before = self.study.get_trials(deepcopy=False)
        # Another seed after each stop: otherwise the same settings would be proposed again.
        self.study.sampler = optuna.samplers.TPESampler(seed=asked.seed + len(before))
        self.lock = threading.Lock()
        states = optuna.trial.TrialState
        self.waiting = [t for t in before if t.state == states.RUNNING]
        over = [t for t in before if t.state in (states.COMPLETE, states.PRUNED)]
        self.count = max(trials - len(over), 0)  # to come
        self.left = self.count
        self.running: dict[str, list[Any]] = {}  # Optuna's trials, by run folder
        self.told: dict[int, set[int]] = {}  # rounds reported, by trial

    def more(self) -> Trial | None:
        with self.lock:
            if self.left <= 0:
                return None
            self.left -= 1
            if self.waiting:
                return self._again(self.waiting.pop(0))
            proposed = self.study.ask()
            return self._trial(proposed)

    def _trial(self, proposed: Any) -> Trial:
        ids = list(self.asked.algorithms)
        id = ids[0] if len(ids) == 1 else proposed.suggest_categorical("algorithm", ids)
        algorithm = self.asked.algorithms[id]
        keys = {k: s.suggest(proposed, k) for k, s in algorithm.space.items()}
        proposed.set_user_attr("keys", keys)
        proposed.set_user_attr("algorithm", id)
        return self._made(proposed, id, keys)

    def _again(self, frozen: Any) -> Trial:
        """One that was under way."""
        known = frozen.user_attrs
        proposed = self.optuna.trial.Trial(self.study, frozen._trial_id)
        if not {"keys", "algorithm"} <= known.keys():  # it was stopped in between
            return self._trial(proposed)
        self.told[frozen.number] = set(frozen.intermediate_values)
        return self._made(proposed, known["algorithm"], known["keys"])

    def _made(self, proposed: Any, id: str, keys: Mapping[str, Any]) -> Trial:
        asked, algorithm = self.asked, self.asked.algorithms[id]
        folder = f"{id}/{folder_name(keys)}/seed{asked.seed}"
        self.running.setdefault(folder, []).append(proposed)
        return Trial(
            asked.task, algorithm.name, folder, f"{proposed.number} {id} {folder_name(keys)}",
            asked.preset, asked.data, {**algorithm.given, **keys, "seed": asked.seed}, asked.track,
        )  # fmt: skip

    def judge(self, trial: Trial, row: dict[str, Any]) -> str:
        value, round = row.get(self.asked.metric), row["round"]
        if value is None or round >= self.asked.rounds:
            return ""
        with self.lock:
            proposed = self.running[trial.folder][0]
            told = self.told.setdefault(proposed.number, set())
            if round not in told:
                told.add(round)
                proposed.report(value, round)
            if not proposed.should_prune():
                return ""
        return f"{PRUNED}: {self.asked.metric} = {value:.4g} in round {round} was not promising"

    def over(self, done: Done) -> None:
        with self.lock:
            several = self.running.pop(done.trial.folder, [])
        states, value = self.optuna.trial.TrialState, None
        if done.status == "failed":
            state = states.FAIL
        elif done.status == "diverged" or was_pruned(done.folder):
            state = states.PRUNED
        else:
            value = done.rows[-1].get(self.asked.metric) if done.rows else None
            state = states.COMPLETE if value is not None else states.FAIL
        for proposed in several:
            self.study.tell(proposed, value if state == states.COMPLETE else None, state=state)

    def found(self) -> list[Found]:
        """All runs that are over, the best first."""
        states = self.optuna.trial.TrialState
        runs: dict[str, Found] = {}
        for t in self.study.get_trials(deepcopy=False):
            if t.state == states.RUNNING or "keys" not in t.user_attrs:
                continue
            one = self._found(t)
            runs.setdefault(one.folder, one)  # a setting that was proposed twice was run once
        sign = 1 if self.lower else -1

        def rank(one: Found) -> tuple:
            return one.state != "finished", one.value is None, sign * (one.value or 0.0)

        return sorted(runs.values(), key=rank)

    def _found(self, t: Any) -> Found:
        from mixfl.runs.reading import read_metrics

        id, keys = t.user_attrs["algorithm"], t.user_attrs["keys"]
        name = f"{id}/{folder_name(keys)}/seed{self.asked.seed}"
        status = read_status(self.out / name).get("status", "failed")
        state = "pruned" if was_pruned(self.out / name) else str(status)
        rows = read_metrics(self.out / name) if state in ("finished", "pruned") else []
        value = rows[-1].get(self.asked.metric) if rows else None
        return Found(t.number, id, keys, name, state, value, rows)


def was_pruned(folder: Path) -> bool:
    return str(read_status(folder).get("stopped", "")).startswith(f"{PRUNED}:")


def remember(file: Path, asked: Mapping[str, Any], resume: bool) -> None:
    """Refuses a folder of another search."""
    if not file.exists():
        return
    if not resume:
        raise MixflError(
            f"{file.parent} holds a search already: --resume to go on, or choose another --out."
        )
    before = json.loads(file.read_bytes()).get("asked", {})
    now = json.loads(json.dumps(asked))
    changed = [f"{k} was {before.get(k)}, now {now[k]}" for k in now if before.get(k) != now[k]]
    if changed:
        raise MixflError(
            f"{file.parent} holds another search ({'; '.join(changed)}): choose another --out."
        )
