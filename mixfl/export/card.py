"""A model card in Markdown: what a run's model was trained on, how, how well, and what it spent."""

import json
import re
from pathlib import Path
from typing import Any

from mixfl.algorithms.keys import DP_KEYS
from mixfl.errors import MixflError
from mixfl.report.markdown import plain, table
from mixfl.report.style import NAMES
from mixfl.runs.folder import OPERATION
from mixfl.runs.reading import read_metrics, read_run_config, read_status
from mixfl.tasks import PYTHON, TASKS, task_in

HEAD = ("task", "algorithm", "algorithm_from", "preset", "data", "version", "format")

LIMITS = (
    "The metrics are of the evaluation data of this run. They say nothing about other data, nor "
    "about whom the model fails; write here what you know of that."
)


def card(path: Path, best: int | None = None) -> str:
    """Of a run that has been evaluated at least once: of its last model, or of its best one, whose
    round is given."""
    config, rows, status = read_run_config(path), read_metrics(path), read_status(path)
    if not rows:
        raise MixflError(f"{path} has no metrics yet: there is nothing to say about its model.")
    origin = _origin(path)
    algorithm = str(config.get("algorithm", ""))
    name, version = escaped(NAMES.get(algorithm, algorithm)), escaped(config.get("version", "?"))
    lines = [
        f"# {escaped(Path(task_in(config)).name)}, trained with {name}",
        "",
        f"A model trained by mixed federated learning with mixfl {version}. "
        f"{_status(status, rows[-1], config, best)}.",
        *_data(config, origin),
        *_metrics(rows, best),
        *_privacy(config, rows[-1]),
        *_settings(config),
        *_made_with(origin),
        "", "## Limits", "", LIMITS,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _status(
    status: dict[str, Any], last: dict[str, Any], config: dict[str, Any], best: int | None
) -> str:
    said = escaped(status.get("status", "unknown"))
    why = f" ({escaped(status['stopped'])})" if status.get("stopped") else ""
    run = f"The run: {said} after round {last['round']} of {config.get('rounds', '?')}{why}"
    return run if best is None else f"{run}. The model is the best that was saved, of round {best}"


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    return table(header, [[str(cell) for cell in row] for row in rows])


def escaped(text: Any) -> str:
    return plain(str(text))


def code(text: Any) -> str:
    """As code, in which nothing is escaped: the fence is longer than any within."""
    line = " ".join(str(text).split()) or " "
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def _source(config: dict[str, Any]) -> str:
    """Where the data came from, as far as the run knows."""
    task = task_in(config)
    if config.get("data"):
        return f"Trained on the prepared data in {code(config['data'])}."
    if any(key in config for key in OPERATION):  # keys of deployments only
        return (
            "Trained in a deployment: each client's data stayed at its node. What is listed here "
            "is what the server had."
        )
    if task in TASKS:
        return f"Trained on the synthetic data of mixfl's task {code(task)}, made from its seed."
    if str(config.get("task", "")).startswith(PYTHON):
        return f"Trained on the data of the problem {code(task)}, given by a Python program."
    return f"Trained on the data that {code(Path(task).name)} reads or makes."


def _data(config: dict[str, Any], origin: dict[str, Any]) -> list[str]:
    rows = [
        (name, facts.get("clients", "none: at the server"), facts.get("examples", ""),
         ", ".join(f"{k} {v}" for k, v in columns.items())
         if isinstance(columns := facts.get("columns"), dict) else "")
        for name, facts in origin.get("data", {}).items()
        if isinstance(facts, dict)
    ]  # fmt: skip
    lines = ["", "## Data", "", _source(config)]
    header = ("term", "clients", "examples", "columns")
    return [*lines, "", *_table(header, rows)] if rows else lines


def _metrics(rows: list[dict[str, Any]], best: int | None) -> list[str]:
    row = rows[-1] if best is None else next((r for r in rows if r["round"] == best), {})
    keys = [k for k in row if k.startswith(("eval/", "valid/")) and row[k] is not None]
    lines = _table(("metric", "value"), [(k, f"{row[k]:.6g}") for k in keys])
    return ["", f"## Metrics after round {row.get('round', best)}", "", *lines]


def _privacy(config: dict[str, Any], last: dict[str, Any]) -> list[str]:
    spent = last.get("privacy/epsilon")
    if "privacy/delta" not in last:
        return ["", "## Privacy", "", "Trained without differential privacy. Raw data stayed with "
                "the clients; what a model remembers of it is not bounded."]  # fmt: skip
    said = f"{spent:.4g}" if spent is not None else "not bounded"
    keys = [(k, config[k]) for k in DP_KEYS if k in config]
    return ["", "## Privacy", "", f"Spent: epsilon {said} at delta {last['privacy/delta']:g}, per "
            "client, by all rounds of the run (docs/privacy.md says for which neighbours and under "
            "which assumptions).",
            "", *_table(("key", "value"), keys)]  # fmt: skip


def _settings(config: dict[str, Any]) -> list[str]:
    keys = [(k, v) for k, v in config.items() if k not in HEAD and k not in DP_KEYS]
    return ["", "## Settings", "", f"Algorithm: {code(config.get('algorithm', ''))}.", "",
            *_table(("key", "value"), keys)]  # fmt: skip


def _made_with(origin: dict[str, Any]) -> list[str]:
    versions = origin.get("versions")
    if not isinstance(versions, dict):
        return []
    words = ", ".join(f"{k} {v}" for k, v in versions.items())
    return ["", "## Made with", "", escaped(words) + "."]


def _origin(path: Path) -> dict[str, Any]:
    """The last entry of origin.json."""
    try:
        entries = json.loads((path / "origin.json").read_bytes())
        last = entries[-1] if isinstance(entries, list) and entries else {}
    except (OSError, ValueError, RecursionError):
        last = {}
    return last if isinstance(last, dict) else {}
