"""Where each piece of text was decided, shown in the text itself.

On a terminal every checkpoint layer has a colour, text of full depth has none, and a token that full depth would have
chosen otherwise is inverse. Elsewhere the layer stands in brackets before the text that it holds for:

    [30]The capital of[2] France is[30] Paris[2!] or

`!` marks the inverse ones. The brackets are for eyes; a program reads `--json`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol

from tide_core.request import Audit, TokenOutput


class Shown(Protocol):
    """What painting needs of a token, whether it comes from an engine or from a server."""

    @property
    def text(self) -> str: ...
    @property
    def exit_layer(self) -> int: ...
    @property
    def audit(self) -> str: ...


Paint = Callable[[int, TokenOutput], str]
"""The number of a request and its next token to what is written for it."""

COLOURS = ("32", "36", "33", "35", "34", "31")
RESET = "\033[0m"


class ExitPaint(Protocol):
    def __call__(self, request: int, token: Shown) -> str: ...

    def label(self, layer: int, text: str) -> str:
        """`text` as the legend shows it for a layer."""


def plain(request: int, token: TokenOutput) -> str:
    return token.text


def exit_paint(num_layers: int) -> ExitPaint:
    """What suits standard output."""
    dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return Colours(num_layers) if sys.stdout.isatty() and not dumb else Brackets()


class Colours:
    """A colour per checkpoint layer, in the order in which they come up."""

    def __init__(self, num_layers: int) -> None:
        self._codes: dict[int, str] = {num_layers: ""}

    def __call__(self, request: int, token: Shown) -> str:
        codes = [self._code(token.exit_layer), "7" if token.audit == Audit.DISAGREED else ""]
        return _sgr(token.text, codes)

    def label(self, layer: int, text: str) -> str:
        return _sgr(text, [self._code(layer)])

    def _code(self, layer: int) -> str:
        return self._codes.setdefault(layer, COLOURS[(len(self._codes) - 1) % len(COLOURS)])


class Brackets:
    """The layer in brackets wherever it changes."""

    def __init__(self) -> None:
        self._last: dict[int, str] = {}

    def __call__(self, request: int, token: Shown) -> str:
        if not token.text:  # half a character, or the end
            return ""
        mark = f"[{token.exit_layer}{'!' if token.audit == Audit.DISAGREED else ''}]"
        changed = self._last.get(request) != mark
        self._last[request] = mark
        return f"{mark}{token.text}" if changed else token.text

    def label(self, layer: int, text: str) -> str:
        return text


def _sgr(text: str, codes: list[str]) -> str:
    joined = ";".join(code for code in codes if code)
    return f"\033[{joined}m{text}{RESET}" if joined and text else text
