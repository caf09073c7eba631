"""The status line: shown on a terminal only, and gone when its block ends."""

from __future__ import annotations

import io

import pytest

from tide_core.cli import console
from tide_core.models.load_progress import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_status_line_shows_each_percent_of_a_load_once_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with console.status("loading it", quiet=False):
        progress = LoadProgress("it", 1000)
        for _ in range(1000):
            progress.add(1)
    written = terminal.getvalue().split("\r\033[K")
    assert written[1] == "tide: loading it …"
    assert written[2] == "tide: loading it … 1 %"
    assert written[-2] == "tide: loading it … 100 %"
    assert len(written) == len(set(written[1:-1])) + 2 == 103
    assert written[-1] == ""


def test_nothing_is_shown_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, quiet in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        with console.status("loading it", quiet=quiet):
            LoadProgress("it", 10).add(10)
        assert stream.getvalue() == ""
