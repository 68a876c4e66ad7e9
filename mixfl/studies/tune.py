"""`mixfl tune`: searches for good settings with Optuna (search.py), and shows what it found."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import mixfl
from mixfl.algorithms import recipe
from mixfl.engine.first_model import first_model
from mixfl.errors import Diverged, MixflError, unknown
from mixfl.metrics import lower_is_better
from mixfl.problem import Problem
from mixfl.runs.evaluation import evaluated, one_copy
from mixfl.runs.folder import write_whole
from mixfl.runs.plan import Plan, plan, plan_of
from mixfl.runs.sinks.base import Quiet
from mixfl.runs.training import run
from mixfl.runs.wording import SHOWN, number
from mixfl.settings import KEYS
from mixfl.studies import compare
from mixfl.studies.progress import Board
from mixfl.studies.search import PRUNERS, Algorithm, Asked, Found, Search, remember
from mixfl.studies.space import Space, space_of
from mixfl.studies.sweep import CHOSEN_BY
from mixfl.studies.trials import Crew, Done
from mixfl.tasks import find
from mixfl.typed_keys import Keys

RESULTS, PLOT = "tune.json", "tune.png"
ALGORITHMS = ("pt", "1wgt", "2wgt")
TOP = 10  # rows of the table


@dataclass
class Tuned:
    """What a search found. `best` is None if no run finished."""

    asked: Asked
    out: Path
    found: list[Found]  # the best first
    space: Space

    @property
    def best(self) -> Found | None:
        first = self.found[0] if self.found else None
        return first if first and first.state == "finished" and first.value is not None else None

    @property
    def metric(self) -> str:
        return self.asked.metric

    @property
    def validated(self) -> bool:
        return self.metric.startswith("valid/")

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the best run that were searched or set by hand."""
        if self.best is None:
            raise MixflError("the search found nothing: no run finished.")
        return {**self.asked.algorithms[self.best.algorithm].given, **self.best.keys}

    def command(self) -> str | None:
        """Repeats the best run, if its problem has a name on the command line."""
        asked, best = self.asked, self.best
        if best is None or not asked.task:
            return None
        words = ["mixfl", "run", asked.task, "--algorithm", asked.algorithms[best.algorithm].name]
        words += ["--preset", asked.preset] if asked.preset else []
        words += ["--data", asked.data] if asked.data else []
        for key, value in {**self.settings, "seed": asked.seed}.items():
            words += [
                "--set",
                f"{key}={json.dumps(value) if not isinstance(value, str) else value}",
            ]
        return shlex.join(words)


def tune(
    problem: Problem,
    over: Mapping[str, Any],
    algorithms: Sequence[str] = ALGORITHMS,
    *,
    out: str | Path,
    trials: int = 20,
    by: str | None = None,
    prune: str = "median",
    resume: bool = False,
    **settings: Unpack[Keys],
) -> Tuned:
    """Search for good settings of a problem, with Optuna: `pip install 'mixfl[tune]'`.

    `over`: what is searched. A list has values to choose from, a tuple is a range: (low, high) or
    (low, high, "log"). Each of the `trials` runs has one of the `algorithms` and values for those
    keys that have an effect on it. Runs are judged by the problem's `validate`, by the metric `by`;
    without `validate` by `evaluate`, and the result's `validated` is False: then the best figure is
    too good. Runs that look worse than others did are pruned: `prune` is "median", "hyperband" or
    "none".

    The run folders are in `out`, as those of a sweep. Ctrl-C saves the run under way, and
    `resume=True` goes on. All runs have the same seed. They are made one after the other in this
    process; `mixfl tune path.py:problem` makes several at a time.

    >>> found = mixfl.tune(problem, {"client_lr": (0.01, 1.0, "log")}, ["pt", "2wgt"],
    ...                    out="search", trials=2, rounds=2)
    >>> found.best.state, sorted(found.settings)
    ('finished', ['client_lr', 'rounds'])
    """
    folder, space = Path(out), space_of(over)
    chosen = chosen_algorithms(algorithms, space, settings, ())
    asked = asked_for("", chosen, lambda a, keys: plan_of(problem, a.name, keys), by, settings)
    search = begun(asked, space, folder, trials, prune, resume)
    while (trial := search.more()) is not None:
        path = folder / trial.folder

        def judge(event: Any, trial: Any = trial) -> None:
            why = search.judge(trial, event.metrics)
            if why:
                event.stop(why)

        status, round = "finished", 0
        try:
            run(
                plan_of(problem, trial.algorithm, trial.keys), path, True, Quiet(), trial.label,
                callbacks=[judge],
            )  # fmt: skip
        except Diverged as error:
            status, round = "diverged", error.round
        search.over(Done(trial, path, status, round))
    return ended(search, space, folder)


def tune_task(
    task: str, algorithms: Sequence[str], space: Space, out: Path | None, crew: Crew, board: Board,
    *, trials: int, by: str | None, prune: str, resume: bool, given: Mapping[str, Any],
    preset: str | None = None, data: str | None = None, track: str | None = None,
) -> Tuned:  # fmt: skip
    """The same for a task or path.py:problem, with the workers of the crew."""
    options = find(task).options
    given = dict(given)
    if "validation" in options and "validation" not in space:
        given.setdefault("validation", True)
    problems: dict = {}
    chosen = chosen_algorithms(algorithms, space, given, options)

    def planned(a: Algorithm, keys: Mapping[str, Any]) -> Plan:
        return plan(task, a.name, preset=preset, data=data, given=keys, problems=problems)

    asked = asked_for(task, chosen, planned, by, given, preset, data, track)
    out = out or Path("runs") / f"tune-{Path(task.split(':')[-1]).name}"
    search = begun(asked, space, out, trials, prune, resume)
    crew.make([], out, board, resume=True, source=search)
    return ended(search, space, out)


def chosen_algorithms(
    names: Sequence[str], space: Space, given: Mapping[str, Any], options: Any
) -> dict[str, Algorithm]:
    """Each with its own part of the keys."""
    if not names:
        raise MixflError("which algorithms? Give at least one.")
    twice = [k for k in space if k in given]
    if twice:
        raise MixflError(f"{twice[0]} is both searched (--over) and set: leave one out.")
    recipes = [recipe(name) for name in names]
    used = {r.id: {*r.uses, *options} for r in recipes}
    if len(used) < len(recipes):
        raise MixflError(f"{', '.join(names)}: two of the algorithms have the same id.")
    for key in (*space, *given):
        if not any(key in keys for keys in used.values()):
            if key in KEYS:
                raise MixflError(f"{key} has no effect on {', '.join(used)}: leave it out.")
            raise unknown(
                "key", key, {*KEYS, *options, *(k for keys in used.values() for k in keys)}
            )
    return {
        r.id: Algorithm(
            name, r.id, {k: v for k, v in given.items() if k in used[r.id]},
            {k: s for k, s in space.items() if k in used[r.id]},
        )
        for name, r in zip(names, recipes, strict=True)
    }  # fmt: skip


def asked_for(
    task: str, algorithms: Mapping[str, Algorithm], planned: Any, by: str | None,
    given: Mapping[str, Any], preset: str | None = None, data: str | None = None,
    track: str | None = None,
) -> Asked:  # fmt: skip
    """Checks the ends of all ranges, before the first run."""
    plans = []
    for a in algorithms.values():
        for end in range(max([len(s.ends()) for s in a.space.values()], default=1)):
            keys = {k: s.ends()[min(end, len(s.ends()) - 1)] for k, s in a.space.items()}
            plans.append(planned(a, {**a.given, **keys}))
    compare.check(plans)
    first = plans[0]
    seed = first.settings.seed
    algorithms = {
        id: Algorithm(a.name, id, {k: v for k, v in a.given.items() if k != "seed"}, a.space)
        for id, a in algorithms.items()
    }
    metric = metric_of(first, by)
    most = max(p.settings.rounds for p in plans)
    return Asked(task, algorithms, metric, most, seed, preset, data, track)


def metric_of(planned: Plan, by: str | None) -> str:
    """What runs are judged by: on validation data if there is any."""
    x = one_copy(first_model(planned.problem, planned.settings.seed))
    metrics = evaluated(planned.problem, x, planned.settings.eval_clients)
    prefix = "valid/" if any(k.startswith("valid/") for k in metrics) else "eval/"
    known = [k.removeprefix(prefix) for k in metrics if k.startswith(prefix)]
    if not known:
        raise MixflError(
            "this problem has neither `validate` nor `evaluate`: there is nothing to judge runs "
            "by. Give Problem(validate=...)."
        )
    if by is None:
        return prefix + next((m for m in CHOSEN_BY if m in known), known[0])
    wanted = by.removeprefix("valid/").removeprefix("eval/")
    if wanted not in known:
        raise unknown("metric in --by:", by, known)
    return prefix + wanted


def begun(
    asked: Asked, space: Space, out: Path, trials: int, prune: str, resume: bool
) -> Search:  # fmt: skip
    if prune not in PRUNERS:
        raise unknown("--prune", prune, PRUNERS)
    if out.exists() and not out.is_dir():
        raise MixflError(f"{out} is a file: choose another --out.")
    remember(out / RESULTS, request(asked, space), resume)
    search = Search(asked, out, trials, prune)
    save(Tuned(asked, out, search.found(), space))
    return search


def ended(search: Search, space: Space, out: Path) -> Tuned:
    tuned = Tuned(search.asked, out, search.found(), space)
    save(tuned)
    return tuned


def request(asked: Asked, space: Space) -> dict[str, Any]:
    """What two searches in one folder must agree in."""
    return {
        "task": asked.task, "preset": asked.preset, "data": asked.data, "metric": asked.metric,
        "seed": asked.seed, "rounds": asked.rounds,
        "algorithms": {id: dict(a.given) for id, a in asked.algorithms.items()},
        "over": {k: s.plain() for k, s in space.items()},
    }  # fmt: skip


def save(tuned: Tuned) -> None:
    runs = [
        {"algorithm": f.algorithm, "keys": dict(f.keys), "state": f.state, "value": f.value,
         "folder": f.folder}
        for f in tuned.found
    ]  # fmt: skip
    content = {
        "asked": request(tuned.asked, tuned.space), "version": mixfl.__version__,
        "validated": tuned.validated, "best": runs[0] if tuned.best else None,
        "command": tuned.command(), "runs": runs,
    }  # fmt: skip
    text = json.dumps(content, indent=1, default=str) + "\n"
    write_whole(tuned.out / RESULTS, text.encode())


def table(tuned: Tuned) -> tuple[list[str], list[list[str]]]:
    """The best runs, with their figures on test data beside those that they were judged by."""
    metrics = [k for f in tuned.found for k in (f.rows[-1] if f.rows else ())]
    tested = [m for m in SHOWN if m in metrics and m != tuned.metric]
    shown = [tuned.metric, *tested]
    header = ["setting", "", *(m.replace("eval/", "test ").replace("/", " ") for m in shown)]
    rows = []
    for f in tuned.found[:TOP]:
        last = f.rows[-1] if f.rows else {}
        cells = [number(last[m]) if last.get(m) is not None else "-" for m in shown]
        rows.append([("* " if f is tuned.best else "  ") + f.name, f.state, *cells])
    return header, rows


def verdict(tuned: Tuned) -> list[str]:
    """The result in words, with the command that repeats it."""
    states = [f.state for f in tuned.found]
    counted = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    lines = [f"{len(states)} settings: {counted}."]
    if len(states) > TOP:
        lines[0] += f" The table has the best {TOP}; {RESULTS} has all."
    if tuned.best is None:
        return [*lines, "No run finished: lower the rates, or prune less."]
    better = "lowest" if lower_is_better(tuned.metric) else "highest"
    lines.append(f"* {better} {tuned.metric} after training: {tuned.best.name}")
    if not tuned.validated:
        lines.append(
            "  There is no validation data (Problem(validate=...)), so the test data chose it: its "
            "figure is too good."
        )
    command = tuned.command()
    return [*lines, f"  Again: {command}"] if command else lines
