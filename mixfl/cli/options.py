"""What commands share: their options, and the reading and checking of what is given by them."""

from pathlib import Path

import click

from mixfl.cli.process import start_jax
from mixfl.errors import MixflError, unknown

ALGORITHMS = (
    "fedavg", "pt", "1wgt", "2wgt", "example-transfer", "oracle", "central", "pretrain", "baseline"
)  # fmt: skip
ALL = ", ".join(ALGORITHMS)

PRESET = click.option("--preset", metavar="P", help="Settings from a file: paper, cpu or demo.")
PROBLEM = [
    click.argument("task"),
    PRESET,
    click.option("--data", metavar="DIR", help="Prepared data; without it, synthetic data."),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any key."),
]
JSON = click.option("--json", "as_json", is_flag=True, help="For machines.")
TRAINING = [
    PRESET,
    click.option("--rounds", type=int, metavar="N", help="Rounds of training."),
    click.option("--seed", type=int, metavar="N", help="Seed of the (first) run."),
    click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder to write."),
    click.option("--data", metavar="DIR", help="Prepared data; without it, synthetic data."),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
                 help="Any key, e.g. --set client_lr=0.1; may be repeated. See `mixfl keys`."),
    click.option("--resume", is_flag=True, help="Go on with what --out holds."),
    click.option("--track", metavar="NAME", help="Log to MLflow too: --track mlflow."),
    click.option("--distributed", is_flag=True,
                 help="One of several processes that train together (docs/scaling.md)."),
]  # fmt: skip
SEVERAL_RUNS = TRAINING[:-1]
JOBS = click.option("--jobs", type=click.IntRange(min=1), metavar="N",
                    help="Runs at a time; as many as cores, if not given.")  # fmt: skip

HUNG = click.option("--hung", type=click.FloatRange(min=0), default=1800, show_default=True,
                    metavar="SECONDS",
                    help="A run without progress for so long is tried once more. 0: wait on."
                    )  # fmt: skip


def options(*several, shared=None):
    """Options of its own, and those that a command shares: with others that train, if not said."""

    def apply(command):
        for option in reversed([*several, *(TRAINING if shared is None else shared)]):
            command = option(command)
        return command

    return apply


def names(text: str) -> list[str]:
    found = [a.strip() for a in text.split(",") if a.strip()]
    if not found or len(set(found)) < len(found):
        raise MixflError(f"{text}: expected different names, separated by commas.")
    return found


def by_hand(rounds, seed, assignments, measure=None) -> dict:
    from mixfl.runs.user_input import parse_assignments

    given = parse_assignments(assignments)
    for key, value in (("rounds", rounds), ("seed", seed), ("measure", measure)):
        if value is not None:
            if key in given:
                raise MixflError(f"{key} is given by --{key} and by --set: leave one out.")
            given[key] = value
    return given


def begin(task, assignments, out=None) -> dict:
    """The keys given, when what can be wrong without JAX is not; JAX is started."""
    from mixfl.runs.user_input import parse_assignments

    given = parse_assignments(assignments)
    check_names(task, [])
    check_folder(out)
    start_jax(given)
    return given


def check_folder(out) -> None:
    if out is not None and out.exists() and not out.is_dir():
        raise MixflError(f"--out {out} is a file: give a folder.")


def check_names(task, algorithms, track=None) -> None:
    """Mistakes that need not wait for JAX."""
    from mixfl.tasks import check_name

    check_name(task)
    for given in algorithms:
        if given not in ALGORITHMS:
            raise unknown("algorithm", given, ALGORITHMS)
    if track is not None:
        from mixfl.runs.sinks.mlflow import check as check_tracker

        check_tracker(track)
