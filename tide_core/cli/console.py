"""Standard error: logs, a status line, progress, a note at the end. All but logs are shown on a terminal only."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Protocol

from tide_core.models.load_progress import notifying


class Bar(Protocol):
    def update(self) -> object: ...


def prepare(*, verbose: bool) -> None:
    """Log warnings (with `verbose` also TIDE's own information) to standard error; let standard output accept any
    text."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(show_traces=verbose))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("tide").setLevel(logging.INFO if verbose else logging.WARNING)
    if sys.stdout is None:  # the process started with it closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a latin-1 terminal shows ? for other characters


@contextlib.contextmanager
def status(text: str, *, quiet: bool) -> Iterator[None]:
    """Show `text` while the body runs, and how far a load has come in it."""
    if quiet or not _on_terminal():
        yield
        return
    shares: set[int] = set()

    def show(read: int = 0, total: int = 0) -> None:
        share = 100 * read // total if total else 0
        if share not in shares:
            shares.add(share)
            print(f"\r\033[Ktide: {text} …{f' {share} %' if total else ''}", end="", file=sys.stderr, flush=True)

    show()
    try:
        with notifying(show):
            yield
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(num_prompts: int, *, quiet: bool) -> Iterator[Bar]:
    from tqdm import tqdm

    hidden = quiet or not _on_terminal()
    with tqdm(total=num_prompts, desc="tide", unit="prompt", file=sys.stderr, disable=hidden, leave=False) as bar:
        yield bar


def note(text: str, *, quiet: bool) -> None:
    if not quiet and _on_terminal():
        print(f"tide: {text}", file=sys.stderr, flush=True)


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _Formatter(logging.Formatter):
    """One line per record; traces only with `show_traces`."""

    def __init__(self, *, show_traces: bool) -> None:
        super().__init__()
        self._show_traces = show_traces

    def format(self, record: logging.LogRecord) -> str:
        line = f"tide: {record.levelname.lower()}: {record.getMessage()}"
        if not record.exc_info:
            return line
        if self._show_traces:
            return f"{line}\n{self.formatException(record.exc_info)}"
        error = record.exc_info[1]
        return f"{line}: {type(error).__name__}: {error} (-v shows where)"
