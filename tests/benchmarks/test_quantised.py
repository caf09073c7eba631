"""The benchmark of quantised weights on a tiny GGUF file: every part runs, and a missed bar is reported."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from benchmarks.quantised import __main__ as quantised
from tests.models.gguf_factory import make_gguf

pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
SMALL = "--rows 1 2 --prompts 2 --tokens 6 --repeats 2"
CONTEXT = {"llama.context_length": 2048}
"""Prompts of the benchmark are long in a vocabulary of bytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("m") / "tiny.gguf", kind=GGMLQuantizationType.Q8_0, metadata=CONTEXT).path


@pytest.fixture
def run(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[str], tuple[int, str, str]]:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "quantised-cache"))

    def main(options: str) -> tuple[int, str, str]:
        code = quantised.main(["--model", str(model), *SMALL.split(), *options.split()])
        return code, *capsys.readouterr()

    return main


def test_every_part_runs_and_the_report_has_all_conditions(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "LEAST_RATIO", 0.0)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog went home " * 8)
    code, out, err = run(f"--json --text {text}")
    assert code == 0
    report = json.loads(out)
    for name in ("model", "cpu", "machine", "kernels", "tokens", "prompts", "repeats"):
        assert report["conditions"][name], name
    parts = report["parts"]
    assert list(parts) == ["memory", "batch 1", "batch 2", "quality"]
    assert all(parts["memory"][form] > 100 for form in ("quantised", "widened")), "MiB of a process with Torch"
    for rows in (1, 2):
        runs = parts[f"batch {rows}"]
        assert set(runs) == {f"{mode} {form}" for mode in ("full", "verified") for form in ("quantised", "widened")}
        assert all(len(each["of_each_repeat"]) == 2 and each["num_tokens"] == 12 for each in runs.values())
    assert parts["quality"]["tokens"] == 12
    assert parts["quality"]["perplexity_quantised"] == pytest.approx(parts["quality"]["perplexity_widened"], rel=0.1)
    same = [bar for bar in report["bars"] if "answers of verified equal to full" in bar["name"]]
    assert [bar["value"] for bar in same] == [1.0, 1.0], "exact, whatever the speed"
    assert "float32 would have chosen another token for" in err


def test_both_forms_are_really_compared(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Recorded(quantised.Bench):
        def __init__(self, config: Any, prompts: Path) -> None:
            super().__init__(config, prompts)
            linears = {type(module).__name__ for module in self.parts.runner.adapter.model.modules()}
            made.append((config.quantization, "KernelQuantisedLinear" in linears))

    monkeypatch.setattr(quantised, "Bench", Recorded)
    monkeypatch.setattr(quantised, "memory", lambda model: quantised.Part("memory"))
    monkeypatch.setattr(quantised, "LEAST_RATIO", 1e9)
    code, out, _ = run("")
    assert made == [("none", False), ("auto", True)]
    assert code == 1
    assert "MISS batch 1, full: quantised against widened" in out
    assert "ok   batch 2: answers of verified equal to full, quantised" in out


NODE = """#!{python}
import json, sys
assert sys.argv[1].endswith("llama_cpp.mjs")
for line in sys.stdin:
    asked = json.loads(line)
    if "ids" in asked:
        print(json.dumps({{"ids": asked["ids"][: asked["tokens"]], "seconds": 1000.0}}), flush=True)
    else:
        print(json.dumps({{"version": "v1", "threads": asked["threads"], "model": asked["model"]}}), flush=True)
"""


def test_llama_cpp_is_another_side_of_single_rows_on_the_same_file_and_prompts(
    run: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node_modules" / "node-llama-cpp").mkdir(parents=True)
    (tmp_path / "node").write_text(NODE.format(python=sys.executable))
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(quantised, "memory", lambda model: quantised.Part("memory"))
    monkeypatch.setattr(quantised, "LEAST_RATIO", 0.0)
    code, out, _ = run(f"--llama-cpp {tmp_path}")
    assert code == 0, "a side that takes a thousand seconds is beaten"
    assert re.search(r"batch 1, llama.cpp 0\.0 tokens/s .*'version': 'v1'", out)
    assert str(model) in out
    assert "batch 2, llama.cpp" not in out
    assert "batch 1, verified: quantised against llama.cpp" in out


def test_a_folder_without_llama_cpp_is_refused(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "memory", lambda model: quantised.Part("memory"))
    with pytest.raises(SystemExit, match=f"--llama-cpp: got {tmp_path}"):
        run(f"--llama-cpp {tmp_path}")
