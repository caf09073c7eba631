"""Progress as plain lines."""

import re

import pytest

from tide_core.calibration.progress import LineProgress


def test_lines_show_every_stage_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress(every_s=0.0)
    with progress.stage("collect", 4, "sequence") as stage:
        stage.update(2, loss=0.12345)
        stage.update(2)
    progress.note("done")

    lines = [re.sub(r", \d+ s", ", - s", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "tide: collect: 2/4 sequence, - s, loss 0.1235",
        "tide: collect: 4/4 sequence, - s, loss 0.1235",
        "tide: done",
    ]


def test_a_line_shows_the_rate_and_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tide_core.calibration.progress.time.monotonic", lambda: now[0])
    with LineProgress(every_s=5.0).stage("collect", 1000, "sequence") as stage:
        now[0] = 10.0
        stage.update(20)
        now[0] = 500.0
        stage.update(980)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "tide: collect: 20/1000 sequence, 10 s, 2/s, 8 min left"
    assert last == "tide: collect: 1000/1000 sequence, 500 s"


def test_units_done_before_are_counted_and_are_not_in_the_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tide_core.calibration.progress.time.monotonic", lambda: now[0])
    with LineProgress(every_s=5.0).stage("collect", 1000, "sequence", 900) as stage:
        now[0] = 10.0
        stage.update(20)
    [line] = capsys.readouterr().err.splitlines()
    assert line == "tide: collect: 920/1000 sequence, 10 s, 2/s, 40 s left"
