"""Every panel drawn from what a real run exported: each query gives data, or it is known why not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tools.dashboard import RECORDED, dashboard, filled, panels
from tools.promql import Recording
from tools.promql_syntax import parse
from tools.render_dashboard import PAINTERS, draw, evaluated

NOTHING_EXPECTED = {
    "Requests failed by us/A": "no request failed through a fault of the service",
    "Scores that are no number/A": "no router gave one",
}
TARGETS = {f"{panel['title']}/{target['refId']}": target for panel in panels() for target in panel["targets"]}


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording.read(RECORDED)


def test_the_recording_is_small_and_long_enough(recording: Recording) -> None:
    assert RECORDED.stat().st_size < 200_000
    assert len(recording.times) > 20
    assert recording.times[-1] > 100
    assert all(len(values) == len(recording.times) for _, values in recording.series)


@pytest.mark.parametrize("where", TARGETS)
def test_a_query_gives_data_or_it_is_known_why_not(where: str, recording: Recording) -> None:
    node = parse(filled(TARGETS[where]["expr"], 4 * recording.interval_s))
    found = [value for at in recording.times for value in recording.vector(node, at).values()]
    numbers = [value for value in found if not math.isnan(value)]
    if where in NOTHING_EXPECTED:
        assert not numbers, "take it from the list"
    else:
        assert numbers
        assert all(math.isfinite(value) and value >= 0 for value in numbers)


def test_where_nothing_is_expected_the_panel_says_so_instead_of_no_data() -> None:
    for panel in panels():
        if any(f"{panel['title']}/{target['refId']}" in NOTHING_EXPECTED for target in panel["targets"]):
            assert panel["fieldConfig"]["defaults"]["noValue"] == "none"


@pytest.mark.parametrize(
    "title", [panel["title"] for panel in panels() if panel["fieldConfig"]["defaults"]["unit"] == "percentunit"]
)
def test_a_share_is_between_none_and_all(title: str, recording: Recording) -> None:
    [panel] = [panel for panel in panels() if panel["title"] == title]
    for name, line in evaluated(panel, recording).items():
        assert all(math.isnan(value) or 0 <= value <= 1 + 1e-9 for value in line), name


def test_what_is_drawn_is_what_was_counted(recording: Recording) -> None:
    """The tokens per second of the dashboard, summed over the run, are the tokens of the counter."""
    [panel] = [panel for panel in panels() if panel["title"] == "Tokens per second"]
    [line] = evaluated(panel, recording).values()
    drawn = sum(value for value in line if not math.isnan(value)) * recording.interval_s
    [last] = [
        values[-1] for labels, values in recording.series if labels["__name__"] == "ray_tide_generation_tokens_total"
    ]
    assert last is not None
    assert drawn == pytest.approx(last, rel=0.1)


def test_every_kind_of_panel_has_a_painter_and_the_picture_is_drawn(recording: Recording, tmp_path: Path) -> None:
    assert {panel["type"] for panel in dashboard()["panels"]} == {*PAINTERS, "row"}
    draw(recording, tmp_path / "dashboard.png")
    assert (tmp_path / "dashboard.png").stat().st_size > 50_000
