"""The GPU benchmark on a tiny shape without a GPU: every part runs and fills its rows of the table."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.common.runs import Bench, TimedBatch, greedy, output_ids, take_turns, varied
from benchmarks.common.shapes import EIGHT_B, SMALL, Subject
from benchmarks.common.timing import read_profile, run_step
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import replay, rivals
from benchmarks.gpu.ablation import ablation
from benchmarks.gpu.demo import KINDS
from benchmarks.gpu.parts import FEW, MANY, Measures, split
from benchmarks.gpu.replay import Replay, core_of, decode_rate, observed, record, runner_of
from benchmarks.gpu.replay_cycles import ReplayedCycles
from benchmarks.gpu.switches import SWITCHES, Switch
from benchmarks.gpu.table import ROWS
from benchmarks.kernels import measure as kernels
from tests.evaluation.on_disk import PROMPTS, save_artefact_for_it, save_model
from tests.kernels.twin import engine_kernels
from tide_core.config import EngineConfig
from tide_core.engine import assemble
from tide_core.execution.graphs.in_flight import InFlightStep
from tide_core.kv.block_manager import BlockTable
from tide_core.request import NO_EXITS, ExitPolicy

NEEDS_A_GPU = {"attention_512", "attention_8192", "attention_32768", "router"}
DRAFTING = ExitPolicy("verified", (0.0,))
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("demo")
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "kind": text[0]}) + "\n" for text in PROMPTS))
    return {
        "--demo": str(save_model(root / "model")),
        "--demo-artefact": str(save_artefact_for_it(root / "artefact")),
        "--prompt-file": str(prompts),
    }


@pytest.fixture
def run(demo: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The benchmark without the processes of other implementations; its exit code and report."""
    monkeypatch.setattr(rivals, "run_side", lambda side, more, limit_s: {"step_s": 1.0, "compiled": True})

    def main(*options: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "report.json"
        where = [word for pair in demo.items() for word in pair]
        code = gpu.main(["--device", "cpu", "--small", "--out", str(out), *where, *options])
        return code, json.loads(out.read_text())

    return main


@pytest.fixture(scope="module")
def whole(demo: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report of every part, and what was printed."""
    out, printed = tmp_path_factory.mktemp("whole") / "report.json", io.StringIO()
    where = [word for pair in demo.items() for word in pair]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(rivals, "run_side", lambda side, more, limit_s: {"step_s": 1.0, "compiled": True})
        assert gpu.main(["--device", "cpu", "--small", "--out", str(out), *where, "--no-bars", "--json"]) == 0
    return json.loads(out.read_text()), printed.getvalue()


@pytest.fixture(scope="module")
def bench(demo: dict[str, str]) -> Any:
    settings = {"model": demo["--demo"], "artefact": demo["--demo-artefact"], "device": "cpu", "prefix_caching": False}
    bench = Bench(EngineConfig(**settings), Path(demo["--prompt-file"]))
    with bench.engine:
        yield bench


def test_every_part_runs_and_all_rows_of_the_table_that_need_no_gpu_are_filled(
    whole: tuple[dict[str, Any], str],
) -> None:
    report, printed = whole
    assert json.loads(printed) == report
    assert list(report["parts"]) == list(gpu.PARTS)
    measures = {key: m for part in report["parts"].values() for key, m in part["measures"].items()}
    assert {row.key for row in ROWS if row.part in gpu.PARTS} - NEEDS_A_GPU == measures.keys()
    unknown = {key for key, measure in measures.items() if measure["value"] is None}
    assert unknown == {"reads", "tide"}
    assert "pip install tide-inference" in measures["tide"]["shown"]
    assert "replayed" in measures["replay_1"]["shown"]
    for name in ("command", "date", "hardware", "kernels", "torch", "transformers", "read_bytes_per_s", "shape"):
        assert report["conditions"][name], name
    assert {bar["name"] for bar in report["bars"]} >= {
        row.what for row in ROWS if row.part in ("step", "cycle", "demo")
    }


def test_parts_that_run_only_if_they_are_named_fill_their_rows(run: Run) -> None:
    named = "fp8,seventy,load"
    code, report = run("--parts", named, "--batches", "1", "--no-bars")
    assert code == 0
    measures = {key: m for part in report["parts"].values() for key, m in part["measures"].items()}
    assert measures.keys() == {"fp8_1", "fp8_floor", "seventy_1", "load_host"}
    assert all(measure["value"] > 0 for measure in measures.values())
    half, narrow = (Subject(SMALL, "cpu", fp8=fp8).weight_bytes for fp8 in (False, True))
    assert report["parts"]["fp8"]["figures"]["weight_bytes"] == narrow < 0.7 * half


def test_rows_that_are_not_plain_are_compared_with_plain_ones(whole: tuple[dict[str, Any], str]) -> None:
    report, _ = whole
    figures, measures = report["parts"]["demo"]["figures"], report["parts"]["demo"]["measures"]
    for group in (figures["kinds"], figures["mixed"]):
        assert group.keys() == {"plain", *KINDS}
        assert all(mine["num_tokens"] == group["plain"]["num_tokens"] for mine in group.values())
    for kind in KINDS:
        assert measures[f"demo_8_{kind}"]["value"] == figures["kinds"][kind]["over_plain"]
    assert measures["demo_8_mixed"]["value"] == min(figures["mixed"][kind]["over_plain"] for kind in KINDS)


def test_only_the_rows_next_to_the_extra_one_count(bench: Bench) -> None:
    others, contract = bench.prompts[:3], [greedy("verified", tokens) for tokens in (4, 9, 6)]
    found = bench.timed_around(bench.prompts[-1], greedy("verified", 60), others, contract)
    assert found.num_tokens == 19
    assert [output_ids(answer) for answer in found.answers] == [
        output_ids(answer) for answer in bench.run(others, contract)
    ]
    bench.parts.core.check_idle()
    with pytest.raises(RuntimeError, match="ended before the others"):
        bench.timed_around(bench.prompts[-1], greedy("verified", 1), others, contract)


def test_works_take_turns_and_rates_are_those_of_each_repeat() -> None:
    order: list[str] = []

    def work(name: str, tokens: int) -> Callable[[], TimedBatch]:
        return lambda: order.append(name) or TimedBatch(tokens, 0.5, [])

    runs = take_turns({"a": [work("a", 1), work("a", 2)], "b": [work("b", 2), work("b", 4)]}, 2)
    assert order == ["a", "b", *"ab", *"ba", *"ba", *"ab"], "a warm-up, then each batch begins with another name"
    assert runs["a"].tokens_per_s == [3.0, 3.0]
    assert runs["b"].over(runs["a"]) == 2.0


def test_mechanisms_are_taken_out_one_at_a_time_and_come_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    monkeypatch.setattr(assemble, "measure", functools.partial(assemble.measure, limit_s=0.0))  # of one row: less work
    seen: set[str] = set()

    def record_entry(name: str, switch: Switch) -> Switch:
        def recorded(parts: Any) -> Any:
            off = switch(parts)

            @contextlib.contextmanager
            def entered() -> Any:
                assert off is not None
                seen.add(name)
                with off:
                    yield

            return None if off is None else entered()

        return recorded

    switches = {name: record_entry(name, switch) for name, switch in SWITCHES.items()}
    before = InFlightStep._usual_result
    monkeypatch.setitem(gpu.MORE_PARTS, "ablation", lambda session: ablation(session, switches))
    sizes = dataclasses.replace(gpu.SMALL_SIZES, batches=(1, 4), rounds=1, prompts=1)
    monkeypatch.setattr(gpu, "SMALL_SIZES", sizes)
    code, report = run("--parts", "ablation", "--no-bars")
    assert code == 0, report
    part = report["parts"]["ablation"]
    measures, over_base = part["measures"], part["figures"]["over_base"]
    assert {"no_change", "launch_depth", "branches", "fast_results"} <= seen
    for name in seen:
        assert over_base[name].keys() == {"1", "4"}
        assert all(ratios.keys() == {"full", "verified"} for ratios in over_base[name].values())
        assert measures[f"without_{name}_4"]["value"] == min(over_base[name]["4"].values())
    assert {key for key, measure in measures.items() if measure["value"] is None} == {
        f"without_{name}" for name in SWITCHES.keys() - seen
    }
    assert before is InFlightStep._usual_result


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_the_engine_only_while_it_is_entered(
    name: str, demo: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    parts = Subject(SMALL, "cpu").exits
    cycles, scheduler = parts.runner.cycles, parts.core.scheduler
    assert cycles is not None

    def state() -> tuple[Any, ...]:
        return (cycles.depths, cycles._branches, scheduler.prefills_ahead, InFlightStep._usual_result)

    before = state()
    off = SWITCHES[name](parts)
    assert state() == before
    if off is None:
        assert name == "prefill_ahead"
        assert not scheduler.prefills_ahead
        return
    with off:
        assert (state() == before) == (name == "no_change")
    assert state() == before


def test_cycles_in_graphs_are_measured_as_well(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    code, report = run("--parts", "cycle", "--no-bars")
    assert code == 0, report
    assert report["parts"]["cycle"]["measures"].keys() == {"shallow", "deep", "routers"}


def test_a_part_that_fails_is_named_and_the_others_are_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(world: Any) -> Measures:
        raise SystemExit("no such artefact")

    monkeypatch.setitem(gpu.PARTS, "demo", fail)
    code, report = run("--parts", "demo,step", "--no-bars")
    assert code == 1
    assert report["parts"]["demo"]["error"] == "SystemExit: no such artefact"
    assert "step_1" in report["parts"]["step"]["measures"]


def test_the_report_is_on_disk_before_the_next_part_begins(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def look(world: Any) -> Measures:
        seen.update(json.loads((tmp_path / "report.json").read_text()))
        return Measures()

    monkeypatch.setitem(gpu.PARTS, "cycle", look)
    run("--parts", "step,cycle", "--no-bars")
    assert "step_8" in seen["parts"]["step"]["measures"]


@pytest.mark.parametrize(("value", "code"), [(1.25, 0), (1.26, 1)])
def test_a_missed_bar_is_reported_and_ends_with_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: float, code: int
) -> None:
    found = Measures()
    found.add("step_1", value, "as given")
    monkeypatch.setitem(gpu.PARTS, "step", lambda world: found)
    assert run("--parts", "step")[0] == code
    assert ("MISS full-depth step" in capsys.readouterr().out) == bool(code)
    assert run("--parts", "step", "--no-bars")[0] == 0


def test_an_unknown_part_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--parts", "step,steps")
    assert "unknown steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--batches", "1,none")
    assert "--batches: got 1,none, expected numbers of rows" in capsys.readouterr().err


def test_only_the_batches_that_are_named_are_measured(run: Run) -> None:
    code, report = run("--parts", "step", "--batches", "2", "--no-bars")
    assert code == 0
    assert list(report["parts"]["step"]["measures"]) == ["step_2"]


def test_shallow_and_deep_passes_are_separated_by_two_cycles() -> None:
    shallow, deep = split(few_s=3.0 + FEW * 0.5, many_s=3.0 + MANY * 0.5)
    assert (shallow, deep) == (pytest.approx(0.5), pytest.approx(3.0))


def test_a_refused_row_runs_its_router_and_drafts_nothing() -> None:
    parts = Subject(SMALL, "cpu").exits
    table = BlockTable()
    parts.core.scheduler.blocks.allocate(table, 8)
    [row] = run_step(parts, gpu_parts.refused([table])).rows
    assert (row.counts[0].drafted, len(row.tokens)) == (0, 1)
    assert row.tokens[0].score is not None
    assert 0.0 < row.tokens[0].score < 1.0


def test_the_bytes_of_a_shallow_pass_are_those_of_what_it_runs() -> None:
    subject, shape = Subject(SMALL, "cpu", kernels="reference"), SMALL
    wide, keys = shape.hidden, shape.kv_heads * shape.head_dim
    layer = 2 * wide * wide + 2 * keys * wide + 3 * wide * shape.intermediate + 2 * wide
    mix = 2 * wide * wide + wide + 9 * 2 * wide + 2 * wide  # weight, bias, distances, norms of both inputs
    tap_norms = 2 * wide
    router = wide + 128 * (wide + 2) + 128 + 128 + 1
    kv = 3 * shape.context * 2 * keys
    expected = 2 * layer + (mix + tap_norms + layer) + shape.shortlist * wide + router + kv
    assert subject.shallow_bytes == 4 * expected


def test_rows_of_the_ops_are_taken_from_the_right_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(op: str, what: str, rows: int, us: float) -> kernels.Timed:
        return kernels.Timed(op, f"{EIGHT_B.name}{what}", rows, us, 60.0, 10.0, 0.0, True)

    cases = [timed("attend", " context 512", 1, 90.0), timed("attend", " context 512", 64, 11.0)]
    cases += [timed("attend", " context 8192", 8, 12.0), timed("router", "", 1, 10.0), timed("router", "", 256, 30.0)]
    monkeypatch.setattr(kernels, "measure", lambda *a, **k: cases)
    world: Any = SimpleNamespace(subject=Subject(SMALL, "cpu"), sizes=gpu.SMALL_SIZES)
    measures = gpu_parts.ops(world).measures
    assert {key: measure["value"] for key, measure in measures.items()} == pytest.approx(
        {"attention_512": 1.1, "attention_8192": 1.2, "router": 2.0}
    )
    cases[0] = dataclasses.replace(cases[0], agrees=False)
    with pytest.raises(RuntimeError, match="differ from their reference"):
        gpu_parts.ops(world)


def test_host_reads_are_the_waits_within_the_cycle_whatever_the_number_of_copies() -> None:
    def event(name: str, start: float, end: float, *, on_device: bool = False) -> Any:
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(name=name, time_range=span, device_type="DeviceType.CUDA" if on_device else "CPU")

    events = [
        event("tide cycle", 10.0, 100.0),
        event("tide cycle", 12.0, 99.0, on_device=True),
        event("ampere_gemm", 20.0, 50.0, on_device=True),
        event("Memcpy HtoD (Pinned -> Device)", 15.0, 16.0, on_device=True),
        event("Memcpy DtoH (Device -> Pinned)", 50.0, 52.0, on_device=True),
        event("Memcpy DtoH (Device -> Pinned)", 52.0, 54.0, on_device=True),
        event("cudaStreamSynchronize", 30.0, 60.0),
        event("cudaLaunchKernel", 31.0, 32.0),
        event("cudaDeviceSynchronize", 101.0, 102.0),
    ]
    found = read_profile(events)
    assert (found.copies_to_host, found.waits, found.num_kernels, found.host_reads) == (2, 1, 1, 1)
    assert found.busy_s == pytest.approx(35e-6)
    assert read_profile([*events, event("cudaEventSynchronize", 70.0, 71.0)]).host_reads == 2
    polled = [e for e in events if e.name != "cudaStreamSynchronize"]
    assert read_profile(polled).host_reads == 1


def test_a_replayed_row_outputs_what_the_trace_accepts_and_ends_at_its_length() -> None:
    parts = Subject(SMALL, "cpu").exits
    assert parts.planner is not None
    parts.planner.max_drafts = 3
    trace = [(3, 0), (3, 3), (3, 1)]
    lengths = []
    run = Replay(runner_of(parts), trace)
    core = core_of(parts, observed(run, lambda step, result: lengths.append(len(result.tokens))))
    assert decode_rate(core, DRAFTING, rows=1, prompt=20, tokens=16) > 0
    assert run.cycles[:4] == [(3, 0), (3, 3), (3, 1), (3, 0)]
    assert lengths[:5] == [1, 1, 4, 2, 1], "the token of the prompt, then one more than each cycle accepts"
    assert sum(lengths) >= 16
    core.check_idle()


def test_with_a_step_in_flight_the_device_continues_as_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    parts = Subject(SMALL, "cpu").exits
    assert parts.planner is not None
    parts.planner.max_drafts = 3
    assert parts.runner.cycles is not None
    replayed = ReplayedCycles(parts.runner.cycles, [(3, 0), (3, 3), (3, 1)])
    lengths: list[int] = []
    core = core_of(parts, observed(runner_of(parts), lambda step, result: lengths.append(len(result.tokens))))
    read = []
    results = InFlightStep.results
    monkeypatch.setattr(InFlightStep, "results", lambda self, *given: read.append(self) or results(self, *given))
    with replayed.on():
        assert decode_rate(core, DRAFTING, rows=1, prompt=20, tokens=24) > 0
    assert replayed.cycles[:6] == [(3, 0), (3, 3), (3, 1)] * 2
    assert lengths[:7] == [1, 1, 4, 2, 1, 4, 2]
    continued = [flight for flight in read if any(row.previous >= 0 for row in flight.rows)]
    assert len(continued) >= len(read) - 3, "steps that were launched early were used"
    core.check_idle()


def test_full_depth_is_not_touched_by_a_replay() -> None:
    parts = Subject(SMALL, "cpu").exits
    run = Replay(runner_of(parts), [(3, 3)])
    lengths: list[int] = []
    core = core_of(parts, observed(run, lambda step, result: lengths.append(len(result.tokens))))
    decode_rate(core, NO_EXITS, rows=2, prompt=9, tokens=5)
    assert run.cycles == []
    assert lengths == [1] * 10


def test_a_trace_is_what_the_demos_cycles_did(bench: Bench) -> None:
    trace = record(bench, 3, 16, 2)
    assert trace == record(bench, 3, 16, 2), "greedy: the same again"
    assert all(0 <= accepted <= drafted <= 3 for drafted, accepted in trace)
    with bench.fixed_drafts(3):
        answers = bench.run(bench.spread(replay.RECORDED), greedy("verified", 16))
    usages = [answer.usage for answer in answers if answer.usage is not None]
    # Cycles at the end of an answer have fewer drafts and are not in the trace.
    assert 0 < sum(accepted for _, accepted in trace) <= sum(usage.num_accepted for usage in usages)
    assert len(trace) <= sum(usage.deep_passes for usage in usages)
    with pytest.raises(RuntimeError, match="no cycle of 3 drafts"):
        record(bench, 3, 4, 2)


def test_replayed_tokens_are_counted_only_while_no_row_has_ended() -> None:
    """Rows that accept more end earlier; afterwards the batch is not full."""
    outputs = [
        [SimpleNamespace(request_id=f"row {row}", tokens=[0], finished=False, error=None) for row in range(2)],
        [SimpleNamespace(request_id="row 0", tokens=[0, 0, 0], finished=True, error=None)],
        [SimpleNamespace(request_id="row 1", tokens=[0] * 1000, finished=True, error=None)],
    ]

    class Core:
        has_work = property(lambda self: bool(outputs))

        def add(self, request: Any) -> None:
            pass

        def step(self) -> list[Any]:
            time.sleep(0.002)
            return outputs.pop(0)

    assert decode_rate(Core(), NO_EXITS, rows=2, prompt=3, tokens=4) < 3 / 0.002  # type: ignore[arg-type]


def test_lengths_of_a_batch_are_different_and_come_to_the_stated_mean() -> None:
    lengths = varied(128, 56)
    assert len(set(lengths)) == 56
    assert (min(lengths), max(lengths)) == (64, 192)
    assert abs(sum(lengths) / 56 - 128) < 1
    assert lengths != sorted(lengths)


def test_without_a_device_the_message_has_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu --small"):
        gpu.main([])
