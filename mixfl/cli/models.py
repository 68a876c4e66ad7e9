"""Commands for trained models: predict, export, card."""

from pathlib import Path

import click

from mixfl.cli.process import start_jax
from mixfl.cli.terminal import print_table
from mixfl.errors import MixflError

FORMATS = ("torch", "onnx", "jax-export", "safetensors")
SHOWN_ROWS, SHOWN_COLUMNS = 10, 6

RUN = click.argument("run", type=click.Path(path_type=Path))
PROBLEM = click.option("--problem", metavar="path.py:problem",
                       help="The problem, if the run's config.toml does not say where it is."
                       )  # fmt: skip
BEST = click.option("--best", is_flag=True,
                    help="The best saved model, even if the run has not finished.")  # fmt: skip


def opened(run, problem, best):
    """The run's model and its problem; notes are told."""
    from mixfl.runs.reading import read_run_config
    from mixfl.tasks import check_name

    task = problem or str(read_run_config(run).get("task", ""))
    try:
        check_name(task)
    except MixflError as error:
        if problem is not None:
            raise
        raise MixflError(f"{error} Or name it: --problem path.py:problem.") from None
    start_jax({})
    from mixfl.export.trained import trained

    model = trained(run, problem, best)
    for note in model.notes:
        click.echo(f"mixfl: {note}", err=True)
    return model


@click.command()
@RUN
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Rows to predict for: a client store, or a .npz, .parquet, .csv or .jsonl file.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="File to write (.npz, .parquet, .csv, .jsonl); default: shows the first rows."
              )  # fmt: skip
@PROBLEM
@BEST
def predict(run, data, out, problem, best):
    """Predict with the model in RUN, the run folder of a finished run (docs/export.md)."""
    from mixfl.export.tables import check_ending, flat, read_columns, write_columns

    if out is not None:
        check_ending(out)
    columns = read_columns(data)
    outputs = opened(run, problem, best).outputs(columns)
    if out is not None:
        write_columns(outputs, out)
        rows = len(next(iter(outputs.values())))
        click.echo(f"Predictions: {out} ({rows} rows: {', '.join(outputs)})")
        return
    cells = flat(outputs)
    names = list(cells)[:SHOWN_COLUMNS]
    rows = list(zip(*(cells[n] for n in names), strict=True))
    shown = [[str(i), *(f"{v:.6g}" for v in row)] for i, row in enumerate(rows[:SHOWN_ROWS])]
    print_table(["row", *names], shown)
    left = [f"{len(rows) - len(shown)} more rows"] if len(rows) > len(shown) else []
    left += [f"{len(cells) - len(names)} more columns"] if len(cells) > len(names) else []
    if left:
        click.echo(f"{' and '.join(left)}: --out FILE writes all.")


@click.command()
@RUN
@click.option("--to", required=True, type=click.Choice(FORMATS), help="The format.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="File to write; default: model.pt, model.onnx, ... in RUN.")  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path), metavar="PATH",
              help="Rows to compare outputs on; default: some of the problem's own.")  # fmt: skip
@PROBLEM
@BEST
def export(run, to, out, data, problem, best):
    """Write the model in RUN in another format, check that its outputs agree, and add a model card.

    The card is written next to it, as FILE.md (docs/export.md).
    """
    from mixfl.export.tables import read_columns

    columns = read_columns(data) if data is not None else None
    model = opened(run, problem, best)
    from mixfl.export.card import card
    from mixfl.export.formats import ENDINGS
    from mixfl.export.formats import export as write
    from mixfl.runs.files import write_whole

    default = "exported" if to == "safetensors" else "model"  # its model has that name
    out = out or run / f"{default}{ENDINGS[to]}"
    if out.resolve() == (run / "model.safetensors").resolve():
        raise MixflError(f"{out} is the run's own model: choose another --out.")
    checked = write(model, to, out, columns)
    write_whole(out.with_name(f"{out.name}.md"), card(run, model.best).encode())
    which = f" (the best one, of round {model.best})" if best else ""
    click.echo(f"Model{which}: {out}   Card: {out}.md")
    if checked.rows:
        click.echo(
            f"Checked: the outputs for {checked.rows} examples agree (largest difference "
            f"{checked.difference:.1g} of the largest output)."
        )
    else:
        click.echo("Checked: the arrays are the same. (No outputs: the problem has no `predict`.)")


@click.command()
@RUN
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="File to write; default: the terminal.")  # fmt: skip
@BEST
def card(run, out, best):
    """Describe the model in RUN as Markdown: data, algorithm, settings, metrics, privacy spent."""
    from mixfl.export.card import card as text
    from mixfl.runs.files import write_whole
    from mixfl.runs.reading import best_round

    said = text(run, best_round(run) if best else None)
    if out is None:
        click.echo(said, nl=False)
        return
    write_whole(out, said.encode())
    click.echo(f"Card: {out}")
