"""The pages to paste in docs run as they are."""

import logging
import re
from pathlib import Path

import pytest

from mixfl.randomness import takes_key

DOCS = Path(__file__).parents[2] / "docs"


def pages(name: str, *kinds: str) -> dict[str, str]:
    found = re.findall(r"<!-- page -->\n```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    return dict(zip(kinds, found, strict=True))


PAGES = pages("models.md", "pytorch", "flax", "equinox", "frozen", "state")
WHO = pages("participation.md", "who")
PRIVATE = pages("privacy.md", "private")
RANDOM = pages("randomness.md", "images", "flax", "equinox")


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_trains_a_module(kind, caplog):
    caplog.set_level(logging.DEBUG, "mixfl")
    names: dict = {}
    exec(compile(PAGES[kind], f"docs/models.md ({kind})", "exec"), names)
    assert "never reached" not in caplog.text
    assert names["result"].metrics[-1]["round"] == 5
    assert "module" in names


@pytest.mark.parametrize("kind", RANDOM)
def test_a_page_trains_with_draws(kind, caplog):
    caplog.set_level(logging.DEBUG, "mixfl")
    names: dict = {}
    exec(compile(RANDOM[kind], f"docs/randomness.md ({kind})", "exec"), names)
    assert "never reached" not in caplog.text
    assert names["result"].metrics[-1]["round"] == 5
    (term, _) = names["problem"].terms
    assert takes_key(term.loss)


def test_a_page_draws_its_clients():
    names: dict = {}
    exec(compile(WHO["who"], "docs/participation.md", "exec"), names)
    last = names["result"].metrics[-1]
    assert last["clients/dropped"] + last["clients/late"] > 0
    assert 0 < last["clients/federated"] < 10


def test_a_page_trains_with_privacy():
    names: dict = {}
    exec(compile(PRIVATE["private"], "docs/privacy.md", "exec"), names)
    last = names["result"].metrics[-1]
    assert 3.8 < last["privacy/epsilon"] <= 4
    assert last["eval/loss"] < 3


def test_a_page_predicts():
    (found,) = re.findall(
        r"<!-- predict -->\n```python\n(.*?)```", (DOCS / "export.md").read_text(), re.DOTALL
    )
    names: dict = {}
    exec(compile(found, "docs/export.md", "exec"), names)
    params = {"w": names["jnp"].ones(3)}
    outputs = names["problem"].predict(params, {"x": names["x"]})
    assert outputs["p"].shape == (100,)
