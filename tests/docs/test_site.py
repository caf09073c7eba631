"""The site builds without a warning, needs nothing from elsewhere, and every link in it leads somewhere."""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.documents import ROOT
from tools import site_hooks


class Page(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values["id"]} if "id" in values else set()
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag in ("link", "script", "img", "iframe", "source") and values.get("rel") != "canonical":
            self.loads |= {values[name] for name in ("href", "src") if values.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "WARNING" not in output, output
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}


def test_every_document_is_a_page(pages: dict[str, Page]) -> None:
    for document in (ROOT / "docs").rglob("*.md"):
        assert document.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in pages


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[str, Page]) -> None:
    dead = []
    for name, page in pages.items():
        if name == "404.html":  # its links start at the root of the site
            continue
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            found = pages.get(target) or pages.get(posixpath.join(target, "index.html"))
            exists = found is not None or (site / target).is_file()
            if not exists or (parts.fragment and found is not None and unquote(parts.fragment) not in found.anchors):
                dead.append((name, link))
    assert dead == []


def test_a_reader_loads_nothing_from_elsewhere(pages: dict[str, Page]) -> None:
    away = {url for page in pages.values() for url in page.loads if urlsplit(url).netloc}
    assert away == set()


def test_the_map_shows_its_figures(site: Path, pages: dict[str, Page]) -> None:
    """As files of the site: the theme would fetch what draws other kinds of diagrams from elsewhere."""
    figures = {load for load in pages["architecture.html"].loads if load.endswith(".svg")}
    assert len(figures) == 5
    assert all((site / figure).is_file() for figure in figures)


def test_files_of_the_repository_that_are_linked_are_in_the_site(site: Path) -> None:
    copy = site / "repository" / "protos" / "tide" / "v1" / "tide.proto"
    assert copy.read_bytes() == (ROOT / "protos" / "tide" / "v1" / "tide.proto").read_bytes()


def test_no_list_and_no_table_was_left_as_text(site: Path) -> None:
    """The site's Markdown needs an empty line before a list; viewers of repositories do not."""
    left = []
    for path in site.rglob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.DOTALL):
            if re.search(r"\n(?:[-*] |\d+\. |\|)|^\|", paragraph):
                left.append((path.name, paragraph[:80]))
    assert left == []


def test_links_are_as_the_site_needs_them() -> None:
    text = (
        "[a](../README.md#models) [b](modes.md) `[c](../LICENSE)` [`d`](../LICENSE) [e](../examples) [f](https://x.y)\n"
    )
    assert site_hooks.in_site(text, "serving.md") == (
        "[a](repository/README.md#models) [b](modes.md) `[c](../LICENSE)` [`d`](repository/LICENSE) e [f](https://x.y)\n"
    )
    assert site_hooks.in_site("[a](docs/modes.md)", "repository/README.md") == "[a](../modes.md)"
    assert site_hooks.in_site("```\n[a](../LICENSE)\n```\n", "serving.md") == "```\n[a](../LICENSE)\n```\n"
    assert site_hooks.in_site("[a](nowhere.md)", "serving.md") == "[a](nowhere.md)"
    assert site_hooks.linked_files("[a](../LICENSE) [b](modes.md)", "docs/serving.md") == {"LICENSE"}
