"""The command completion, and what is completed."""

import click
from click.shell_completion import CompletionItem, get_completion_class

SHELLS = {
    "bash": 'eval "$(mixfl completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(mixfl completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "mixfl completion fish > ~/.config/fish/completions/mixfl.fish",
}
TASKS = ("smile", "text", "movie")
PRESETS = ("paper", "cpu", "demo")


@click.command()
@click.argument("shell", type=click.Choice([*SHELLS]))
@click.pass_context
def completion(context, shell):
    """Print the script that completes commands, options, tasks and algorithms in a shell.

    \b
    To use it:
      bash: eval "$(mixfl completion bash)"   in ~/.bashrc
      zsh:  eval "$(mixfl completion zsh)"    in ~/.zshrc, after compinit
      fish: mixfl completion fish > ~/.config/fish/completions/mixfl.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(context.find_root().command, {}, "mixfl", "_MIXFL_COMPLETE")
    # Not `source()`: for bash it would start one, to look at its version.
    click.echo(script.source_template % script.source_vars())


def starting_with(words, files: bool = False):
    """Completes one of these words; with `files`, or a file."""

    def complete(context, param, incomplete):
        items = [CompletionItem(w) for w in words if w.startswith(incomplete)]
        return items or ([CompletionItem(incomplete, type="file")] if files else [])

    return complete


def add_completion(command: click.Command, algorithms) -> None:
    """To all commands' parameters, by their names."""
    kinds = {
        "task": starting_with(TASKS, files=True),
        "algorithm": starting_with(algorithms, files=True),
        "preset": starting_with(PRESETS),
        "track": starting_with(("mlflow", "wandb")),
    }
    for param in command.params:
        if param.name in kinds and param._custom_shell_complete is None:
            param._custom_shell_complete = kinds[param.name]
    for inner in getattr(command, "commands", {}).values():
        add_completion(inner, algorithms)
