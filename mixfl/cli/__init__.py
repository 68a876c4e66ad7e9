"""The command line, which only parses. Commands import what needs JAX when they run.

The commands are in training, tuning, watch, results, models, problems, data, privacy, flower,
paper, doctor and completion. They share options, groups (help), terminal (printing) and process
(starting JAX, ending the process).
"""

import os
import sys
import traceback

import click

import mixfl
from mixfl.cli import (
    completion,
    data,
    doctor,
    flower,
    models,
    paper,
    privacy,
    problems,
    results,
    training,
    tuning,
    watch,
)
from mixfl.cli.groups import Grouped, add_examples, near_choice
from mixfl.cli.options import ALGORITHMS
from mixfl.cli.process import connected, end, start_jax
from mixfl.cli.terminal import print_table
from mixfl.errors import MixflError

__all__ = ["ALGORITHMS", "cli", "main", "print_table", "start_jax"]


@click.group(
    cls=Grouped, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(mixfl.__version__, prog_name="mixfl")
def cli():
    """Mixed federated learning: train one model on clients' data and at the server.

    TASK is the name of a task (smile, text, movie) or path.py:problem, your own mixfl.Problem.
    """


for command in (
    training.run, training.compare, training.sweep, tuning.tune,
    paper.reproduce, paper.costs, paper.bounds, paper.dissimilarity,
    problems.check, problems.keys, problems.diagnose,
    watch.watch, results.report, results.plot, results.rewind, results.recommend, results.sample,
    models.predict, models.export, models.card,
    data.data, flower.flower, privacy.privacy, doctor.doctor, completion.completion,
):  # fmt: skip
    cli.add_command(command)
add_examples(cli)
completion.add_completion(cli, ALGORITHMS)


def main():
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.message += near_choice(error)
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.stdout.flush()
        os._exit(130)  # without waiting for an evaluation in its thread
    except MixflError as error:
        click.echo(f"mixfl: {error}", err=True)
        end(error.exit_code, error.everywhere)
    except BrokenPipeError:
        end(1)
    except OSError as error:
        click.echo(f"mixfl: {error.filename or 'a file'}: {error.strerror or error}.", err=True)
        end(2, getattr(error, "everywhere", False))
    except Exception as error:
        # XLA raises a RuntimeError for this.
        full = isinstance(error, RuntimeError) and "Out of memory" in str(error)
        if full or isinstance(error, MemoryError):
            advice = "lower cohort_chunk or central_chunk, or make the model smaller"
            click.echo(f"mixfl: out of memory: {advice}.", err=True)
            end(2)
        if not connected():
            raise
        traceback.print_exc()
        end(1)
