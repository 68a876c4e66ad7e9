"""The documentation site: links, reference, formulas, tutorials. `make docs` builds it."""

import json
import re
from pathlib import Path

import nbformat
import pytest
import yaml

import mixfl
from mixfl.settings import KEYS
from website import links, reference, tutorials

ROOT = Path(__file__).parents[2]
NOTEBOOKS = tutorials.notebooks()


class Loader(yaml.SafeLoader):
    """mkdocs.yml names functions, which are not wanted here."""


for tag in ("name", "object/apply"):
    Loader.add_multi_constructor(f"tag:yaml.org,2002:python/{tag}:", lambda *_: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def test_every_public_name_is_in_the_reference_with_its_example():
    page = reference.pages()["reference/api.md"]
    for name in mixfl.__all__:
        if name in reference.CONSTANTS:
            continue
        entry = page.partition(f"### mixfl.{name} {{ #mixfl.{name} }}")[2].partition("\n### ")[0]
        assert "```python\n" in entry, name
        assert "```pycon\n>>> " in entry, name
    assert re.search(r"```pycon\n(?:(?!```).)*\n\n", page, re.DOTALL) is None


def test_every_key_and_command_is_in_the_reference():
    pages = reference.pages()
    for key, field in KEYS.items():
        assert f"## {key} {{ #{key} }}" in pages["reference/keys.md"]
        assert field.metadata["help"][1:12] in pages["reference/keys.md"].replace("\\", "")
    commands = pages["reference/commands.md"]
    for path, command in reference.walk(reference.cli, ("mixfl",)):
        assert f"# {' '.join(path)} {{" in commands
        for option in (o for p in command.params for o in p.opts if o.startswith("--")):
            hidden = any(getattr(p, "hidden", False) and option in p.opts for p in command.params)
            assert hidden or option in commands, (path, option)


def test_links_work_on_the_site_too():
    text = "[a](../SECURITY.md#x) [b](../examples/plain.py) [c](runs.md) [d](https://x.y)\n"
    fenced = "```\n[e](../SECURITY.md)\n```\n"
    assert links.on_the_site(text + fenced, "models.md") == (
        "[a](project/SECURITY.md#x) [b](source/examples/plain_py.md) [c](runs.md) "
        "[d](https://x.y)\n" + fenced
    )
    back = links.on_the_site("[f](docs/deploy.md#security)", "project/SECURITY.md")
    assert back == "[f](../deploy.md#security)"
    assert [str(p) for p in links.outside({"models.md": text})] == ["examples/plain.py"]
    with pytest.raises(ValueError, match=r"gone\.py"):
        links.outside({"models.md": "[g](../gone.py)"})


def test_there_is_one_way_to_install():
    """README, the landing page and getting started say the same."""
    for name in ("README.md", "docs/index.md", "docs/getting_started.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        lines = [x.strip() for x in re.findall(r"^ +((?:git clone|pip install) .*)$", text, re.M)]
        words = [line.partition("#")[0].strip() for line in lines]
        assert words[:2] == ["git clone REPOSITORY mixfl", "pip install ./mixfl"], name
        assert all(line.startswith("pip install './mixfl[") for line in words[2:]), name
        assert lines[0].endswith("# this repository's address or folder")
        assert lines[1].endswith("# once released: pip install mixfl")


def test_formulas_become_mathml_and_unknown_commands_are_errors():
    formulas = pytest.importorskip("website.formulas")
    page = formulas.as_mathml(r'<span class="arithmatex">\(\tilde g &lt; \eta\)</span>')
    assert page.startswith("<math")
    assert "η" in page or "&#x003B7;" in page
    with pytest.raises(ValueError, match="unheardof"):
        formulas.as_mathml(r'<span class="arithmatex">\(\unheardof x\)</span>')


def test_all_pages_are_in_the_navigation():
    def pages(part):
        if isinstance(part, str):
            return {part}
        return {p for x in (part.values() if isinstance(part, dict) else part) for p in pages(x)}

    written = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    written = {p for p in written if not p.startswith("results/")}
    made = {*reference.pages(), *links.root_pages()} if NOTEBOOKS else set()
    made |= {f"tutorials/{path.stem}.md" for path in NOTEBOOKS}
    assert pages(CONFIG["nav"]) == written | made


def test_the_theme_loads_nothing_from_elsewhere():
    assert CONFIG["theme"]["font"] is False
    assert "offline" in CONFIG["plugins"]
    scripts = CONFIG["extra"]["polyfills"] + CONFIG["extra_css"]
    assert all((ROOT / "docs" / path).is_file() for path in scripts)
    assert any("iframe-worker" in path for path in scripts)  # otherwise the plugin adds an address


def test_what_a_browser_would_load_is_found():
    html = '<a href="https://a.b">x</a><link rel="canonical" href="https://a.b"><img src="c.png">'
    assert links.loaded_from_elsewhere(html) == []
    html += (
        '<script async src="https://unpkg.com/x"></script><link rel="stylesheet" href="//d.e/f">'
    )
    assert links.loaded_from_elsewhere(html) == ["https://unpkg.com/x", "//d.e/f"]


# Tutorials


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(nbformat.from_dict(notebook))
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}


def test_a_notebook_becomes_a_page():
    html = nbformat.v4.new_output("display_data", {"text/html": "<b>x</b>\n\n<i>y</i>"})
    drawn = nbformat.v4.new_output("display_data", {"image/png": "aGVsbG8="})
    said = nbformat.v4.new_output("stream", text="\x1b[31mred\x1b[0m\n")
    cells = [
        nbformat.v4.new_markdown_cell("# Title\n\n[next](2_b.ipynb)"),
        nbformat.v4.new_code_cell("1 + 1", outputs=[said, html, drawn]),
    ]
    page, pictures = tutorials.page(nbformat.v4.new_notebook(cells=cells), "1_a.ipynb")
    assert page.startswith("# Title\n")
    for part in ("[next](2_b.md)", "```python\n1 + 1\n```", "```text\nred\n```"):
        assert part in page
    assert "<b>x</b>\n<i>y</i>" in page
    assert "(1_a/1-2.png)" in page
    assert pictures == {"1-2.png": b"hello"}


@pytest.mark.system
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorials_run_and_end_in_a_picture(path):
    if path.stem == "2_pytorch_and_pandas":
        pytest.importorskip("torch")
    cells = tutorials.execute(path).cells
    drawing = [i for i, cell in enumerate(cells) if "image/png" in str(cell.get("outputs", ""))]
    assert drawing
    headings = [i for i, cell in enumerate(cells) if cell.source.startswith("#")]
    assert drawing[-1] > headings[-1]  # in the last section
    _, pictures = tutorials.page(tutorials.executed(path), path.name)
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
