"""`tide verdict`: what it prints, what it leaves for the engine, and what each end means to the shell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tide_core.config import EngineConfig
from tide_core.engine import assemble as assembling
from tide_core.engine.assemble import assemble
from tide_core.evaluation import verdict as verdicts
from tide_core.exits.cost import CostPoint, CostTable

Tide = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "easy")


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_artefact_for_it(tmp_path_factory.mktemp("artefacts") / "a")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def command(tide: Tide, model: Path, artefact: Path) -> Tide:
    def run(*args: str) -> tuple[int, str, str]:
        common = ("--model", str(model), "--artefact", str(artefact), "--device", "cpu", "--threads", "1")
        return tide("verdict", *common, *args)

    return run


def table_of(draft_s: float) -> CostTable:
    def point(rows: int) -> CostPoint:
        return CostPoint(rows, 0.010, tuple((k, 0.010 + draft_s * k) for k in (0, 1, 6)))

    return CostTable((point(1), point(8)))


@pytest.fixture
def fixed_table(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[dict[str, Any]]]:
    """A table as if it had been measured; what was asked to be measured."""

    def use(draft_s: float) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def measure(*args: Any, **kwargs: Any) -> CostTable:
            asked.append(kwargs)
            return table_of(draft_s)

        monkeypatch.setattr(verdicts, "measure", measure)
        return asked

    return use


def test_each_number_of_rows_gets_a_line_with_its_verdict(command: Tide, fixed_table: Any) -> None:
    asked = fixed_table(0.001)
    code, out, err = command("--rows", "8,1,100")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "context 128" in lines[0]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "8", "100"]
    assert lines[2].split()[1:4] == ["10.00", "4", "1.91"]
    assert lines[2].endswith("exits pay")
    assert lines[4].endswith("not measured: served in `full`")
    assert lines[5] == "exits pay with 1, 8 rows on this machine"
    assert asked[0]["max_rows"] == 100


def test_where_nothing_pays_it_says_to_serve_full(command: Tide, fixed_table: Any) -> None:
    fixed_table(0.100)
    code, out, _ = command("--rows", "1")
    assert code == 0
    assert "do not pay: serve it in `full`" in out
    assert out.endswith("exits do not pay on this machine: serve it in `full`\n")


def test_json_is_one_object_with_table_and_verdicts(command: Tide, fixed_table: Any, artefact: Path) -> None:
    fixed_table(0.001)
    code, out, err = command("--rows", "1,9", "--context", "20", "--json")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["rows"][0] | {"speedup": 0} == {
        "rows": 1,
        "full_ms": 10.0,
        "drafts": 4,
        "speedup": 0,
        "pays": True,
        "verdict": "exits pay",
    }
    assert values["rows"][1]["full_ms"] is None
    assert values["context"] == 20
    assert values["kept_in"] is None
    assert [point["rows"] for point in values["table"]["points"]] == [1, 8]
    assert values["acceptance"][0] == 0.8


def test_the_table_it_measures_is_the_one_an_engine_then_starts_with(
    command: Tide, model: Path, artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = command("--rows", "1,2", "--json")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert Path(values["kept_in"]).is_file()
    assert {row["rows"]: row["full_ms"] > 0 for row in values["rows"]} == {1: True, 2: True}

    def refuse(*args: Any, **kwargs: Any) -> CostTable:
        raise AssertionError("the engine measured again")

    monkeypatch.setattr(assembling, "measure", refuse)
    parts = assemble(EngineConfig(model=str(model), artefact=str(artefact), device="cpu", num_threads=1))
    assert parts.planner is not None
    assert parts.planner.table is not None
    assert [point.full_s for point in parts.planner.table.points] == [
        point["full_s"] for point in values["table"]["points"]
    ]


def test_another_context_is_measured_and_kept_from_the_engine(command: Tide, cache_dir: Path) -> None:
    code, out, _ = command("--rows", "1", "--context", "16", "--json")
    assert code == 0
    assert [point["rows"] for point in json.loads(out)["table"]["points"]] == [1]
    assert not (cache_dir / "costs").exists()


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (("--rows", "none"), "--rows"),
        (("--rows", "0"), "--rows"),
        (("--rows", ""), "--rows"),
        (("--rows", "5000"), "--rows"),
        (("--context", "0"), "context"),
        (("--context", "256"), "context"),
        (("--kv-memory-gib", "0.0001"), "kv_memory_gib"),
        (("--kv-memory-gib", "much"), "kv_memory_gib"),
        (("--gpu-memory-utilization", "2"), "gpu_memory_utilization"),
        (("--artefact", "none"), "artefact"),
        (("--artefact", "auto"), "artefact"),
        (("--dtype", "int8"), "dtype"),
    ],
)
def test_bad_values_are_2_and_named(args: tuple[str, str], field: str, command: Tide) -> None:
    code, out, err = command(*args)
    assert (code, out) == (2, "")
    assert err.startswith(f"tide: error: {field}: got ")
    assert err.count("\n") == 1


def test_help_imports_no_torch() -> None:
    code = "import sys, tide_core.cli as c; c.main(['verdict', '--help']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: tide verdict" in run.stdout
    assert run.stdout.endswith("False\n")
