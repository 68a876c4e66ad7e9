"""The runs of a reproduction as one small file, so that others can judge them again, or go on.

    python -m benchmarks.archive pack runs/quick docs/results/runs/synthetic.jsonl.xz
    python -m benchmarks.archive unpack docs/results/runs/synthetic.jsonl.xz runs/quick
    mixfl reproduce --out runs/quick         # makes only what is missing, and judges all

A line is a run that is over: its folder, config.toml, status.json, and the metrics that studies
show and judge (`eval/`, `theory/`, `comm/`), with 7 digits. Models, logs and times are left out.
The first line is the request. Paths are not kept: `unpack --data` says where the data is now, and
problems of the library's own studies are where that is.
"""

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import tomli_w

from mixfl.report.from_runs import REPRODUCED
from mixfl.runs.folder import write_whole
from mixfl.runs.reading import read_metrics, read_run_config, read_status
from mixfl.studies.reproduce import RUNS
from mixfl.studies.study import STUDIES, real_data
from mixfl.studies.trials import OVER

KEPT = ("eval/", "theory/", "comm/")


def packed(out: Path) -> Iterator[dict[str, Any]]:
    yield without_data(json.loads((out / REPRODUCED).read_bytes()))
    for folder in sorted(p.parent for p in (out / RUNS).glob("*/*/config.toml")):
        status = read_status(folder)
        if status.get("status") not in OVER:
            continue
        rows = read_metrics(folder)
        names = list(dict.fromkeys(k for row in rows for k in row if k.startswith(KEPT)))
        yield {
            "folder": str(folder.relative_to(out / RUNS)),
            "status": status,
            "config": without_paths(read_run_config(folder)),
            "round": [row["round"] for row in rows],
            "metrics": {k: [short(row.get(k)) for row in rows] for k in names},
        }


def without_data(content: dict[str, Any]) -> dict[str, Any]:
    """With `real` in place of a path."""
    return content | {"data": "real"} if "data" in content else content


def without_paths(config: dict[str, Any]) -> dict[str, Any]:
    name = Path(config["task"]).name  # file.py:problem
    own = (STUDIES / name.split(":")[0]).is_file()
    return without_data(config) | ({"task": name} if own else {})


def with_paths(config: dict[str, Any], data: Path | None) -> dict[str, Any]:
    """Where they are now."""
    if "data" in config and data is not None:
        config["data"] = place(data, config["task"])
    own = STUDIES / config["task"].split(":")[0]
    return config | ({"task": str(STUDIES / config["task"])} if own.is_file() else {})


def short(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def pack(out: Path, file: Path) -> int:
    """Returns the number of runs."""
    lines = [json.dumps(content) for content in packed(out)]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, lzma.compress("\n".join(lines).encode() + b"\n", preset=9))
    return len(lines) - 1


def read(file: Path) -> list[dict[str, Any]]:
    """The request and the runs. A stranger may have made the file: no folder leads elsewhere."""
    try:
        found = [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]
        folders = [run["folder"].split("/") for run in found[1:]]
    except (lzma.LZMAError, ValueError, LookupError, TypeError, AttributeError):
        raise click.ClickException(f"{file} is no archive of runs, or damaged.") from None
    if not found or any(len(f) != 2 or {"", ".", ".."} & set(f) for f in folders):
        raise click.ClickException(f"{file} is no archive of runs, or damaged.")
    return found


def unpack(file: Path, out: Path, data: Path | None = None) -> int:
    """Writes the runs that `out` does not have. Returns their number."""
    request, *runs = read(file)
    if ("data" in request) != (data is not None):
        raise click.ClickException(
            f"{file} has runs on {'real' if 'data' in request else 'synthetic'} data: "
            f"{'give' if 'data' in request else 'leave out'} --data."
        )
    if data is not None:
        request["data"] = os.path.abspath(data)
    configs = [with_paths(run["config"], data) for run in runs]  # before anything is written
    out.mkdir(parents=True, exist_ok=True)
    if not (out / REPRODUCED).exists():
        write_whole(out / REPRODUCED, (json.dumps(request) + "\n").encode())
    made = 0
    for run, config in zip(runs, configs, strict=True):
        folder = out / RUNS / run["folder"]
        if read_status(folder).get("status") in OVER:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        columns = run["metrics"]
        rows = [
            {"round": r} | {k: columns[k][i] for k in columns if columns[k][i] is not None}
            for i, r in enumerate(run["round"])
        ]
        write_whole(folder / "metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows).encode())
        write_whole(folder / "config.toml", tomli_w.dumps(config).encode())
        write_whole(folder / "status.json", json.dumps(run["status"]).encode())
        made += 1
    return made


def place(data: Path, task: str) -> str:
    found = real_data(task, data)
    if found is None:
        raise click.ClickException(f"--data {data} has no data of the task {task}.")
    return os.path.abspath(found)


@click.group()
def main() -> None:
    """Runs of `mixfl reproduce` as one file."""


@main.command("pack")
@click.argument("out", type=click.Path(exists=True, path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
def pack_command(out: Path, file: Path) -> None:
    click.echo(f"{file}: {pack(out, file)} runs, {file.stat().st_size // 1024} KiB")


@main.command("unpack")
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path), help="If the runs had any.")
def unpack_command(file: Path, out: Path, data: Path | None) -> None:
    click.echo(f"{out}: {unpack(file, out, data)} runs")


if __name__ == "__main__":
    main()
