"""What is counted of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from deploy.calibration import metrics
from deploy.calibration.metrics import MeteredProgress
from tests.deploy.calibration.test_events import ProgressLog
from tide_core.calibration.progress import SilentProgress


class Recorder:
    """As much of a metric of Ray's as is used."""

    seen: ClassVar[dict[tuple[str, str], float]] = {}

    def __init__(self, name: str, text: str, tags: tuple[str, ...]) -> None:
        self.info = {"name": name}
        self._name, self._allowed, self._default = name, set(tags), dict[str, str]()

    def set_default_tags(self, tags: Mapping[str, str]) -> None:
        self._default = dict(tags)

    def inc(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._note(value + self.seen.get(self._key(tags), 0.0), tags)

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._note(value, tags)

    def _key(self, tags: Mapping[str, str] | None) -> tuple[str, str]:
        return self._name, " ".join({**self._default, **(tags or {})}.values())

    def _note(self, value: float, tags: Mapping[str, str] | None) -> None:
        assert {**self._default, **(tags or {})}.keys() == self._allowed
        self.seen[self._key(tags)] = value


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    monkeypatch.setattr(metrics, "Counter", Recorder)
    monkeypatch.setattr(metrics, "Gauge", Recorder)
    monkeypatch.setattr(Recorder, "seen", {})
    return Recorder.seen


def test_shards_tokens_losses_and_shares_of_stages_are_counted(seen: dict[Any, float]) -> None:
    progress = MeteredProgress(SilentProgress(), "demo")
    with progress.stage("collect", 10, "sequence") as stage:
        stage.update(4, shard="train-00000", tokens=300)
        stage.update(4, shard="train-00001", tokens=700, restarts=2)
    with progress.stage("train", 100, "step") as stage:
        stage.update(50, **{"2:block": 1.25})
    assert seen["tide_calibration_shards", "demo"] == 2
    assert seen["tide_calibration_tokens", "demo"] == 700
    assert seen["tide_calibration_worker_restarts", "demo"] == 2
    assert seen["tide_calibration_stage_done", "demo collect"] == 0.8
    assert seen["tide_calibration_stage_done", "demo train"] == 0.5
    assert seen["tide_calibration_loss", "demo 2:block"] == 1.25


def test_the_rate_is_of_all_tokens_since_the_stage_began(
    seen: dict[Any, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with MeteredProgress(SilentProgress(), "demo").stage("collect", 10, "sequence") as stage:
        for tokens in (300, 700):
            now[0] += 10.0
            stage.update(4, shard="train-00000", tokens=tokens)
    assert seen["tide_calibration_tokens_per_second", "demo"] == 35.0


def test_the_inner_progress_gets_everything_as_well(seen: dict[Any, float]) -> None:
    log = ProgressLog()
    progress = MeteredProgress(log, "demo")
    progress.note("ready")
    with progress.stage("collect", 10, "sequence", 6) as stage:
        stage.update(2, shard="train-00000")
    assert log.lines == [
        "note ready",
        "begin collect 10 sequence, 6 done",
        "update 2 {'shard': 'train-00000'}",
        "end collect",
    ]


def test_what_was_there_before_is_a_share_of_the_stage_and_no_work_of_this_job(seen: dict[Any, float]) -> None:
    progress = MeteredProgress(SilentProgress(), "demo")
    with progress.stage("collect", 10, "sequence", 6) as stage:
        stage.update(2, shard="train-00003", tokens=100)
    assert seen["tide_calibration_stage_done", "demo collect"] == 0.8
    assert seen["tide_calibration_shards", "demo"] == 1
    assert seen["tide_calibration_tokens", "demo"] == 100
