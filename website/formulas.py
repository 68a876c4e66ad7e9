"""Formulas as MathML, which browsers draw by themselves: no script, no font, no network."""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def as_mathml(page: str) -> str:
    return FORMULA.sub(_formula, page)


def _formula(found: re.Match) -> str:
    block = found[1] == "div"
    text = html.unescape(found[2]).strip()
    latex = text.removeprefix("\\[" if block else "\\(").removesuffix("\\]" if block else "\\)")
    drawn = convert(latex.strip(), display="block" if block else "inline")
    if "\\" in re.sub(r"<annotation.*?</annotation>", "", drawn, flags=re.DOTALL):
        raise ValueError(f"latex2mathml does not know a command in: {latex.strip()}")
    return f'<div class="formula">{drawn}</div>' if block else drawn
