"""The study of fast exits on a tiny model without a GPU: variants, resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fast_exits import __main__ as study
from benchmarks.fast_exits.__main__ import Variant
from benchmarks.production.session import Deadline, OutOfTime


def test_a_variant_is_read_from_its_name_and_a_wrong_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert Variant.parse("rank=64:kept=0:layers=8+15") == Variant("rank=64:kept=0:layers=8+15", (8, 15), 64, kept=0.0)
    with pytest.raises(SystemExit):
        study.arguments(["--tiny", "--variants", "depth=3"])
    assert "expected layers=N+N, rank=N" in capsys.readouterr().err


def test_a_study_that_is_cut_off_keeps_its_variants_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tiny", "--variants", "rank=4,rank=8:kept=0", "--minutes", "0.05", "--thresholds", "0.9,0.4"]
    options += ["--state", str(tmp_path / "text"), "--out", str(tmp_path / "out.json")]
    asked: list[str] = []

    def cut_second(self: Deadline, what: str, needed_s: float = 0.0) -> None:
        asked.append(what)
        if len(asked) > 1:
            raise OutOfTime("as the test wants")

    with monkeypatch.context() as short:
        short.setattr(Deadline, "check", cut_second)
        assert study.main(options) == study.UNFINISHED
    first = json.loads((tmp_path / "out.json").read_text())
    assert list(first["variants"]) == ["rank=4"]
    assert study.main(options) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["variants"]["rank=4"] == first["variants"]["rank=4"]
    for each in report["variants"].values():
        assert [(point["min_layers"], point["threshold"]) for point in each["at"]] == [
            (first_layer, threshold) for first_layer in (0, 3) for threshold in (0.9, 0.4)
        ]
        assert all(0.0 <= point["differing"] <= 1.0 and point["layers_share"] > 0.0 for point in each["at"])
    assert "of the layers" in capsys.readouterr().out
    assert study.main(options) == 0, "nothing is left to do"
    with pytest.raises(SystemExit, match="other minutes"):
        study.main([*options, "--minutes", "3"])
