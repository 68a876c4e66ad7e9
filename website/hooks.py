"""What MkDocs calls while it builds the site: pages that are made, links, formulas.

Reference pages come from the docstrings, keys and commands themselves, tutorials from notebooks,
and what pages link to outside docs/ becomes part of the site.
"""

import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from website import formulas, links, reference, tutorials  # noqa: E402


def on_config(config):
    # mixfl itself, wherever it is installed: the site documents this tree.
    config.watch += [str(ROOT / "mixfl"), str(ROOT / "website")]
    return config


def on_files(files, config):
    def add(uri, **content):
        files.append(File.generated(config, uri, **content))

    made = reference.pages() | links.root_pages()
    for notebook in tutorials.notebooks():
        name = f"tutorials/{notebook.stem}"
        made[f"{name}.md"], pictures = tutorials.page(tutorials.executed(notebook), notebook.name)
        for picture, content in pictures.items():
            add(f"{name}/{picture}", content=content)
    written = {f.src_uri: f.content_string for f in files if f.src_uri.endswith(".md")}
    for path in links.outside(written | made):
        if path.suffix == ".py":
            made[links.source_page(path)] = links.source(path)
        else:
            add(links.copied(path), abs_src_path=str(ROOT / path))
    for uri, content in made.items():
        add(uri, content=content)
    return files


def on_page_markdown(markdown, page, config, files):
    return links.on_the_site(markdown, page.file.src_uri)


def on_post_build(config):
    loaded = {
        f"{page.name}: {address}"
        for page in Path(config.site_dir).rglob("*.html")
        for address in links.loaded_from_elsewhere(page.read_text(encoding="utf-8"))
    }
    if loaded:
        raise PluginError(f"pages would load from other servers: {', '.join(sorted(loaded))}")


def on_page_content(html, page, config, files):
    return formulas.as_mathml(html)
