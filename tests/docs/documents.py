"""The documents of the repository and their parts: code blocks, commands, links, headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?) *$", re.MULTILINE)
NAMED = re.compile(r'<a id="([^"]+)">')
SHELLS = ("", "bash", "sh")
HISTORY = ("CHANGELOG.md", "docs/lab/")
"""Documents, or folders of them, that also describe the past: files that they name may be gone."""


@dataclass(frozen=True)
class Document:
    """One Markdown file, by its path in the repository."""

    path: str

    @property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    def blocks(self, *languages: str) -> list[str]:
        """Code blocks of these languages, without indentation."""
        return [
            re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
            for found in FENCE.finditer(self.text)
            if found[2] in languages
        ]

    @property
    def prose(self) -> str:
        """The text without code blocks."""
        return FENCE.sub("", self.text)

    @property
    def spans(self) -> list[str]:
        """Inline code of the prose."""
        return SPAN.findall(self.prose)

    @property
    def links(self) -> list[str]:
        return LINK.findall(SPAN.sub("code", self.prose))

    @property
    def anchors(self) -> set[str]:
        """Anchors of headings, as viewers of repositories make them, and explicit ones."""
        return {slug(heading) for heading in HEADING.findall(self.prose)} | set(NAMED.findall(self.text))

    @property
    def lines(self) -> list[str]:
        """Lines of shell blocks, continued lines joined, and inline code."""
        blocks = "\n".join(self.blocks(*SHELLS)).replace("\\\n", " ")
        return [line.strip() for line in blocks.splitlines()] + self.spans


def documents() -> list[Document]:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    others = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "protos/README.md")]
    others += sorted((ROOT / "k8s").rglob("*.md"))
    return [Document(path.relative_to(ROOT).as_posix()) for path in [*others, *pages]]


def slug(heading: str) -> str:
    plain = re.sub(r"[^\w\- ]", "", LINK.sub("", heading).replace("`", "").lower())
    return plain.replace(" ", "-")


def commands(document: Document, *programs: str) -> Iterator[list[str]]:
    """The words of every command line that calls one of these programs, from the program on."""
    for line in document.lines:
        words = line.split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words and words[0].removeprefix(".venv/bin/") in programs:
            line = line[line.index(words[0]) :]
            first, *rest = shlex.split(line, comments=True)
            yield [first.removeprefix(".venv/bin/"), *rest]
