from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.calibration.tiny_runs import contents, tiny_calibration, write_prompts
from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.report import report
from tide_core.exits.artefact.artefact import load_artefact


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`tide calibrate` of the tiny model on ten prompts, to tmp_path/artefact."""
    monkeypatch.setattr(report, "can_plot", lambda: False)
    values, usual = tiny_calibration().to_mapping(), CalibrationConfig().to_mapping()
    options = {key: values.pop(key) for key in ("max_new_tokens", "steps", "max_drafts")}
    options |= {key: ",".join(map(str, values.pop(key))) for key in ("checkpoints", "heads")}
    settings = [f"{key}={json.dumps(value)}" for key, value in values.items() if value != usual[key]]
    return [
        *("calibrate", "--model", str(model_folder), "--output", str(tmp_path / "artefact")),
        *("--data", str(write_prompts(tmp_path)), "--device", "cpu"),
        *(word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))),
        *(word for setting in settings for word in ("--set", setting)),
    ]


def test_a_calibration_prints_its_verdict_and_where_things_are(
    tide: Callable[..., Any], tmp_path: Path, arguments: list[str]
) -> None:
    code, out, err = tide(*arguments)

    assert code == 0, err
    assert "pay" in out.splitlines()[0]
    assert f"artefact: {tmp_path / 'artefact'} (" in out
    assert f"report: {tmp_path / 'artefact' / 'report.md'}" in out
    assert "tide: collect: 10/10 sequence" in err
    artefact = load_artefact(tmp_path / "artefact", None)
    assert artefact.manifest.model.name == "tiny"
    assert artefact.manifest.checkpoints[0].layer == 1
    assert (tmp_path / "artefact.run" / "ledger.msgpack").is_file()


def test_a_calibration_ends_with_the_speed_up_that_was_measured(
    tide: Callable[..., Any], tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    arguments = [word.replace("measure_batches=[]", "measure_batches=[1]") for word in arguments]

    code, out, err = tide(*arguments)

    assert code == 0, err
    [line] = [line for line in out.splitlines() if line.startswith("measured here: ")]
    assert re.fullmatch(r"measured here: x\d\.\d\d at batch 1 \(predicted x\d\.\d\d\)", line)
    assert line in (tmp_path / "artefact" / "report.md").read_text(encoding="utf-8")
    assert "tide: measure: 1/1 batch size" in err
    digest = load_artefact(tmp_path / "artefact", None).digest
    assert f"({digest[:16]})" in out
    assert tide(*arguments)[1] == out, "what was measured is kept"


def test_a_taken_output_is_refused_before_the_model_is_loaded(
    tide: Callable[..., Any], tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "artefact").mkdir()
    (tmp_path / "artefact" / "notes.txt").write_text("mine")
    arguments[arguments.index("--model") + 1] = str(tmp_path / "no such model")

    code, out, err = tide(*arguments)

    assert (code, out) == (2, "")
    assert "a name that is free; --force replaces what is there" in err
    assert tide(*arguments, "--force")[0] == 2  # now it is the model that is missing


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--steps", "0"], "steps: got 0"),
        (["--minutes", "0"], "minutes: got 0.0"),
        (["--checkpoints", "two"], "--checkpoints: got 'two'"),
        (["--checkpoints", "4"], "layers below 4"),
        (["--heads", "tall"], "heads"),
        (["--set", "stepps=3"], "did you mean steps?"),
        (["--set", "steps"], "KEY=VALUE"),
        (["--set", "delta=high"], "a JSON value"),
        (["--set", "epsilons=[0.05]"], "epsilons: got [0.05]"),
        (["--dtype", "int8"], "dtype: got 'int8'"),
        (["--quantization", "int8"], "quantization: got 'int8'"),
        (["--data", "missing.jsonl"], "nothing was found at this path"),
    ],
)
def test_bad_values_end_with_code_2_and_say_what_was_expected(
    tide: Callable[..., Any], arguments: list[str], extra: list[str], said: str
) -> None:
    code, out, err = tide(*arguments, *extra)

    assert (code, out) == (2, "")
    assert said in err


WAITS_AFTER_SHARDS = """
import sys, time
from tide_core.calibration import stages
from tide_core.cli import main

num_shards, write_shard = int(sys.argv.pop(1)), stages.write_shard

def write_or_wait(folder, *args):
    if len(list(folder.glob("*.safetensors"))) == num_shards:
        print("waits", flush=True)
        time.sleep(600)
    return write_shard(folder, *args)

stages.write_shard = write_or_wait
sys.exit(main())
"""


@pytest.mark.slow
def test_a_run_ended_by_ctrl_c_and_then_by_a_kill_is_finished_by_the_same_command(
    tide: Callable[..., Any], start: Callable[..., Any], tmp_path: Path, arguments: list[str]
) -> None:
    for end, code, num_shards in ((signal.SIGINT, 130, 1), (signal.SIGKILL, -signal.SIGKILL, 3)):
        process = start([sys.executable, "-c", WAITS_AFTER_SHARDS, str(num_shards), *arguments])
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        assert len(list((tmp_path / "artefact.run" / "shards").glob("*.safetensors"))) == num_shards
        process.send_signal(end)
        _, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        if end == signal.SIGINT:
            assert f"the same command resumes the run in {tmp_path / 'artefact.run'}" in err
    assert not (tmp_path / "artefact").exists()

    code, _, err = tide(*arguments)
    assert code == 0, err
    assert "tide: dataset: done before" in err
    whole = contents(tmp_path / "artefact")
    assert tide(*arguments, "--force", "--run-dir", str(tmp_path / "other"))[0] == 0
    assert contents(tmp_path / "artefact") == whole
