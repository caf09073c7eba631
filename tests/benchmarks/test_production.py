"""The production-scale benchmark on a tiny model without a GPU: it calibrates, is cut off, resumes and measures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.common.prompts import PROMPT_FILE, Prompt
from benchmarks.common.runs import Runs, greedy
from benchmarks.gpu.table import ROWS
from benchmarks.production import __main__ as production
from benchmarks.production import measure as measure_part
from benchmarks.production.calibrate import CALIBRATION, MODEL, SavingFiles, TimedProgress
from benchmarks.production.measure import groups_of, pass_costs
from benchmarks.production.session import Deadline, OutOfTime, Phases, Sizes, State, Target
from tide_core.calibration import stages
from tide_core.exits.cost import CostPoint, CostTable

DRAFT_ALWAYS: dict[str, dict[str, Any]] = {"full": {}, "verified": {"threshold": 0.0}}
"""A router that hardly learned scores low."""


@dataclass
class Calls:
    """A run that was cut off in the stage collect, and the same command again."""

    state: Path
    cut_off: tuple[int, dict[str, Any]]
    after_cut: dict[str, Any]
    """The state file between the calls."""
    resumed: tuple[int, dict[str, Any]]


def run(state: Path, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = production.main(["--small", "--state", str(state), "--out", str(out), "--no-bars", *options])
    return code, json.loads(out.read_text())


@pytest.fixture(scope="module")
def patch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield patch


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> Calls:
    folder = tmp_path_factory.mktemp("production")
    asked: list[str] = []

    def cut_third_shard(self: Deadline, what: str, needed_s: float = 0.0) -> None:
        asked.append(what)
        if asked.count("collect") > 4:  # a shard asks before it and at its progress
            raise OutOfTime("as the test wants")

    with patch.context() as short:
        short.setattr(Deadline, "check", cut_third_shard)
        cut_off = run(folder / "state", folder / "first.json")
    after_cut = json.loads((folder / "state" / "state.json").read_text())
    return Calls(folder / "state", cut_off, after_cut, run(folder / "state", folder / "second.json"))


def test_a_call_that_runs_out_of_time_says_so_and_keeps_what_is_done(calls: Calls) -> None:
    code, report = calls.cut_off
    assert code == production.UNFINISHED
    assert not report["finished"]
    assert report["parts"] == {}
    assert calls.after_cut["calibrated"] is None
    assert calls.after_cut["phases"]["collect"]["times"] == 2
    assert "train" not in calls.after_cut["phases"]


def test_the_next_call_makes_only_what_is_missing(calls: Calls) -> None:
    code, report = calls.resumed
    assert (code, report["finished"]) == (0, True)
    phases = report["parts"]["calibrate"]["figures"]["phases"]
    shards = list((calls.state / "run" / "shards").iterdir())
    assert phases["collect"]["times"] == len(shards), "no shard was made twice"
    assert report["parts"]["calibrate"]["figures"]["calls"] == 2


def test_calibration_reports_the_cost_of_each_phase_and_the_size_of_the_artefact(calls: Calls) -> None:
    part = calls.resumed[1]["parts"]["calibrate"]
    figures, measures = part["figures"], part["measures"]
    assert set(figures["phases"]) == {*CALIBRATION} - {"dataset"}, "24 prompts are shipped: the model writes none"
    assert all(phase["seconds"] > 0 and phase["host_peak_gb"] > 0 for phase in figures["phases"].values())
    files = [path for path in (calls.state / "artefact").iterdir() if path.is_file()]
    assert figures["bytes"] == sum(path.stat().st_size for path in files) > 0
    assert measures["tiny_x2_artefact"]["value"] == figures["bytes"] / 1e6
    once = figures["phases"][MODEL]["seconds"] / 2
    others = sum(phase["seconds"] for name, phase in figures["phases"].items() if name != MODEL)
    assert measures["tiny_x2_minutes"]["value"] == pytest.approx((once + others) / 60), "a calibration needs one model"
    assert measures["tiny_x2_host"]["value"] == max(p["host_peak_gb"] for p in figures["phases"].values())


def test_both_modes_give_the_same_answers_and_the_report_has_all_figures(calls: Calls) -> None:
    report = calls.resumed[1]
    part = report["parts"]["measure"]
    for rows in (1, 4):
        figures = part["figures"][f"batch {rows}"]
        assert figures["identical"]
        assert figures["num_answers"] == 2 * rows
        assert part["measures"][f"tiny_x2_{rows}"]["value"] == figures["over_full"] > 0
        for mode in ("full", "verified"):
            assert figures[mode]["num_tokens"] == pytest.approx(12 * figures["num_answers"], abs=rows)
            assert figures[mode]["tokens_per_deep_pass"] >= 1.0
        assert "drafts_per_deep_pass" in figures["verified"]
        assert f"0 of {figures['num_answers']} answers differ" in figures["shown"]
    assert [bar["holds"] for bar in report["bars"] if "answers that differ" in bar["name"]] == [True, True]
    for name in ("command", "date", "hardware", "kernels", "torch", "model", "factor", "calibration", "sizes"):
        assert report["conditions"][name], name
    assert report["conditions"]["small"], "a report that no document takes"


def test_the_profile_has_the_costs_of_passes_and_the_bytes_of_a_draft(calls: Calls) -> None:
    figures = calls.resumed[1]["parts"]["profile"]["figures"]
    assert [point["rows"] for point in figures["passes"]] == [1, 2, 4]
    assert figures["passes"][0]["cycles"][1]["draft_ms"] is not None
    assert all(figures["draft_bytes"][name] > 0 for name in ("layers", "head", "shortlist", "router"))


def test_a_finished_call_is_not_repeated(
    calls: Calls, patch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("it was done before")

    with patch.context() as quick:
        quick.setattr(Target, "make", refuse)
        code, report = run(calls.state, tmp_path / "again.json", "--parts", "measure,calibrate")
    assert code == 0
    assert list(report["parts"]) == ["calibrate", "measure"], "in the order in which they need each other"
    assert report["parts"]["measure"]["measures"] == calls.resumed[1]["parts"]["measure"]["measures"]
    assert "batch 4: done before" in capsys.readouterr().out


def test_an_answer_that_differs_fails_the_call(
    calls: Calls, patch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = json.loads((calls.state / "state.json").read_text())
    with patch.context() as wrong:
        wrong.setattr(measure_part, "commit", lambda: "another")  # so that it is measured again
        wrong.setattr(measure_part, "_different", lambda first, second: 1)
        arguments = ["--small", "--state", str(calls.state), "--parts", "measure", "--batches", "1"]
        assert production.main(arguments) == 1
    assert "MISS batch 1: answers that differ: 1 (<= 0)" in capsys.readouterr().out
    (calls.state / "state.json").write_text(json.dumps(state))


def test_drafts_are_counted_and_do_not_change_answers(calls: Calls, patch: pytest.MonkeyPatch) -> None:
    session = production.make_session(production.arguments(["--small", "--state", str(calls.state)]), lambda line: None)
    with patch.context() as eager:
        eager.setattr(measure_part, "greedy", lambda mode, tokens: greedy(mode, tokens, **DRAFT_ALWAYS[mode]))
        with session.bench.fixed_drafts(2):
            figures = measure_part._batch(session, 4)
    session.close()
    assert figures["verified"]["drafts_per_deep_pass"] > 0.5
    assert figures["full"]["drafts_per_deep_pass"] == 0
    assert figures["identical"]


@pytest.mark.parametrize(
    ("options", "changed"), [("--factor 4", "factor 2, now 4"), ("--set steps=7", "steps 6, now 7")]
)
def test_a_state_of_other_settings_is_refused_by_name(calls: Calls, options: str, changed: str) -> None:
    with pytest.raises(SystemExit, match=f"made for other settings.*{changed}.*name another --state"):
        production.main(["--small", "--state", str(calls.state), *options.split()])


def test_there_is_nothing_to_measure_before_a_calibration(tmp_path: Path) -> None:
    code, report = run(tmp_path / "state", tmp_path / "out.json", "--parts", "measure")
    assert code == 1
    assert "run the part calibrate first" in report["parts"]["measure"]["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--parts calibrate,measures", "--parts: unknown measures"),
        ("--batches 1,none", "--batches: got 1,none"),
        ("--factor 0", "--factor: got 0"),
        ("--set steps=many", "--set: got steps=many"),
        ("--set stepz=3", "stepz"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        production.main(["--small", "--state", str(tmp_path / "state"), *options.split()])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_a_stage_ends_at_its_first_update_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutOfTime, match="train"), TimedProgress(Deadline(0.0)).stage("train", 5, "step") as stage:
        stage.update(1)
    with TimedProgress(Deadline(1e6)).stage("train", 5, "step") as stage:
        stage.update(5)
    assert "train: 5/5 step" in capsys.readouterr().out


def test_training_stops_after_a_save_if_the_next_one_would_come_too_late(tmp_path: Path) -> None:
    late = SavingFiles(tmp_path, Deadline(30.0))
    late.push([stages.STATE])  # it was removed: nothing was saved
    late.path(stages.STATE).touch()
    late.push(["shards/train-00000.safetensors"])
    with pytest.raises(OutOfTime, match="next save"):
        late.push([stages.STATE])
    soon = SavingFiles(tmp_path, Deadline(30.0))
    soon.pull([stages.STATE])  # training begins: its first save took no time
    soon.push([stages.STATE])
    early = SavingFiles(tmp_path, Deadline(1e6))
    early.push([stages.STATE])
    early.push([stages.STATE])


def test_seconds_of_a_phase_add_up_over_calls_and_one_that_fails_counts(tmp_path: Path) -> None:
    for call in range(2):
        phases = Phases(State(tmp_path, {}), torch.device("cpu"), lambda line: None)
        phases.add("train", 10.0, device_gb=3.0 - call)
        with pytest.raises(OutOfTime), phases.timed("train"):
            raise OutOfTime
        assert phases.seconds > 0, "of what was timed here"
    entry = json.loads((tmp_path / "state.json").read_text())["phases"]["train"]
    assert entry["times"] == 4
    assert entry["seconds"] == pytest.approx(20.0, abs=1.0)
    assert entry["device_peak_gb"] == 3.0


def test_a_batch_size_that_cannot_end_in_time_is_not_begun() -> None:
    table = CostTable((CostPoint(1, 0.5, ((0, 0.5),)),))
    bench: Any = SimpleNamespace(planner=SimpleNamespace(table=table))
    needed = measure_part._expected_s(bench, 1, 2, Sizes(tokens=10, repeats=3))
    assert needed == measure_part.SLACK * 0.5 * 10 * 2 * 7
    with pytest.raises(OutOfTime, match="batch 1 needs"):
        Deadline(needed - 1).check("batch 1", needed)
    Deadline(needed + 60).check("batch 1", needed)


def test_one_row_has_prompt_after_prompt_and_a_batch_several_prompts_a_row_with_answers_of_different_lengths() -> None:
    prompts = [Prompt("abc"[index // 10], (index,)) for index in range(30)]
    alone, lengths = groups_of(prompts, 1, Sizes(prompts=6))
    assert [len(group) for group in alone] == [1] * 6
    assert {group[0].kind for group in alone} == {*"abc"}
    assert lengths == [128]
    [batch], lengths = groups_of(prompts, 9, Sizes(rounds=3))
    assert len({*batch}) == len(batch) == len(lengths) == 27
    assert (min(lengths), max(lengths), sum(lengths) / 27) == (64, 192, pytest.approx(128, abs=1))
    assert lengths != sorted(lengths)
    [many], _ = groups_of(prompts, 9, Sizes(rounds=7))
    assert len(many) == 63, "with too few prompts some come several times"


def test_the_shipped_prompts_fill_the_largest_batch_without_repeating() -> None:
    assert len(PROMPT_FILE.read_text().splitlines()) >= max(Sizes().batches)


def test_a_draft_is_a_cycle_without_its_deep_pass() -> None:
    full = [CostPoint(rows, 1.0 + 0.01 * rows, ((0, 1.0), (2, 1.0 + 0.01 * 3 * rows + 2 * 0.1))) for rows in (1, 2, 4)]
    one, two, _ = pass_costs(CostTable(tuple(full)))
    assert one["cycles"][0] == {"drafts": 0, "cycle_ms": 1e3, "deep_ms": pytest.approx(1010.0), "draft_ms": None}
    assert one["cycles"][1]["deep_ms"] == pytest.approx(1030.0)
    assert one["cycles"][1]["draft_ms"] == pytest.approx(100.0)
    assert two["cycles"][1]["deep_ms"] is None, "the table has no step of six tokens"


@pytest.mark.parametrize(
    ("model", "key"),
    [("demo", "demo_x8"), ("/models/Qwen2.5-Coder-1.5B.gguf", "qwen2_5_coder_1_5b_x8"), ("org/Name-7b", "name_7b_x8")],
)
def test_rows_are_keyed_by_model_and_factor(model: str, key: str) -> None:
    assert Target(model, 8, "cpu", "float32").key == key


def test_the_default_folder_is_that_of_model_and_factor(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as there:
        there.setattr(production, "STATES", tmp_path)
        session = production.make_session(production.arguments(["--small", "--factor", "4"]), print)
    assert session.folder == tmp_path / "tiny_x4"


def test_every_row_of_the_table_has_its_key_and_the_bars_of_the_demo_model_eight_times_as_wide() -> None:
    rows = {row.key: row for row in ROWS if row.bench == "production"}
    sizes = {f"demo_x8_{batch}" for batch in Sizes().batches}
    assert rows.keys() == sizes | {"demo_x8_minutes", "demo_x8_artefact", "demo_x8_host"}
    assert all(rows[key].at_least for key in sizes)
    assert not any(rows[key].at_least for key in rows.keys() - sizes)
    assert all(row.part in production.PARTS for row in rows.values())


def test_answers_are_compared_token_by_token() -> None:
    def runs(*answers: tuple[int, ...]) -> Runs:
        made: list[Any] = [SimpleNamespace(tokens=[SimpleNamespace(token_id=i) for i in ids]) for ids in answers]
        return Runs([1.0], made)

    assert measure_part._different(runs((1, 2), (3, 4)), runs((1, 2), (3, 5))) == 1
    assert measure_part._different(runs((1, 2)), runs((1, 2))) == 0
