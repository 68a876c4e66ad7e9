"""Renders page templates. Values are escaped, and a page is one file that loads nothing."""

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    text = _environment().get_template(template).render(values)
    return text.encode(errors="replace").decode()  # folder names need not be Unicode


def asset(name: str) -> Markup:
    """A file in this folder, unescaped."""
    return Markup((FOLDER / name).read_text())


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = asset
    # `tojson` escapes <, >, & and ', so that nothing in the data can end its script element.
    environment.policies["json.dumps_kwargs"] = dict(
        allow_nan=False, ensure_ascii=False, separators=(",", ":")
    )
    return environment
