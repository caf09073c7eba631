"""The benchmark of FP8 linears without a GPU: one of them in plain Torch, and the table."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.common.shapes import EIGHT_B, SMALL
from benchmarks.kernels import fp8
from benchmarks.kernels.fp8 import FORMS, Linears, Timed, linears, lines_of

pytestmark = pytest.mark.unit


def test_a_linear_is_timed_in_every_form_with_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "per_call_s", lambda call, calls, device: (call(0), call(1), 1e-6)[2])
    shape = dataclasses.replace(SMALL, hidden=128, intermediate=160)
    with torch.inference_mode():
        found = list(Linears(torch.device("cpu")).time(shape, "gate and up", [1, 3], rate=1e9))
    assert [(one.form, one.rows) for one in found] == [(form, rows) for form in FORMS for rows in (1, 3)]
    assert all(one.same_bits and one.us == pytest.approx(1.0) for one in found)
    floors = {(one.form, one.rows): one.floor_us for one in found}
    states = 2 * (128 + 160)
    assert floors["bf16", 1] == pytest.approx((2 * 320 * 128 + states) / 1e3)
    assert floors["rows", 3] == pytest.approx((320 * 128 + 4 * 320 + 3 * states) / 1e3)
    assert floors["blocks", 3] == pytest.approx((320 * 128 + 4 * 3 + 3 * states) / 1e3)


def test_the_table_ends_with_the_sums_of_a_layer() -> None:
    microseconds = {"bf16": 2.0, "rows": 1.0, "blocks": 1.6}
    found = [Timed(name, 8, form, us, 0.5, True) for name in linears(EIGHT_B) for form, us in microseconds.items()]
    *_, last = lines_of(found, [8])
    expected = "a layer 8 rows bf16 8.00 us 25.0% rows 4.00 us 50.0% blocks 6.40 us 31.2% times bf16 2.00 1.25"
    assert " ".join(last.split()) == expected
