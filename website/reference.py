"""The reference, made from what there is: docstrings, keys and commands."""

import functools
import importlib
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

import click
from msgspec import inspect as types

import mixfl
from mixfl.algorithms.contract import Recipe
from mixfl.cli import cli
from mixfl.settings import KEYS, Settings
from mixfl.validation import expected, field_types

# A name is in the first group whose modules its own module is one of, or below one of.
GROUPS = {
    "Data": ("mixfl.data.",),
    "Problems": ("mixfl.problem.", "mixfl.randomness.", "mixfl.client_evaluation."),
    "Training": ("mixfl.runs.", "mixfl.settings.", "mixfl.privacy.", "mixfl.process."),
    "Algorithms": ("mixfl.algorithms.",),
    "Errors": ("mixfl.errors.",),
    "More": ("mixfl.",),
}
CONSTANTS = ("ALGORITHMS", "__version__")
Text = Iterator[str]


def pages() -> dict[str, str]:
    return {
        "reference/api.md": "\n".join(api()),
        "reference/keys.md": "\n".join(keys()),
        "reference/commands.md": "\n".join(commands()),
    }


# Python


def public_names() -> dict[str, list[str]]:
    """The names of each group."""
    grouped: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name in mixfl.__all__:
        if name in CONSTANTS:
            continue
        module = f"{mixfl._WHERE[name]}."
        group = next(g for g, own in GROUPS.items() if module.startswith(own))
        grouped[group].append(name)
    return {group: names for group, names in grouped.items() if names}


def api() -> Text:
    yield "# Python\n"
    yield (
        "Every public name, with an example that the tests run. In the examples, `loss`, `init`, "
        "`clients`, `central`, `test` and `problem` are those of a small problem, such as the one "
        "of [getting started](../getting_started.md).\n"
    )
    for group, names in public_names().items():
        yield f"## {group}\n"
        for name in names:
            yield from entry(f"mixfl.{name}", getattr(mixfl, name))
        if group == "Algorithms":
            ids = ", ".join(f"`{name}`" for name in mixfl.ALGORITHMS)
            yield f"`mixfl.ALGORITHMS` maps the ids of all algorithms to them: {ids}.\n"
    for module in ("mixfl.flower", "mixfl.pytorch"):
        found = importlib.import_module(module)
        yield f"## {module}\n"
        for name in found.__all__:
            yield from entry(f"{module}.{name}", getattr(found, name))


def entry(name: str, thing: Any) -> Text:
    """The name as a heading, its signature, its docstring, and the methods of a class."""
    yield f"### {name} {{ #{name} }}\n"
    yield f"```python\n{signature(name, thing)}\n```\n"
    yield docstring(thing.make if isinstance(thing, Recipe) else thing) + "\n"
    if isinstance(thing, Recipe):
        used = ", ".join(f"[`{k}`](keys.md#{k})" for k in KEYS if k in thing.uses)
        yield f"Id `{thing.id}`. Its settings are the keys {used}.\n"
    for method, member in methods(thing) if inspect.isclass(thing) else ():
        short = f"{name.rpartition('.')[2]}.{method}"
        yield f"#### {short} {{ #{name}.{method} }}\n"
        if not isinstance(member, property):
            yield f"```python\n{signature(short, getattr(thing, method))}\n```\n"
        yield docstring(getattr(member, "__func__", member)) + "\n"


def methods(of: type) -> list[tuple[str, Any]]:
    """Those that are explained."""
    kinds = (classmethod, staticmethod, property)
    members = ((n, m) for n, m in vars(of).items() if not n.startswith("_"))
    return [
        (n, m) for n, m in members if (inspect.isfunction(m) or isinstance(m, kinds)) and m.__doc__
    ]


def signature(name: str, thing: Any) -> str:
    """With defaults, without types: these are in the text, and in editors."""
    if isinstance(thing, Recipe) or thing is Settings:
        return f"{name}(**settings)"
    try:
        parameters = [*inspect.signature(thing).parameters.values()]
    except ValueError:  # an exception without a constructor of its own
        return f"{name}(message)"
    said, star = [], False
    for p in parameters:
        if p.name == "self":
            continue
        if p.kind == p.KEYWORD_ONLY and not star:
            star = True
            said.append("*")
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        said.append(mark + p.name + default(p.default))
    line = f"{name}({', '.join(said)})"
    return line if len(line) <= 88 else f"{name}(\n    " + ",\n    ".join(said) + ",\n)"


def default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    plain = isinstance(value, str | int | float | bool | tuple | None)
    return f"={value!r}" if plain else "=..."


def docstring(thing: Any) -> str:
    """Markdown as it is; examples after >>> as blocks of code; mentions of names as links."""
    text = (inspect.getdoc(thing) or "") + "\n"
    text = re.sub(r"^>>> (?:.+\n)+", r"```pycon\n\g<0>```\n", text, flags=re.MULTILINE)
    text = re.sub(r"`docs/(\w+)\.md`|\bdocs/(\w+)\.md\b", lambda m: _page(m[1] or m[2]), text)
    parts = text.split("```")
    parts[::2] = [re.sub(r"`(mixfl\.(\w+))[^`]*`", _mention, part) for part in parts[::2]]
    return "```".join(parts)


def _page(name: str) -> str:
    return f"[{name}](../{name}.md)"


def _mention(found: re.Match) -> str:
    known = found[2] in mixfl.__all__ and found[2] not in CONSTANTS
    return f"[{found[0]}](#{found[1]})" if known else found[0]


# Keys


def keys() -> Text:
    yield "# Keys\n"
    yield (
        "The settings of a run: keyword arguments in Python, `--set key=value` in a command, lines "
        "of a TOML file. `mixfl keys TASK` also shows the values that a preset gives them, "
        "and the keys of tasks. [Models](../models.md) and [runs](../runs.md) explain how they "
        "work together.\n"
    )
    hints = field_types(Settings)
    for name, field in KEYS.items():
        users = [id for id, recipe in mixfl.ALGORITHMS.items() if name in recipe.uses]
        some = "" if len(users) == len(mixfl.ALGORITHMS) else f" Used by {code(users)}."
        unset = field.default is None
        yield f"## {name} {{ #{name} }}\n"
        yield (
            f"{sentence(field.metadata['help'])} {sentence(kind(hints[name]))} "
            f"{'Unset by default.' if unset else f'Default: `{toml(field.default)}`.'}{some}\n"
        )


def kind(hint: Any) -> str:
    """What a value may be, in words."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    others = [m for m in members if get_origin(m) is not Callable]
    words = expected(types.type_info(functools.reduce(operator.or_, others)))
    return words + (", or a function" if len(others) < len(members) else "")


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def sentence(text: str) -> str:
    text = text.replace("|", "\\|").replace("_i\\|", "\\_i\\|").rstrip(".")
    return text[0].upper() + text[1:] + "."


def code(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


# Commands


def commands() -> Text:
    yield "# Commands\n"
    yield "As `mixfl COMMAND --help` prints it.\n"
    for path, command in walk(cli, ("mixfl",)):
        level = "##" if len(path) <= 2 else "###"
        name = " ".join(path)
        yield f"{level} {name} {{ #{'-'.join(path)} }}\n"
        context = click.Context(command, info_name=name, max_content_width=80, terminal_width=80)
        yield f"```text\n{command.get_help(context)}\n```\n"


def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, member in getattr(command, "commands", {}).items():
        if not member.hidden:
            yield from walk(member, (*path, name))
