"""The bfloat16 linear on every instruction set that this machine has. AMX adds it up in another way than the others."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.kernels.kernel_cases import assert_near, assert_same_bits
from tide_core.kernels.reference import ops as reference

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")


def narrow(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def taken_at_start(**variables: str) -> subprocess.CompletedProcess[str]:
    """The module alone, in a process of its own: nothing else is imported."""
    script = (
        "import sys, importlib.util as load; spec = load.spec_from_file_location('_native', sys.argv[1]); "
        "native = load.module_from_spec(spec); spec.loader.exec_module(native); print(native.instruction_set())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TIDE_INSTRUCTION_SET"} | variables
    command = [sys.executable, "-c", script, _native.__file__]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_best_instruction_set_is_taken_and_another_can_be_set(instruction_set: str) -> None:
    assert _native.instruction_set() == instruction_set
    assert taken_at_start().stdout.strip() == _native.instruction_sets()[-1]
    assert taken_at_start(TIDE_INSTRUCTION_SET=instruction_set).stdout.strip() == instruction_set


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="instruction set: got abacus, expected one of baseline"):
        _native.set_instruction_set("abacus")
    refused = taken_at_start(TIDE_INSTRUCTION_SET="abacus")
    assert refused.returncode != 0
    assert "TIDE_INSTRUCTION_SET: got abacus, expected one of baseline" in refused.stderr


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 17, 64, 300])
@pytest.mark.parametrize(("in_features", "out_features"), [(576, 96), (64, 1), (1, 8), (33, 17), (130, 3), (1536, 200)])
def test_it_matches_the_reference(instruction_set: str, rows: int, in_features: int, out_features: int) -> None:
    x, weight, bias = narrow(rows, in_features), narrow(out_features, in_features), narrow(out_features)
    weight /= in_features**0.5
    for added in (None, bias):
        wide = None if added is None else added.float()
        expected = reference.linear(x.float(), weight.float(), wide).bfloat16()
        assert_near(native.linear(x, weight, added), expected)


@pytest.mark.parametrize(("in_features", "out_features"), [(579, 101), (512, 640)])
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(
    instruction_set: str, in_features: int, out_features: int
) -> None:
    x, weight, bias = narrow(300, in_features), narrow(out_features, in_features), narrow(out_features)
    alone = torch.stack([native.linear(row, weight, bias) for row in x])
    for rows in (2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 150, 256, 257, 300):
        assert_same_bits(native.linear(x[:rows], weight, bias), alone[:rows])
        assert_same_bits(native.linear(x[-rows:], weight, bias), alone[-rows:])


@pytest.mark.parametrize("in_features", [64, 192, 576, 1536, 4096])
@pytest.mark.parametrize("numbers", ["cancelling", "tiny"])
def test_what_is_rounded_away_is_the_same_alone_and_in_any_batch(
    instruction_set: str, in_features: int, numbers: str
) -> None:
    x, weight = narrow(70, in_features), narrow(50, in_features)
    if numbers == "cancelling":  # the outputs are what was rounded away: another order of additions would show
        half = in_features // 2
        x[:, half:], weight[:, half:] = x[:, :half].flip(1), -weight[:, :half].flip(1)
    else:  # products about the smallest normal number
        x, weight = x * 2.0**-63, weight * 2.0**-63
    together = native.linear(x, weight)
    assert together.any()
    for rows in range(1, 20):
        assert_same_bits(native.linear(x[:rows], weight), together[:rows])
        assert_same_bits(native.linear(x[-rows:], weight), together[-rows:])


@pytest.mark.parametrize("rows", [1, 16, 37, 300])
def test_the_number_of_threads_changes_no_bit(instruction_set: str, rows: int) -> None:
    x, weight = narrow(rows, 640), narrow(2051, 640)
    _native.set_num_threads(1)
    expected = native.linear(x, weight)
    for threads in (2, 3, 5):
        _native.set_num_threads(threads)
        for _ in range(3):
            assert_same_bits(native.linear(x, weight), expected)


def test_python_threads_may_call_at_once(instruction_set: str) -> None:
    _native.set_num_threads(3)
    weight = narrow(1024, 512)
    inputs = [narrow(rows % 5 * 9 + 1, 512) for rows in range(16)]
    expected = [native.linear(x, weight) for x in inputs]
    with ThreadPoolExecutor(6) as executor:
        for _ in range(5):
            for actual, wanted in zip(executor.map(lambda x: native.linear(x, weight), inputs), expected, strict=True):
                assert_same_bits(actual, wanted)


def test_a_forked_child_may_use_each_of_them_too() -> None:
    script = """
import os, torch
from tide_core.kernels import _native
from tide_core.kernels.cpu import ops as native
_native.set_num_threads(3)
x, weight = torch.ones(20, 512).bfloat16(), torch.ones(1024, 512).bfloat16()  # so few that Torch compares on one thread
for name in _native.instruction_sets():
    _native.set_instruction_set(name)
    assert (native.linear(x, weight) == 512).all(), name
    child = os.fork()
    if child == 0:
        os._exit(0 if (native.linear(x, weight) == 512).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("rows", "in_features"), [(20, 70), (3, 128)])
def test_nan_and_infinity_reach_only_their_own_row_and_column(
    instruction_set: str, rows: int, in_features: int
) -> None:
    x, weight = torch.rand(rows, in_features) + 0.1, torch.rand(21, in_features) + 0.1
    x[1, 3], x[2, 69], weight[18, 68] = float("nan"), float("inf"), float("inf")
    y = native.linear(x.bfloat16(), weight.bfloat16())
    assert y[1].isnan().all()
    assert y[2].isinf().all()
    others = [row for row in range(rows) if row not in (1, 2)]
    assert y[others, 18].isinf().all()
    y[:, 18] = 0
    assert y[others].isfinite().all()


@pytest.mark.parametrize(("rows", "in_features", "out_features"), [(1, 9, 3), (2, 64, 3), (17, 33, 18), (40, 300, 5)])
def test_no_memory_behind_the_tensors_is_used(
    instruction_set: str, rows: int, in_features: int, out_features: int
) -> None:
    def ones(*shape: int) -> torch.Tensor:
        count = shape[0] * shape[1]
        behind = torch.full((count + 4096,), float("nan"), dtype=torch.bfloat16)
        return behind[:count].view(shape).fill_(1)

    y = native.linear(ones(rows, in_features), ones(out_features, in_features))
    expected = torch.full((rows, out_features), float(in_features), dtype=torch.bfloat16)
    assert_same_bits(y, expected)


@pytest.mark.parametrize("in_features", [2, 64])
def test_amx_takes_subnormal_numbers_as_zero(instruction_set: str, in_features: int) -> None:
    if instruction_set != "amx":
        pytest.skip("the others keep them")
    tiny = torch.finfo(torch.bfloat16).tiny
    x = torch.zeros(1, in_features, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = tiny, tiny / 2
    weight = torch.eye(2, in_features, dtype=torch.bfloat16)
    assert native.linear(x, weight).tolist() == [[tiny, 0.0]]
    assert (torch.tensor(tiny) / 2).item() > 0  # and leaves the caller's numbers alone
