"""Hooks of mkdocs: how the site includes files of the repository outside docs/.

Documents link to each other and to files of the repository by relative paths, as in a checkout. In the site the files
of `PAGES` are pages too, a link to any other file leads to a copy of it under repository/, and a link to a folder
becomes plain text. A link to a missing file stays as it is, and the strict build refuses it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "k8s/README.md", "k8s/observability/README.md")
COPIES = "repository"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)


def repository_path(uri: str) -> str:
    """The path in the repository of a page of the site."""
    return uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"docs/{uri}"


def site_uri(path: str) -> str:
    """The path in the site of a file of the repository. A copy of Markdown gets a suffix, or it would be a page."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{COPIES}/{path}" + (".txt" if path.endswith(".md") and path not in PAGES else "")


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """`markdown` with a change made to all text that is not code."""
    parts, end = [], 0
    fences = [found.span() for found in FENCE.finditer(markdown)]
    spans = sorted(fences + [s for s in code_spans(markdown) if not any(a <= s[0] < b for a, b in fences)])
    for start, stop in spans:
        if start < end:
            continue
        parts += [change(markdown[end:start]), markdown[start:stop]]
        end = stop
    return "".join([*parts, change(markdown[end:])])


def code_spans(markdown: str) -> list[tuple[int, int]]:
    """Spans of inline code, except code that is the text of a link."""
    return [
        found.span()
        for found in CODE.finditer(markdown)
        if not (markdown[: found.start()].endswith("[") and markdown[found.end() :].startswith("]("))
    ]


def linked_files(markdown: str, path: str, root: Path = ROOT) -> set[str]:
    """Files of the repository outside docs/ that a document links to."""
    found = set()

    def look(text: str) -> str:
        for link in LINK.finditer(text):
            target = target_of(link[3], path)
            if target is not None and not target[0].startswith("docs/") and (root / target[0]).is_file():
                found.add(target[0])
        return text

    outside_code(markdown, look)
    return found


def target_of(link: str, path: str) -> tuple[str, str] | None:
    """The file of the repository that a link in the document at `path` leads to, with anchor; None for other links."""
    if "://" in link or link.startswith(("#", "/", "mailto:")):
        return None
    place, mark, anchor = link.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(place))), mark + anchor


def in_site(markdown: str, uri: str, root: Path = ROOT) -> str:
    """A document with its links as the site needs them."""
    path = repository_path(uri)

    def rewrite(link: re.Match[str]) -> str:
        target = target_of(link[3], path)
        if target is None or not (root / target[0]).exists():
            return link[0]
        if (root / target[0]).is_dir():
            return link[2]
        relative = posixpath.relpath(site_uri(target[0]), posixpath.dirname(uri) or ".")
        return f"{link[1]}[{link[2]}]({relative}{target[1]})"

    return outside_code(markdown, lambda text: LINK.sub(rewrite, text))


# Called by mkdocs, by these names.


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name in PAGES:
        content = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, f"{COPIES}/{name}", content=content))
    copies: set[str] = set()
    for file in list(files.documentation_pages()):
        copies |= linked_files(file.content_string, repository_path(file.src_uri))
    for path in sorted(copies - set(PAGES)):
        files.append(File.generated(config, site_uri(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return in_site(markdown, page.file.src_uri)
