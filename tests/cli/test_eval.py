"""`tide eval`: what it prints and writes, and what each end means to the shell."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evaluation.on_disk import PROMPTS, save_artefact_for_it, save_model

Tide = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "easy")


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_artefact_for_it(tmp_path_factory.mktemp("artefacts") / "a")


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "kind": "cats"}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def command(tide: Tide, model: Path, artefact: Path, prompt_file: Path, tmp_path: Path) -> Tide:
    def run(*args: str) -> tuple[int, str, str]:
        common = ["--model", str(model), "--artefact", str(artefact), "--device", "cpu", "--threads", "1"]
        common += ["--drafts", "4", "--file", str(prompt_file), "--output", str(tmp_path / "out"), "--max-tokens", "12"]
        return tide("eval", *common, *args)

    return run


def test_all_modes_and_thresholds_are_measured_and_written(command: Tide, tmp_path: Path) -> None:
    code, out, err = command("--thresholds", "0.9,0.3", "--ignore-eos")
    assert (code, err) == (0, "")
    names = ["full", "verified", "bounded 0.02", "bounded 0.05", "bounded 0.1", "fast", "fast at 0.3", "fast at 0.9"]
    for name in names:
        assert f"\n{name} " in out
    folder = tmp_path / "out"
    assert out.endswith(f"eval.csv, eval.json, curve.png in {folder}\n")
    assert sorted(path.name for path in folder.iterdir()) == ["curve.png", "eval.csv", "eval.json"]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((folder / "eval.csv").open()))
    assert [row["name"] for row in rows] == names
    values = json.loads((folder / "eval.json").read_text())
    assert [row["name"] for row in values["results"]] == names
    by_name = {row["name"]: row for row in values["results"]}
    for exact in ("full", "verified"):
        assert (by_name[exact]["disagreement"], by_name[exact]["exact_match"]) == (0.0, 1.0)
    assert by_name["fast at 0.3"]["layers_per_token"] < by_name["full"]["layers_per_token"] == 4.0
    assert all(row["num_tokens"] == 12 * len(PROMPTS) for row in values["results"])
    conditions = values["conditions"]
    assert conditions["batch"] == 1
    assert conditions["checkpoint_layers"] == [1]
    assert conditions["num_layers"] == 4
    assert conditions["drafts"] == 4


def test_no_thresholds_a_limit_a_batch_and_chat_prompts(command: Tide, tmp_path: Path) -> None:
    code, out, _ = command("--thresholds", "", "--limit", "3", "--batch", "2", "--chat", "--ignore-eos")
    assert code == 0
    assert "fast at" not in out
    values = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert {row["num_prompts"] for row in values["results"]} == {3}
    assert values["conditions"]["chat"] is True


def test_a_file_that_is_not_given_is_2_and_named(tide: Tide) -> None:
    code, out, err = tide("eval")
    assert (code, out) == (2, "")
    assert "--file" in err


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--file", "nothing.jsonl"), "--file"),
        (("--thresholds", "high"), "--thresholds"),
        (("--thresholds", "0.5,3"), "--thresholds"),
        (("--thresholds", "nan"), "--thresholds"),
        (("--limit", "0"), "--limit"),
        (("--batch", "0"), "--batch"),
        (("--drafts", "100"), "drafts"),
        (("--artefact", "none"), "artefact"),
        (("--max-tokens", "0"), "max_tokens"),
    ],
)
def test_bad_values_are_2_and_named(args: tuple[str, str], field: str, command: Tide) -> None:
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert err.startswith(f"tide: error: {field}: got ")
    assert err.count("\n") == 1


def test_a_prompt_that_is_too_long_names_its_line(command: Tide, prompt_file: Path) -> None:
    prompt_file.write_text(json.dumps({"prompt": "cat"}) + "\n" + json.dumps({"prompt": "mat " * 400}) + "\n")
    code, _, err = command()
    assert code == 2
    assert f"{prompt_file} line 2: prompt" in err


def test_an_unknown_key_in_a_line_is_still_refused(command: Tide, prompt_file: Path) -> None:
    prompt_file.write_text(json.dumps({"prompt": "cat", "mode": "fast"}) + "\n")
    code, _, err = command()
    assert code == 2
    assert f"{prompt_file} line 1" in err


def test_an_output_folder_that_cannot_be_made_is_2_before_anything_is_loaded(command: Tide, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    code, _, err = command("--output", str(tmp_path / "taken"))
    assert code == 2
    assert err.startswith("tide: error: --output: got ")


def test_help_imports_no_torch() -> None:
    code = "import sys, tide_core.cli as c; c.main(['eval', '--help']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: tide eval" in run.stdout
    assert run.stdout.endswith("False\n")
