"""Prometheus metrics of a calibration, through Ray. Their source is the progress, as for the terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ray.util.metrics import Counter, Gauge

from tide_core.calibration.progress import Progress, Stage

RUN, STAGE, CANDIDATE = "run", "stage", "candidate"


class MeteredProgress:
    """A `Progress` that passes everything on and updates the metrics."""

    def __init__(self, progress: Progress, run: str) -> None:
        self._progress = progress
        tags = {RUN: run}
        shards = Counter("tide_calibration_shards", "Shards of token sequences that the job has made.", (RUN,))
        tokens = Counter("tide_calibration_tokens", "Tokens in these shards.", (RUN,))
        rate = Gauge("tide_calibration_tokens_per_second", "Tokens per second of these shards.", (RUN,))
        share = Gauge("tide_calibration_stage_done", "Share of a stage that is done, 0 to 1.", (RUN, STAGE))
        loss = Gauge("tide_calibration_loss", "Training loss of a candidate's head.", (RUN, CANDIDATE))
        self.restarts = Gauge("tide_calibration_worker_restarts", "Workers that were replaced.", (RUN,))
        self._meters: dict[str, Any] = {
            each.info["name"]: each for each in (shards, tokens, rate, share, loss, self.restarts)
        }
        for meter in self._meters.values():
            meter.set_default_tags(tags)

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: str, done: int = 0) -> Iterator[Stage]:
        with self._progress.stage(name, total, unit, done) as stage:
            yield _MeteredStage(stage, name, total, done, self._meters)

    def note(self, text: str) -> None:
        self._progress.note(text)


class _MeteredStage:
    def __init__(self, stage: Stage, name: str, total: int | None, done: int, meters: dict[str, Any]) -> None:
        self._stage, self._name, self._total, self._meters = stage, name, total, meters
        self._done, self._tokens, self._started_at = done, 0, time.monotonic()

    def update(self, n: int = 1, **info: Any) -> None:
        self._stage.update(n, **info)
        self._done += n
        if self._total:
            self._meters["tide_calibration_stage_done"].set(self._done / self._total, {STAGE: self._name})
        if self._name == "collect" and "tokens" in info:
            self._collected(int(info["tokens"]), int(info.get("restarts", 0)))
        if self._name == "train":
            for candidate, loss in info.items():
                self._meters["tide_calibration_loss"].set(float(loss), {CANDIDATE: candidate})

    def _collected(self, tokens: int, restarts: int) -> None:
        self._meters["tide_calibration_shards"].inc(1)
        if tokens > self._tokens:
            self._meters["tide_calibration_tokens"].inc(tokens - self._tokens)
        self._tokens = tokens
        seconds = max(1e-6, time.monotonic() - self._started_at)
        self._meters["tide_calibration_tokens_per_second"].set(tokens / seconds)
        self._meters["tide_calibration_worker_restarts"].set(restarts)
