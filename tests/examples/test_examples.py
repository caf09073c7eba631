"""Every example runs, as it is started by a reader."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.calibration.tiny_runs import write_prompts
from tests.engine.exit_engines import easy_model
from tests.exits.artefact.artefact_factory import make_artefact
from tests.factories import tiny_tokenizer
from tide_core.engine import assemble
from tide_core.exits.cost import CostPoint, CostTable

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = ("quickstart", "any_model", "tune_threshold", "hf_pipeline")


@pytest.fixture(autouse=True)
def _drafts_pay(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On models as small as these a draft costs as much as full depth, and the engine would make none."""
    if request.node.get_closest_marker("demo"):
        return
    cheap = CostTable(tuple(CostPoint(rows, 1.0, ((0, 1.0), (6, 1.2))) for rows in (1, 64)))
    monkeypatch.setattr(assemble, "measure", lambda *args, **options: cheap)
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "tiny"
    easy_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def artefact(model: Path) -> Path:
    return make_artefact(model.with_name("artefact"), easy_model(), kind="identity", shortlist_size=380)


def run(name: str, *args: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, *map(str, args)])
    runpy.run_path(path, run_name="__main__")


def test_every_example_is_tested_and_short() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NAMES)
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES.glob("*.py"))


def test_quickstart(
    model: Path, artefact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("quickstart", "--model", model, "--artefact", artefact, "--max-new-tokens", 12, monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert out.startswith("The three laws of motion say that")
    assert re.search(r"Total tokens: 12, Exited: [1-9]", out)


@pytest.mark.slow
def test_any_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ("--data", write_prompts(tmp_path), "--samples", 10, "--steps", 3, "--batch-tokens", 128)
    sizes += ("--max-new-tokens", 8)
    run("any_model", "--model", model, *sizes, monkeypatch=monkeypatch)
    assert (tmp_path / "my-exits" / "manifest.json").exists()
    full, verified, *_ = capsys.readouterr().out.split("\n")
    assert full.split("tok/s: ")[1] == verified.split("tok/s: ")[1]
    run("any_model", "--model", model, *sizes, monkeypatch=monkeypatch)
    assert "train" not in capsys.readouterr().err, "an artefact that is there is used"


def test_tune_threshold(
    model: Path, artefact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--model", model, "--artefact", artefact, "--thresholds", "0.9,0", "--max-new-tokens", 12)
    run("tune_threshold", *args, monkeypatch=monkeypatch)
    _, full, verified, strict, loose = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (full[0], full[3], full[5]) == ("full", "0.0%", "100.0%")
    assert (verified[0], verified[5]) == ("verified", "100.0%")
    exits = [float(line[3].rstrip("%")) for line in (strict, loose)]
    assert exits[0] < exits[1]
    assert float(loose[4]) < float(full[4])


def test_hf_pipeline(
    model: Path, artefact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("hf_pipeline", "--model", model, "--artefact", artefact, "--max-new-tokens", 12, monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert re.search(r"same text: True; Total tokens: 12, Exited: [1-9]", out)


@pytest.mark.demo
@pytest.mark.skipif(not (ROOT / "deploy" / "artefacts" / "demo").is_dir(), reason="no artefact for the demo model")
@pytest.mark.parametrize("name", ["quickstart", "hf_pipeline"])
def test_on_the_demo_model_without_arguments(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    # How many tokens left early is up to the costs that this machine measures: while it is busy, none may pay.
    assert re.search(r"Total tokens: [1-9]\d*, Exited: \d+", done.stdout)
    assert re.search(r"Layers run per token: \d+\.\d, tokens per deep pass: \d", done.stdout)
    assert ("The three laws of motion say that" if name == "quickstart" else "same text: True") in done.stdout
