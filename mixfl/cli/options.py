"""The options that commands share, and the code that reads and checks them."""

from pathlib import Path

import click

from mixfl.cli.process import start_jax
from mixfl.errors import MixflError

ALGORITHMS = (
    "fedavg", "pt", "1wgt", "2wgt", "example-transfer", "oracle", "central", "pretrain", "baseline",
    "server-learning", "fedclg", "mimelite", "scaffold",
)  # fmt: skip
ALL = ", ".join(ALGORITHMS)
OWN = "or path.py:name, your own (docs/algorithms.md)"

PRESET = click.option("--preset", metavar="P", help="Settings from a file: paper, cpu or demo.")
PROBLEM = [
    click.argument("task"),
    PRESET,
    click.option("--data", metavar="DIR", help="Prepared data; without it, synthetic data."),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any key."),
]
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
TRAINING = [
    PRESET,
    click.option("--rounds", type=int, metavar="N", help="Rounds of training."),
    click.option("--seed", type=int, metavar="N", help="Seed of the (first) run."),
    click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Output folder."),
    click.option("--data", metavar="DIR", help="Prepared data; without it, synthetic data."),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
                 help="Any key, e.g. --set client_lr=0.1; may be repeated. See `mixfl keys`."),
    click.option("--resume", is_flag=True, help="Continue what is in --out."),
    click.option("--track", metavar="NAME",
                 help="Also log to MLflow (mlflow) or Weights & Biases (wandb)."),
    click.option("--distributed", is_flag=True,
                 help="This is one of several processes that train together (docs/scaling.md)."),
]  # fmt: skip
SEVERAL_RUNS = TRAINING[:-1]
JOBS = click.option("--jobs", type=click.IntRange(min=1), metavar="N",
                    help="Runs at a time; default: the number of cores (Slurm: 4).")  # fmt: skip

HUNG = click.option("--hung", type=click.FloatRange(min=0), default=1800, show_default=True,
                    metavar="SECONDS",
                    help="Retry a run once after this long without progress; 0: never."
                    )  # fmt: skip
ON = click.option("--on", metavar="local|ray|slurm", default="local", show_default=True,
                  help="Who makes the runs: processes here, or jobs on a cluster (docs/scaling.md)."
                  )  # fmt: skip
ON_OPTION = click.option("--on-option", "on_options", multiple=True, metavar="KEY=VALUE",
                         help="For --on ray or slurm, e.g. cpus=2, partition=long, time=8:00:00."
                         )  # fmt: skip
WORKERS = (JOBS, HUNG, ON, ON_OPTION)


DP = click.option("--dp", multiple=True, metavar="KEY=VALUE",
                  help="Differential privacy: --dp epsilon=4 --dp delta=1e-6 (docs/privacy.md)."
                  )  # fmt: skip
DP_SEED = click.option("--dp-seed", type=click.IntRange(min=0), metavar="N",
                       help="For tests only: noise from a seed, which is not private."
                       )  # fmt: skip


def crew(on, on_options, jobs, hung):
    """The workers that --on, --on-option, --jobs and --hung ask for."""
    from mixfl.runs.user_input import parse_assignments
    from mixfl.studies.engines import crew as made

    return made(on, parse_assignments(on_options, "--on-option", "cpus=2"), jobs, hung)


def private(dp, dp_seed) -> dict:
    """The keys that --dp and --dp-seed set."""
    from mixfl.privacy.config import dp_keys
    from mixfl.runs.user_input import parse_assignments

    given = parse_assignments(dp, "--dp", "epsilon=4")
    return dp_keys(given if dp_seed is None else {**given, "seed": dp_seed})


def options(*several, shared=None):
    """Gives a command its own options and the `shared` ones (default: those for training)."""

    def apply(command):
        for option in reversed([*several, *(TRAINING if shared is None else shared)]):
            command = option(command)
        return command

    return apply


def names(text: str) -> list[str]:
    parts = [a.strip() for a in text.split(",") if a.strip()]
    if not parts or len(set(parts)) < len(parts):
        raise MixflError(f"{text}: expected different names, separated by commas.")
    return parts


def by_hand(rounds, seed, assignments, measure=None) -> dict:
    from mixfl.runs.user_input import parse_assignments

    given = parse_assignments(assignments)
    for key, value in (("rounds", rounds), ("seed", seed), ("measure", measure)):
        if value is not None:
            if key in given:
                raise MixflError(f"{key} is given by both --{key} and --set: leave one out.")
            given[key] = value
    return given


def begin(task, assignments, out=None, algorithms=()) -> dict:
    """Checks what can be checked without JAX, starts JAX, and returns the keys given."""
    from mixfl.runs.user_input import parse_assignments

    given = parse_assignments(assignments)
    check_names(task, algorithms)
    check_folder(out)
    start_jax(given)
    return given


def check_folder(out) -> None:
    if out is not None and out.exists() and not out.is_dir():
        raise MixflError(f"--out {out} is a file: give a folder.")


def check_names(task, algorithms, track=None) -> None:
    """Checks names without importing JAX."""
    from mixfl.tasks import check_name
    from mixfl.tasks.user_file import check_algorithm

    if task is not None:
        check_name(task)
    for given in algorithms:
        if given not in ALGORITHMS:
            check_algorithm(given, ALGORITHMS)
    if track is not None:
        from mixfl.runs.sinks.trackers import check as check_tracker

        check_tracker(track)
