"""Finds an algorithm by name: one of mixfl's, one from an installed package, or `path.py:name`.

A package offers algorithms as entry points:

    [project.entry-points."mixfl.algorithms"]
    fedprox = "my_package.fed_prox:fed_prox"
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mixfl.algorithms.contract import Recipe
from mixfl.errors import MixflError
from mixfl.tasks.user_file import (
    attribute_of,
    check_algorithm,
    describe,
    installed,
    is_file_name,
    place,
)


def found(given: str | Recipe, known: dict[str, Recipe]) -> Recipe:
    if isinstance(given, Recipe):
        own = given.id not in known and not given.place
        recipe = replace(given, place=place_of(given)) if own else given
    else:
        check_algorithm(given, known)
        recipe = known[given] if given in known else _elsewhere(given)
    if recipe.id in known and recipe.make is not known[recipe.id].make:
        raise MixflError(
            f"{recipe.name}: an algorithm of your own has the id of mixfl's '{recipe.id}': give it "
            "another one."
        )
    return recipe


def _elsewhere(name: str) -> Recipe:
    if is_file_name(name):
        path, attribute = place(name, "")
        if not attribute:
            raise MixflError(f"{name}: which algorithm of the file? Write path.py:name.")
        where = f"{path.resolve()}:{attribute}"
        given = checked(attribute_of(path, attribute, Recipe, "algorithm"), where)
        return replace(given, place=where)
    try:
        recipe = checked(installed()[name].load(), f"the entry point {name}")
    except (ImportError, AttributeError) as error:
        raise MixflError(f"the algorithm '{name}' can't be imported: {describe(error)}") from None
    if recipe.id != name:
        raise MixflError(
            f"the entry point {name} is of an algorithm whose id is '{recipe.id}': both names must "
            "be the same."
        )
    return recipe


def checked(given: Any, where: str) -> Recipe:
    if not isinstance(given, Recipe):
        raise MixflError(
            f"{where} is {type(given).__name__}: expected an algorithm, a function with "
            "@algorithm(...) above it (docs/algorithms.md)."
        )
    return given


def place_of(recipe: Recipe) -> str:
    """The file and the name by which a command finds it again. Nothing, if that is not possible:
    in a notebook, inside a function."""
    code = getattr(recipe.make, "__code__", None)
    name = getattr(recipe.make, "__qualname__", "")
    if code is None or not name.isidentifier() or not Path(code.co_filename).is_file():
        return ""
    return f"{Path(code.co_filename).resolve()}:{name}"
