"""Links that work in the repository also work on the site.

A page in docs/ may link to `../SECURITY.md` or `../examples/plain.py`, and SECURITY.md to
`docs/deploy.md`. Files at the root become pages, programs become pages that show them, and
anything else is copied.
"""

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    name: f"project/{name}" for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link (?!rel=.canonical))[^>]*?"
    r'(?:src|href)="((?:https?:)?//[^"]+)'
)
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)


def root_pages() -> dict[str, str]:
    return {page: (ROOT / name).read_text(encoding="utf-8") for name, page in ROOT_PAGES.items()}


def source_page(path: PurePosixPath) -> str:
    return f"source/{path.with_suffix('')}_py.md"


def source(path: PurePosixPath) -> str:
    code = (ROOT / path).read_text(encoding="utf-8")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n``````python\n{code}``````\n"


def copied(path: PurePosixPath) -> str:
    return f"source/{path}"


def outside(pages: Mapping[str, str]) -> list[PurePosixPath]:
    """What pages (their addresses and texts) link to in the repository, beside pages."""
    found = {
        path for uri, text in pages.items() for target in _targets(text)
        if (path := _in_repository(_origin(uri), target)) is not None
        and not path.is_relative_to("docs") and str(path) not in (*ROOT_PAGES, "README.md")
    }  # fmt: skip
    missing = [str(path) for path in found if not (ROOT / path).is_file()]
    if missing:
        raise ValueError(f"pages link to files that are not there: {', '.join(sorted(missing))}")
    return sorted(found)


def on_the_site(markdown: str, uri: str) -> str:
    """The page's text, its links replaced by those of the site."""

    def replaced(match: re.Match) -> str:
        path = _in_repository(_origin(uri), match[2])
        if path is None or (path.is_relative_to("docs") and not uri.startswith("project/")):
            return match[0]
        target = posixpath.relpath(_uri(path), posixpath.dirname(uri) or ".")
        return f"{match[1]}{target}{match[3]}"

    parts = FENCE.split(markdown)
    return "".join(p if p.startswith("```") else LINK.sub(replaced, p) for p in parts)


def loaded_from_elsewhere(html: str) -> list[str]:
    """Addresses of other servers that a browser would ask by itself when it shows a page."""
    return LOADED.findall(html)


def _origin(uri: str) -> str:
    """Where a page is in the repository."""
    return next((name for name, page in ROOT_PAGES.items() if page == uri), f"docs/{uri}")


def _uri(path: PurePosixPath) -> str:
    if path.is_relative_to("docs"):
        return str(path.relative_to("docs"))
    if str(path) == "README.md":
        return "index.md"
    return ROOT_PAGES.get(str(path)) or (source_page if path.suffix == ".py" else copied)(path)


def _targets(markdown: str) -> list[str]:
    outside_fences = "".join(p for p in FENCE.split(markdown) if not p.startswith("```"))
    return [match[2] for match in LINK.finditer(outside_fences)]


def _in_repository(origin: str, target: str) -> PurePosixPath | None:
    if ":" in target or target.startswith("/"):
        return None
    path = PurePosixPath(posixpath.normpath(posixpath.join(posixpath.dirname(origin), target)))
    return None if path.parts[:1] == ("..",) else path
