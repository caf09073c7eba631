"""Other implementations: each runs in its own process with a limit; one that is not installed is reported."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import rivals
from benchmarks.gpu.rivals import SHORT, TIMED, run_side, step_s

SMALL = ["--device", "cpu", "--small", "--tokens", "8"]
PUBLIC_TIDE = """
import torch
from pathlib import Path

class TIDEConfig:
    def __init__(self, calibration_samples):
        self.calibration_samples = calibration_samples

def calibrate(model, tokenizer, config=None, save_path="router.pt"):
    assert tokenizer("a")["input_ids"]
    Path(save_path).write_text(str(config.calibration_samples))

class TIDE:
    def __init__(self, model, router_path):
        assert Path(router_path).read_text()
        self.model = model

    def generate(self, ids, max_new_tokens, temperature):
        return self.model.generate(ids, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens)
"""


def test_a_side_in_its_own_process_returns_the_time_of_its_step() -> None:
    answer = run_side("eager", SMALL, 600.0)
    assert math.isfinite(answer["step_s"])  # the difference of two times: of a tiny model it may be below 0
    assert answer["side"] == "eager"
    assert answer["compiled"] is False


def test_a_side_that_takes_too_long_or_fails_is_no_failure_of_the_run() -> None:
    assert run_side("eager", SMALL, 0.2) == {"error": "not done within 0.2 s"}
    assert "no_such_device" in run_side("eager", ["--device", "no_such_device"], 60.0)["error"]


def test_a_step_is_the_difference_of_two_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rivals.time, "perf_counter", lambda: clock.now)

    def generate(ids: torch.Tensor, count: int) -> torch.Tensor:
        clock.now += 5.0 + 0.25 * count
        return torch.zeros(1, ids.shape[1] + count)

    assert step_s(generate, torch.zeros(1, 7), 12) == pytest.approx(0.25)
    assert clock.now == pytest.approx((1 + TIMED) * (10.0 + 0.25 * (SHORT + 12)))


def test_a_generation_that_ends_early_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ended after 2 tokens"):
        step_s(lambda ids, count: torch.zeros(1, ids.shape[1] + 2), torch.zeros(1, 7), 12)


def test_the_public_package_is_run_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "TIDE.py").write_text(PUBLIC_TIDE)
    monkeypatch.syspath_prepend(tmp_path)
    assert rivals.main(["--side", "tide", *SMALL]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert math.isfinite(answer["step_s"])
    sys.modules.pop("TIDE", None)
