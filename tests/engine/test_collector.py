"""The garbage collector comes rarely as long as an engine runs, and as before when none does."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tide_core.engine import collector

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever other tests have left."""
    monkeypatch.setattr(collector, "_num_engines", 0)
    monkeypatch.setattr(collector, "_before", collector._before)
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_with_the_last_engine_that_ends_all_is_as_it_was() -> None:
    gc.set_threshold(700, 10, 7)
    collector.hold()
    collector.hold()
    assert gc.get_threshold() == (collector.NEW_OBJECTS, 10, 7)
    collector.release()
    assert gc.get_threshold() == (collector.NEW_OBJECTS, 10, 7)
    assert gc.get_freeze_count() > 0
    collector.release()
    assert gc.get_threshold() == (700, 10, 7)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("young", [0, collector.NEW_OBJECTS + 1])
def test_a_collector_that_comes_even_more_rarely_stays_so(young: int) -> None:
    gc.set_threshold(young, 10, 10)
    collector.hold()
    assert gc.get_threshold()[0] == young
    collector.release()
    assert gc.get_threshold()[0] == young


def test_what_somebody_sets_meanwhile_stays() -> None:
    collector.hold()
    gc.set_threshold(5000, 5, 5)
    collector.release()
    assert gc.get_threshold() == (5000, 5, 5)
