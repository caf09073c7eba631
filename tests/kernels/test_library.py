"""The ops as Torch sees them: what they write is declared, and their shapes are known without running them."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.library_cases import library_cases
from tide_core.kernels import library

WRITES = {
    "rotary_write": {"k_pool", "v_pool"},
    "write_kv": {"k_pool", "v_pool"},
    "attend_joined": {"k_pool", "v_pool"},
    "scatter_rows": {"out"},
    "linear_out": {"out"},
    "rms_norm_out": {"out"},
    "silu_mul_out": {"out"},
    "rotary_write_out": {"k_pool", "v_pool", "out"},
    "paged_attention_out": {"workspace", "out"},
    "peak_out": {"partials", "counters", "best", "best_at", "second", "sum"},
    "router_out": {"partials", "counters", "scores", "flags"},
    "gather_rows_out": {"out"},
    "exit_input_out": {"out"},
    "plan_cycle": {"tables", "wide", "narrow"},
    "carry_on": {"carried", "following_rows"},
    "pending_tokens": {"drafted", "token_ids"},
    "copy_slots": {"pools"},
}
NAMES = list(library_cases("cpu"))


def test_the_cases_are_all_ops_of_the_library() -> None:
    assert library.__all__ == []
    assert sorted(name for name in dir(torch.ops.tide) if not name.startswith("_") and name != "name") == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_op_declares_exactly_what_it_writes(name: str) -> None:
    arguments = getattr(torch.ops.tide, name).default._schema.arguments
    declared = {one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write}
    assert declared == WRITES.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_shapes_writes_and_compiled_results_are_as_declared(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.tide, name).default, library_cases("cpu")[name])


# How many of a writing op's arguments its returning twin takes, and how many results they have.
TWINS = {
    "linear": (7, 1),
    "silu_mul": (2, 1),
    "rotary_write": (10, 1),
    "peak": (1, 4),
    "router": (11, 2),
    "exit_input": (8, 1),
}


@pytest.mark.parametrize("name", TWINS)
def test_an_op_that_writes_gives_what_its_twin_returns_and_leaves_other_rows_alone(name: str) -> None:
    num_inputs, num_results = TWINS[name]
    arguments = library_cases("cpu")[f"{name}_out"]
    written = arguments[-num_results:]
    for one in written:
        one.fill_(7)
    returned = getattr(torch.ops.tide, name)(*arguments[:num_inputs])
    getattr(torch.ops.tide, f"{name}_out")(*arguments)
    for one, other in zip(written, returned if num_results > 1 else [returned], strict=True):
        torch.testing.assert_close(one[:3], other[:3])
        assert (one[3:] == 7).all()


def test_rows_that_no_index_names_are_left_alone() -> None:
    cases = library_cases("cpu")
    for name in ("gather_rows_out", "rms_norm_out"):
        *inputs, out = cases[name]
        out.fill_(7)
        getattr(torch.ops.tide, name)(*inputs, out)
        assert (out[2:] == 7).all()
        assert (out[:2] != 7).all()
