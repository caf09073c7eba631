"""The draft planner under changing load and text, on a clock that is the cost table itself.

Other engines collapse where the number of rows crosses the threshold from which drafts no longer pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tide_core.batch import DraftCounts
from tide_core.exits.cost import Acceptance, CostPoint, CostTable, DraftPlanner, RowAcceptance

pytestmark = pytest.mark.unit

MAX_DRAFTS = 4
MEASURED = (0, 1, 2, MAX_DRAFTS)
NUM_STEPS = 2000
MOST_LOST = 0.98
"""Of the speed of full depth. A cycle without drafts costs what full depth does, so only the planner loses time."""

LOADS: dict[str, Callable[[int], int]] = {
    "1 row": lambda step: 1,
    "9 rows": lambda step: 9,
    "9 rows and 8 in turns": lambda step: 8 + step % 2,
    "1 row and 32 in turns": lambda step: (1, 32)[step % 2],
    "32 rows and 33, for seven steps each": lambda step: 32 + step // 7 % 2,
    "rising to 128 rows again and again": lambda step: 1 + step % 128,
    "within and beyond the table": lambda step: (128, 140)[step % 2],
}
TEXTS: dict[str, Callable[[int], float]] = {
    "easy": lambda step: 0.75,
    "middling": lambda step: 0.3,
    "hard": lambda step: 0.03,
    "easy and hard, for a hundred steps each": lambda step: (0.75, 0.03)[step // 100 % 2],
}


def table(noise: float = 0.0) -> CostTable:
    """Drafts are cheap up to 8 rows and again from 33 on (another tile of a kernel), and dear between and at 128."""
    random = np.random.default_rng(3)

    def measured(seconds: float) -> float:
        return seconds * (1.0 + noise * random.uniform(-1.0, 1.0))

    drafts_s = {1: (10.0, 1.1), 8: (11.0, 1.2), 9: (11.2, 5.0), 32: (15.0, 9.0), 33: (15.2, 2.0), 128: (40.0, 30.0)}
    return CostTable(
        tuple(
            CostPoint(rows, measured(full), tuple((k, measured(full + each * k)) for k in MEASURED))
            for rows, (full, each) in drafts_s.items()
        )
    )


def speed(load: Callable[[int], int], right: Callable[[int], float], *, calibrated: float, noise: float) -> float:
    """Tokens per second over those of full depth at the same loads."""
    random, truth = np.random.default_rng(5), table()
    planner = DraftPlanner(MAX_DRAFTS, Acceptance.prior([calibrated] * MAX_DRAFTS, MAX_DRAFTS), table(noise))
    seconds = full_s = 0.0
    for step in range(NUM_STEPS):
        rows = load(step)
        drafts = planner(rows, rows)
        accepted = np.minimum(random.geometric(1.0 - right(step), rows) - 1, drafts)
        if drafts:
            counts = Counter(accepted.tolist())
            planner.observe([(DraftCounts(drafts, kept, allowed=drafts), times) for kept, times in counts.items()])
        seconds += truth.cycle(rows, drafts)
        full_s += truth.full(rows) * (rows + int(accepted.sum())) / rows
    return full_s / seconds


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
@pytest.mark.parametrize("load", LOADS.values(), ids=list(LOADS))
def test_no_load_and_no_text_makes_drafting_slower_than_full_depth(
    load: Callable[[int], int], text: Callable[[int], float]
) -> None:
    """Also where calibration saw easier or harder text, and where the table was measured with noise."""
    for calibrated, noise in ((0.75, 0.02), (0.3, 0.0)):
        assert speed(load, text, calibrated=calibrated, noise=noise) >= MOST_LOST, (calibrated, noise)


@pytest.mark.parametrize("load", [name for name in LOADS if name not in ("9 rows", "within and beyond the table")])
def test_easy_text_gains_at_every_load_that_has_cheap_drafts(load: str) -> None:
    assert speed(LOADS[load], TEXTS["easy"], calibrated=0.75, noise=0.02) > 1.1


REQUEST_TOKENS = 100


def speed_of_requests(chances: tuple[float, ...], *, row_by_row: bool) -> tuple[float, ...]:
    """One request after another on one row, each with one of these chances that a draft is right: tokens per second of
    the requests of each chance, over those of full depth."""
    random, truth = np.random.default_rng(7), CostTable((CostPoint(1, 10.0, tuple((k, 10.0 + k) for k in range(7))),))
    planner = DraftPlanner(6, Acceptance.prior([0.6] * 6, 6), truth)
    tokens, seconds = Counter[float](), Counter[float]()
    for number in range(60):
        right, row, left = chances[number % len(chances)], RowAcceptance(), REQUEST_TOKENS
        while left > 0:
            drafts = planner(1, 1, [row.factor] if row_by_row else ())
            kept = min(int(random.geometric(1.0 - right)) - 1, drafts)
            counts = DraftCounts(drafts, kept, allowed=drafts)
            planner.observe_row(row, [counts])
            planner.observe([(counts, 1)] if drafts else [])
            left -= kept + 1
            tokens[right] += kept + 1
            seconds[right] += truth.cycle(1, drafts)
    return tuple(tokens[right] / seconds[right] * truth.full(1) for right in chances)


def test_a_row_that_runs_alone_is_planned_by_its_own_acceptance() -> None:
    """A hard text after easy ones: its first drafts are lost, and not as many as the memory of all rows would make."""
    easy, hard = speed_of_requests((0.8, 0.03), row_by_row=True)
    easy_by_all, hard_by_all = speed_of_requests((0.8, 0.03), row_by_row=False)
    assert hard_by_all < 0.9 < 0.93 < hard
    assert easy > easy_by_all


def test_rows_that_are_alike_lose_nothing_by_counting_each_for_itself() -> None:
    [apart], [together] = (speed_of_requests((0.6,), row_by_row=each) for each in (True, False))
    assert apart > 0.98 * together


def test_a_row_that_was_hard_is_tried_again() -> None:
    row, planner = RowAcceptance(), DraftPlanner(2, Acceptance.prior([0.8, 0.8], 2))
    for _ in range(20):
        planner.observe_row(row, [DraftCounts(2, 0, allowed=2)])
    hard = row.factor
    planner.observe_row(row, [DraftCounts()] * 100)
    assert hard < 0.4 < 0.9 < row.factor < 1.0
    planner.observe_row(row, [DraftCounts(3, 3, allowed=3, from_suffix=True)] * 5)
    assert row.factor < 1.0, "suffix drafts say nothing of the exits"
