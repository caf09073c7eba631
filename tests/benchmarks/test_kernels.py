"""The benchmark of the kernels without a GPU: native ops, and the CUDA cases over the kernels' twin."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from benchmarks.common.shapes import EIGHT_B, SMALL
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels import measure
from benchmarks.kernels.__main__ import bars_of
from benchmarks.kernels.layers import Calls
from benchmarks.kernels.measure import Case, Cases, Rates, Timed, difference, time_case
from tests.kernels.twin import twin_kernels
from tide_core.kernels import CudaKernels
from tide_core.kernels.reference import ops as reference

CPU = torch.device("cpu")
SLOW = Rates(read_bytes_per_s=1e6, flops_per_s=1e9)
NOT_TIMED = {
    "name",
    "attention_workspace",
    "score_scratch",
    "norm_into",
    "supports",
    "supports_joined",
    "paged_attention",
    "quantised_linear",
}
"""Not ops of a step on a GPU, or timed under another name: `paged_attention` is `attend`, `norm_into` `rms_norm`."""


@pytest.fixture
def twin_cases() -> list[Case]:
    cases = Cases(twin_kernels(), CPU, torch.float32, small=True)
    return list(cases.all([SMALL], [1, 3], [(20, 2), (48, 9)]))


def timed(op: str = "attend", what: str = f"{EIGHT_B.name} context 512", rows: int = 1, **values: Any) -> Timed:
    return Timed(
        op,
        what,
        rows,
        **{"us": 10.0, "reference_us": 100.0, "floor_us": 10.0, "error": 0.0, "agrees": True, **values},
    )


def test_every_op_the_engine_calls_on_a_gpu_is_timed(twin_cases: list[Case]) -> None:
    called = {field.name for field in fields(CudaKernels)} - NOT_TIMED
    assert called <= {case.op for case in twin_cases}


def test_every_case_runs_and_agrees_with_its_reference(twin_cases: list[Case]) -> None:
    for case in twin_cases:
        found = time_case(case, SLOW, CPU, torch.float32, calls=1)
        assert found.agrees, case.name
        assert found.error == 0.0, "the twin is the reference"
        assert min(found.us, found.reference_us, found.floor_us) > 0.0


def test_an_op_that_writes_is_compared_by_what_it_wrote() -> None:
    broken = replace(twin_kernels(), write_kv=lambda *a: None, scatter_rows=lambda *a: None)
    cases = {case.op: case for case in Cases(broken, CPU, torch.float32, small=True).all([SMALL], [3], [])}
    assert not time_case(cases["write_kv"], SLOW, CPU, torch.float32, calls=1).agrees
    assert not time_case(cases["scatter_rows"], SLOW, CPU, torch.float32, calls=1).agrees
    assert time_case(cases["rms_norm"], SLOW, CPU, torch.float32, calls=1).agrees


def test_queries_of_attention_are_ragged() -> None:
    seen = []

    def attend(q: Any, k: Any, v: Any, tables: Any, starts: Any, lens: Any, scaling: float) -> torch.Tensor:
        seen.append(starts.diff().tolist())
        return reference.paged_attention(q, k, v, tables, starts, lens, scaling)

    recording_kernels = replace(twin_kernels(), attend=lambda *tensors, **more: attend(*tensors))
    [case, _] = Cases(recording_kernels, CPU, torch.float32, small=True).all([SMALL], [], [(48, 9)])
    case.make().ours(0)
    assert seen == [[1, 2, 3, 4, 5, 6, 7, 8, 1]]


def test_the_floor_is_that_of_bytes_or_of_arithmetic_whichever_is_larger() -> None:
    case = Case("op", "", 1, lambda: Calls(lambda i: torch.ones(1), lambda i: torch.ones(1), 1000, 10**6))
    assert time_case(case, Rates(1e6, 1e12), CPU, torch.float32, calls=1).floor_us == pytest.approx(1000.0)
    assert time_case(case, Rates(1e12, 1e9), CPU, torch.float32, calls=1).floor_us == pytest.approx(1000.0)


def test_a_difference_is_relative_where_numbers_are_large_and_infinite_where_there_is_none() -> None:
    assert difference(torch.tensor([1000.0]), torch.tensor([1010.0])) == pytest.approx(10 / 1010)
    assert difference(torch.tensor([0.0]), torch.tensor([0.01])) == pytest.approx(0.01)
    assert difference((torch.zeros(1), torch.tensor([torch.nan])), (torch.zeros(1), torch.ones(1))) == float("inf")


def test_the_bar_of_attention_is_for_the_most_rows_and_that_of_the_router_for_its_worst() -> None:
    found = [
        timed(rows=1, us=100.0),
        timed(rows=64, us=12.0),
        timed(what="demo context 512", rows=64, us=1000.0),
        timed("router", EIGHT_B.name, rows=1, us=10.0),
        timed("router", EIGHT_B.name, rows=256, us=40.0),
    ]
    attention, router, wrong = bars_of(found)
    assert attention.value == pytest.approx(1.2)
    assert attention.holds
    assert router.value == pytest.approx(2.5)
    assert not router.holds
    assert wrong.holds
    assert not bars_of([timed(agrees=False)])[-1].holds


def test_on_a_cpu_all_native_ops_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--device", "cpu", "--calls", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for name in ("command", "date", "hardware", "kernels", "dtype", "read_bytes_per_s", "flops_per_s"):
        assert report["conditions"][name], name
    ops = {timed["op"] for timed in report["parts"]["ops"]}
    assert ops == {"linear", "rms_norm", "silu_mul", "rotary", "write_kv", "paged_attention"}


def test_a_wrong_op_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = replace(twin_kernels(), rms_norm=lambda x, weight, eps: 2 * x)
    for module in (kernels, measure):
        monkeypatch.setattr(module, "select_kernels", lambda choice, device: broken)
    arguments = ["--device", "cpu", "--calls", "1", "--ops", "rms_norm,silu_mul"]
    assert kernels.main(arguments) == 1
    out = capsys.readouterr().out
    assert "MISS ops that differ from their reference: 2" in out
    assert kernels.main([*arguments, "--no-bars"]) == 0
