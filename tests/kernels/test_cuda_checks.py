"""The wrappers of the CUDA ops, without a GPU: what they refuse and how they name it, and what they would launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cycle_arguments import BOTTLENECK, ROWS, WIDTH, router_weights
from tests.kernels.kernel_cases import PagedCase
from tide_core import kernels
from tide_core.kernels import select
from tide_core.kernels.cuda import attention as cuda_attention
from tide_core.kernels.cuda import branches as cuda_branches
from tide_core.kernels.cuda import checks as cuda_checks
from tide_core.kernels.cuda import exits as cuda_exits
from tide_core.kernels.cuda import joined as cuda_joined
from tide_core.kernels.cuda import launch as cuda_launch
from tide_core.kernels.cuda import ops as cuda
from tide_core.kernels.reference.ops import RouterWeights, Top2

Launches = list[tuple[str, tuple[Any, ...]]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """The wrappers take CPU tensors for a GPU's, and what they launch is written down instead."""
    seen: Launches = []
    sizes = SimpleNamespace(
        top2_logsumexp_partials=lambda rows, width: 16 * rows,
        paged_attention_workspace=lambda *counts: 64,
    )
    for module in (cuda, cuda_attention, cuda_branches, cuda_exits, cuda_joined):
        monkeypatch.setattr(module, "device_of", lambda tensor: tensor.device)
        monkeypatch.setattr(module, "launch", lambda device, op, *arguments, **_: seen.append((op, arguments)))
        monkeypatch.setattr(module, "module", lambda: sizes, raising=False)
    return seen


def linear_arguments(**changed: Any) -> dict[str, Any]:
    return {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), "bias": torch.zeros(4), **changed}


def rms_norm_arguments(**changed: Any) -> dict[str, Any]:
    return {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "eps": 1e-5, **changed}


def silu_mul_arguments(**changed: Any) -> dict[str, Any]:
    return {"gate": torch.zeros(2, 8), "up": torch.zeros(2, 8), **changed}


def rotary_arguments(**changed: Any) -> dict[str, Any]:
    return {"x": torch.zeros(3, 2, 8), "cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8), **changed}


def rotary_write_arguments(**changed: Any) -> dict[str, Any]:
    return {
        "qkv": torch.zeros(3, 8 * 8),
        "cos": torch.zeros(50, 8),
        "sin": torch.zeros(50, 8),
        "positions": torch.arange(3),
        "slots": torch.arange(3),
        "k_pool": torch.zeros(4, 2, 16, 8),
        "v_pool": torch.zeros(4, 2, 16, 8),
        **changed,
    }


def write_kv_arguments(**changed: Any) -> dict[str, Any]:
    pools = {"k_pool": torch.zeros(4, 2, 16, 8), "v_pool": torch.zeros(4, 2, 16, 6)}
    return {"k": torch.zeros(3, 2, 8), "v": torch.zeros(3, 2, 6), **pools, "slots": torch.arange(3), **changed}


def paged_attention_arguments(**changed: Any) -> dict[str, Any]:
    case = PagedCase(contexts=[20, 30], queries=[1, 2])
    names = ("q", "k_pool", "v_pool", "block_tables", "query_starts", "context_lens", "scaling")
    return {**dict(zip(names, case.arguments()[: len(names)], strict=True)), **changed}


def attend_joined_arguments(**changed: Any) -> dict[str, Any]:
    pool = torch.zeros(4, 2, 16, 64).half()
    return {
        "qkv": torch.zeros(3, 10 * 64).half(),
        "cos": torch.zeros(50, 64).half(),
        "sin": torch.zeros(50, 64).half(),
        "positions": torch.arange(3),
        "slots": torch.arange(3),
        "k_pool": pool,
        "v_pool": pool.clone(),
        "q_norm": None,
        "k_norm": None,
        "eps": 1e-6,
        "block_tables": torch.zeros(2, 2, dtype=INT32),
        "query_starts": torch.tensor([0, 1, 3], dtype=INT32),
        "context_lens": torch.tensor([1, 20], dtype=INT32),
        "scaling": 0.125,
        "max_queries": 2,
        "max_context": 20,
        **changed,
    }


def peak_arguments(**changed: Any) -> dict[str, Any]:
    return {"logits": torch.zeros(3, 50), **changed}


def top2_of(rows: int) -> Top2:
    return Top2(torch.zeros(rows), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows), torch.ones(rows))


def router_arguments(**changed: Any) -> dict[str, Any]:
    weights = RouterWeights(*router_weights("cpu"))
    return {"features": torch.zeros(ROWS, WIDTH), "top2": top2_of(ROWS), "weights": weights, **changed}


def embed_arguments(**changed: Any) -> dict[str, Any]:
    return {"weight": torch.zeros(4, 8), "ids": torch.zeros(3, dtype=torch.int64), **changed}


def scatter_rows_arguments(**changed: Any) -> dict[str, Any]:
    return {"x": torch.zeros(3, 8), "index": torch.arange(3), "out": torch.zeros(5, 8), **changed}


def exit_input_arguments(**changed: Any) -> dict[str, Any]:
    return {
        "states": torch.zeros(3, 8),
        "state_norm": torch.zeros(8),
        "deep_states": torch.zeros(5, 8),
        "deep_slots": torch.zeros(3, dtype=torch.int64),
        "deep_norm": torch.zeros(8),
        "distances": torch.zeros(3, dtype=torch.int64),
        "table": torch.zeros(4, 16),
        "eps": 1e-5,
        **changed,
    }


INT32, INT64 = torch.int32, torch.int64
ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "linear": linear_arguments,
    "rms_norm": rms_norm_arguments,
    "silu_mul": silu_mul_arguments,
    "rotary": rotary_arguments,
    "rotary_write": rotary_write_arguments,
    "write_kv": write_kv_arguments,
    "paged_attention": paged_attention_arguments,
    "attend_joined": attend_joined_arguments,
    "top2_logsumexp": peak_arguments,
    "router": router_arguments,
    "embed": embed_arguments,
    "scatter_rows": scatter_rows_arguments,
    "exit_input": exit_input_arguments,
}


@pytest.mark.parametrize("op", ARGUMENTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_that_is_on_no_gpu_is_refused_by_name(op: str, device: str) -> None:
    arguments = ARGUMENTS[op]()
    first = next(iter(arguments))
    arguments[first] = arguments[first].to(device)
    with pytest.raises(ValueError, match=f"^{first}: got a tensor on {device}, expected cuda$"):
        getattr(cuda, op)(**arguments)


@pytest.mark.parametrize(
    ("op", "changed", "error", "message"),
    [
        ("linear", {"x": torch.zeros(2, 8).double()}, TypeError, "x: got torch.float64, expected float32"),
        (
            "linear",
            {"weight": torch.zeros(4, 8).bfloat16()},
            TypeError,
            "weight: got torch.bfloat16, expected torch.fl",
        ),
        ("linear", {"x": torch.zeros(2, 7)}, ValueError, r"x: got shape \[2, 7\], expected \[..., 8\]"),
        ("linear", {"weight": torch.zeros(8, 4).T}, ValueError, "weight: got strides"),
        ("linear", {"bias": torch.zeros(5)}, ValueError, r"bias: got shape \[5\], expected \[N\] = \[4\]"),
        ("linear", {"residual": torch.zeros(2, 3)}, ValueError, r"residual: got shape \[2, 3\]"),
        ("linear", {"residual": torch.zeros(2, 4).half()}, TypeError, "residual: got torch.float16"),
        ("linear", {"weight": torch.zeros(3, 8), "bias": None, "gated": True}, ValueError, r"weight: .* as of up"),
        ("linear", {"out": torch.zeros(2, 5)}, ValueError, r"out: got shape \[2, 5\]"),
        ("linear", {"out": torch.zeros(2, 4, dtype=INT64)}, TypeError, "out: got torch.int64, expected torch.float32"),
        ("linear", {"out": torch.zeros(4, 2).T}, ValueError, "out: got stride 2 in the last dimension"),
        ("linear", {"out": torch.zeros(2, 4, device="meta")}, ValueError, "out: got a tensor on meta, expected cpu"),
        ("rms_norm", {"weight": torch.zeros(7)}, ValueError, r"x: got shape \[2, 8\], expected \[..., 7\]"),
        ("silu_mul", {"up": torch.zeros(2, 9)}, ValueError, r"up: got shape \[2, 9\], expected as gate = \[2, 8\]"),
        ("silu_mul", {"gate": torch.zeros(8, 2).T}, ValueError, "gate: got stride 2 in the last dimension"),
        ("silu_mul", {"gate": torch.zeros(()), "up": torch.zeros(())}, ValueError, r"gate: got shape \[\]"),
        (
            "rotary",
            {"x": torch.zeros(3, 2, 7), "cos": torch.zeros(3, 7), "sin": torch.zeros(3, 7)},
            ValueError,
            "x: .*even",
        ),
        ("rotary", {"sin": torch.zeros(2, 8)}, ValueError, r"sin: got shape \[2, 8\], expected \[T, D\] = \[3, 8\]"),
        ("rotary_write", {"qkv": torch.zeros(3, 60)}, ValueError, r"qkv: got shape \[3, 60\], expected \[T, \(Hq"),
        ("rotary_write", {"qkv": torch.zeros(3, 16)}, ValueError, r"qkv: got shape \[3, 16\]"),
        ("rotary_write", {"cos": torch.zeros(50, 4)}, ValueError, r"cos: got shape \[50, 4\], expected \[P, D\]"),
        ("rotary_write", {"sin": torch.zeros(49, 8)}, ValueError, r"sin: got shape \[49, 8\]"),
        ("rotary_write", {"positions": torch.zeros(3, dtype=INT32)}, TypeError, "positions: got torch.int32"),
        ("rotary_write", {"slots": torch.arange(4)}, ValueError, r"slots: got shape \[4\], expected \[T\] = \[3\]"),
        ("rotary_write", {"q_norm": torch.zeros(9)}, ValueError, r"q_norm: got shape \[9\], expected \[D\] = \[8\]"),
        ("rotary_write", {"k_norm": torch.zeros(8).half()}, TypeError, "k_norm: got torch.float16"),
        ("rotary_write", {"v_pool": torch.zeros(4, 2, 16, 6)}, ValueError, "v_pool: got shape .* expected as k_pool"),
        ("rotary_write", {"out": torch.zeros(3, 4, 9)}, ValueError, r"out: got shape \[3, 4, 9\]"),
        ("write_kv", {"slots": torch.zeros(3, dtype=INT32)}, TypeError, "slots: got torch.int32"),
        ("write_kv", {"v": torch.zeros(3, 2, 9)}, ValueError, r"v: got shape \[3, 2, 9\]"),
        ("paged_attention", {"q": torch.zeros(3, 6, 32)}, ValueError, r"q: got shape \[3, 6, 32\]"),
        ("paged_attention", {"context_lens": torch.zeros(2).long()}, TypeError, "context_lens: got torch.int64"),
        ("paged_attention", {"workspace": torch.zeros(8, dtype=torch.uint8)}, ValueError, "workspace: got 8 elements"),
        ("paged_attention", {"out": torch.zeros(3, 12, 64)[:, ::2]}, ValueError, "out: got strides"),
        ("attend_joined", {"qkv": torch.zeros(3, 60).half()}, ValueError, r"qkv: got shape \[3, 60\]"),
        ("attend_joined", {"slots": torch.arange(4)}, ValueError, r"slots: got shape \[4\], expected \[T\] = \[3\]"),
        ("attend_joined", {"positions": None}, ValueError, r"cos: got shape .* without positions"),
        ("attend_joined", {"context_lens": torch.zeros(2).long()}, TypeError, "context_lens: got torch.int64"),
        ("attend_joined", {"query_starts": torch.zeros(2, dtype=INT32)}, ValueError, r"query_starts: got shape \[2\]"),
        ("attend_joined", {"max_queries": 9}, ValueError, "max_queries: got 9, expected 1 to 8"),
        ("attend_joined", {"workspace": torch.zeros(8, dtype=torch.uint8)}, ValueError, "workspace: got 8 elements"),
        ("attend_joined", {"out": torch.zeros(3, 12, 64).half()[:, ::2]}, ValueError, "out: got strides"),
        ("top2_logsumexp", {"logits": torch.zeros(3)}, ValueError, r"logits: got shape \[3\], expected 2 dimensions"),
        (
            "top2_logsumexp",
            {"logits": torch.zeros(3, 0)},
            ValueError,
            r"logits: got shape \[3, 0\], expected rows of 1 to",
        ),
        ("top2_logsumexp", {"out": top2_of(2)}, ValueError, r"out.best: got shape \[2\]"),
        ("router", {"features": torch.zeros(ROWS, 9)}, ValueError, r"weights.norm: got shape \[48\], expected \[D\]"),
        ("router", {"top2": top2_of(2)}, ValueError, r"top2.best: got shape \[2\]"),
        ("router", {"out": torch.zeros(ROWS).double()}, TypeError, "out: got torch.float64, expected torch.float32"),
        ("embed", {"weight": torch.zeros(8)}, ValueError, r"weight: got shape \[8\]"),
        ("embed", {"ids": torch.zeros(3)}, TypeError, "ids: got torch.float32, expected torch.int64"),
        ("embed", {"ids": torch.zeros(3, 1, dtype=INT64)}, ValueError, r"ids: got shape \[3, 1\]"),
        ("scatter_rows", {"index": torch.arange(4)}, ValueError, r"index: got shape \[4\], expected \[R\] = \[3\]"),
        ("scatter_rows", {"out": torch.zeros(5, 9)}, ValueError, r"out: got shape \[5, 9\]"),
        ("scatter_rows", {"out": torch.zeros(5, 8).half()}, TypeError, "out: got torch.float16"),
        ("linear", {"norm": (torch.zeros(7), 1e-5)}, ValueError, r"norm: got shape \[7\], expected \[K\] = \[8\]"),
        ("linear", {"norm": (torch.zeros(8).half(), 1e-5)}, TypeError, "norm: got torch.float16, expected torch.fl"),
        ("exit_input", {"states": torch.zeros(8)}, ValueError, r"states: got shape \[8\], expected 2 dimensions"),
        ("exit_input", {"state_norm": torch.zeros(9)}, ValueError, r"state_norm: got shape \[9\]"),
        ("exit_input", {"deep_norm": torch.zeros(8).half()}, TypeError, "deep_norm: got torch.float16"),
        (
            "exit_input",
            {"deep_states": torch.zeros(5, 4)},
            ValueError,
            r"deep_norm: got shape \[8\], expected \[d\] = ",
        ),
        (
            "exit_input",
            {"deep_states": torch.zeros(5, 4), "deep_norm": torch.zeros(4)},
            ValueError,
            r"table: got shape \[4, 16\], expected \[M \+ 1, D \+ d\] = \[4, 12\]",
        ),
        ("exit_input", {"deep_states": torch.zeros(5, 8).half()}, TypeError, "deep_states: got torch.float16"),
        ("exit_input", {"deep_slots": torch.zeros(3, dtype=INT32)}, TypeError, "deep_slots: got torch.int32"),
        ("exit_input", {"distances": torch.arange(4)}, ValueError, r"distances: got shape \[4\], expected \[T\]"),
        ("exit_input", {"table": torch.zeros(0, 16)}, ValueError, r"table: .* a row for every distance"),
        (
            "exit_input",
            {"table": torch.zeros(4, 8)},
            ValueError,
            r"table: got shape \[4, 8\], expected \[M \+ 1",
        ),
        ("exit_input", {"out": torch.zeros(3, 8)}, ValueError, r"out: got shape \[3, 8\]"),
    ],
)
def test_a_wrapper_names_the_argument_it_refuses(
    launches: Launches, op: str, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        getattr(cuda, op)(**ARGUMENTS[op](**changed))
    assert launches == []
    getattr(cuda, op)(**ARGUMENTS[op]())
    assert [name for name, _ in launches] == ["rotary_write" if op in ("rotary", "write_kv") else op]


def test_the_best_of_no_numbers_is_refused(launches: Launches) -> None:
    with pytest.raises(ValueError, match=r"^logits: got shape \[2, 0\], expected \[R, V\] with a column at least$"):
        cuda_branches.nth_best(torch.zeros(2, 0), torch.zeros(2, dtype=INT32))
    assert launches == []
    assert cuda_branches.nth_best(torch.zeros(0, 0), torch.zeros(0, dtype=INT32)).shape == (0,)


@pytest.mark.parametrize("field", ["norm", "down", "down_bias", "out", "out_bias"])
def test_a_router_weight_that_is_not_float32_is_refused_by_name(launches: Launches, field: str) -> None:
    weights = RouterWeights(*router_weights("cpu"))
    halved = weights._replace(**{field: getattr(weights, field).half()})
    with pytest.raises(TypeError, match=rf"^weights.{field}: got torch.float16, expected torch.float32"):
        cuda.router(**router_arguments(weights=halved))


@pytest.mark.parametrize("head_dim", [4, 12, 264])
def test_heads_that_attention_does_not_know_are_refused(launches: Launches, head_dim: int) -> None:
    case = PagedCase(contexts=[3], queries=[1], key_dim=head_dim, value_dim=head_dim)
    with pytest.raises(ValueError, match=f"q: got heads of {head_dim} elements, expected a multiple of 8 up to 256"):
        cuda.paged_attention(*case.arguments())


def test_blocks_that_attention_does_not_know_are_refused(launches: Launches) -> None:
    with pytest.raises(ValueError, match="k_pool: got blocks of 12 positions, expected a multiple of 8"):
        cuda.paged_attention(*PagedCase(contexts=[3], queries=[1], block_size=12).arguments())


@pytest.mark.parametrize(
    ("pool", "error", "message"),
    [
        (torch.zeros(4, 2, 16, 64), TypeError, "k_pool: got torch.float32, expected torch.float16 or torch.bfloat16"),
        (torch.zeros(4, 2, 16, 96).half(), ValueError, "k_pool: got heads of 96 elements, expected 64 or 128"),
        (torch.zeros(4, 2, 24, 64).half(), ValueError, "k_pool: got blocks of 24 positions, expected a multiple of 16"),
    ],
)
def test_what_the_joined_op_does_not_know_is_refused_and_not_taken(
    launches: Launches, pool: Tensor, error: type[Exception], message: str
) -> None:
    width = pool.shape[3]
    tables = {name: torch.zeros(50, width, dtype=pool.dtype) for name in ("cos", "sin")}
    pools = {"k_pool": pool, "v_pool": pool.clone()}
    with pytest.raises(error, match=f"^{message}"):
        cuda.attend_joined(
            **attend_joined_arguments(qkv=torch.zeros(3, 10 * width, dtype=pool.dtype), **tables, **pools)
        )
    assert not cuda.supports_joined(pool, pool)
    assert launches == []


def test_a_workspace_is_handed_out_again_while_it_is_large_enough(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SimpleNamespace(paged_attention_workspace=lambda tokens, heads, dim, context: tokens * context)
    monkeypatch.setattr(cuda_attention, "module", lambda: sizes)
    cpu = torch.device("cpu")
    held = cuda.attention_workspace(8, 4, 64, 100, cpu)
    assert cuda.attention_workspace(2, 4, 64, 100, cpu, held=held) is held
    grown = cuda.attention_workspace(8, 4, 64, 200, cpu, held=held)
    assert (held.numel(), grown.numel(), int(grown.sum())) == (800, 1600, 0)


def test_scratch_that_is_too_small_is_refused(launches: Launches) -> None:
    small = cuda.Scratch(torch.zeros(100, dtype=torch.uint8), torch.zeros(2, dtype=INT32))
    with pytest.raises(ValueError, match=r"scratch.counters: got 2 elements, expected at least 3"):
        cuda.top2_logsumexp(torch.zeros(3, 9), scratch=small)
    with pytest.raises(
        ValueError, match=rf"scratch.partials: got 100 elements, expected at least {4 * 5 * BOTTLENECK}"
    ):
        cuda.router(**router_arguments(scratch=small))


EMPTY = {
    "linear": {"x": torch.zeros(0, 8)},
    "rms_norm": {"x": torch.zeros(0, 8)},
    "silu_mul": {"gate": torch.zeros(0, 8), "up": torch.zeros(0, 8)},
    "rotary": {"x": torch.zeros(0, 2, 8), "cos": torch.zeros(0, 8), "sin": torch.zeros(0, 8)},
    "top2_logsumexp": {"logits": torch.zeros(0, 8)},
    "router": {"features": torch.zeros(0, WIDTH), "top2": top2_of(0)},
    "embed": {"ids": torch.zeros(0, dtype=INT64)},
    "scatter_rows": {"x": torch.zeros(0, 8), "index": torch.zeros(0, dtype=INT64)},
    "exit_input": {
        "states": torch.zeros(0, 8),
        "deep_slots": torch.zeros(0, dtype=INT64),
        "distances": torch.zeros(0, dtype=INT64),
    },
}


@pytest.mark.parametrize("op", EMPTY)
def test_nothing_is_launched_for_no_rows(launches: Launches, op: str) -> None:
    getattr(cuda, op)(**ARGUMENTS[op](**EMPTY[op]))
    assert launches == []


def test_a_norm_is_part_of_the_linear_but_for_float16_where_it_could_overflow(launches: Launches) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weight, norm = (torch.zeros(size, dtype=dtype) for size in ((2, 8), (4, 8), (8,)))
        cuda.fused_linear_of_any(x, weight, norm=(norm, 1e-5))
    assert [name for name, _ in launches] == ["linear", "linear", "rms_norm", "linear"]
    assert [arguments[4] != 0 for name, arguments in launches if name == "linear"] == [True, True, False]


def test_many_rows_are_normed_before_the_linear_of_torch(launches: Launches) -> None:
    x, weight = torch.zeros(257, 8), torch.zeros(4, 8)
    cuda.fused_linear_of_any(x, weight, norm=(torch.zeros(8), 1e-5))
    assert [name for name, _ in launches] == ["rms_norm"]


@pytest.mark.parametrize(
    ("dtype", "width", "fast", "ours"),
    [
        (torch.bfloat16, 4096, True, True),
        (torch.float16, 4096, True, True),
        (torch.bfloat16, 4096, False, False),
        (torch.float32, 4096, True, False),
        (torch.bfloat16, 4100, True, False),
        (torch.bfloat16, cuda.WIDEST_NORMED, True, False),
    ],
)
def test_many_wide_rows_stay_with_our_linear_where_it_has_a_kernel_for_them(
    dtype: torch.dtype, width: int, fast: bool, ours: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "fast_for_many_rows", lambda device: fast)
    x, weight = torch.zeros(257, width, dtype=dtype), torch.zeros(4, width, dtype=dtype)
    cuda.linear_of_any(x, weight)
    cuda.fused_linear_of_any(x, weight, residual=torch.zeros(257, 4, dtype=dtype))
    assert [name for name, _ in launches] == (["linear", "linear"] if ours else [])


@pytest.mark.parametrize("rows", [1, 64, 256])
def test_wide_rows_are_normed_apart_however_many_they_are(rows: int, launches: Launches) -> None:
    for width in (cuda.WIDEST_NORMED, 2 * cuda.WIDEST_NORMED):
        x, weight = torch.zeros(rows, width), torch.zeros(4, width)
        cuda.fused_linear_of_any(x, weight, norm=(torch.zeros(width), 1e-5))
    assert [name for name, _ in launches] == ["linear", "rms_norm", "linear"]


def test_what_is_given_is_written_and_returned(launches: Launches) -> None:
    out = torch.zeros(2, 9)[:, :8]
    assert cuda.rms_norm(**rms_norm_arguments(out=out)) is out
    assert cuda.silu_mul(**silu_mul_arguments(out=out)) is out
    assert cuda.linear(torch.zeros(2, 3), torch.zeros(8, 3), out=out) is out
    top2, scores = top2_of(3), torch.zeros(ROWS)
    assert cuda.top2_logsumexp(torch.zeros(3, 5), out=top2) is top2
    assert cuda.router(**router_arguments(out=scores)) is scores
    _, (_, _, _, address, *_) = launches[0]
    assert address == out.data_ptr()


def test_rows_may_have_a_stride_and_a_single_row_has_none(launches: Launches) -> None:
    wide = torch.zeros(4, 20)
    cuda.rms_norm(wide[:, :8], torch.zeros(8), 1e-5)
    cuda.rms_norm(wide[1:2, :8], torch.zeros(8), 1e-5)
    cuda.rms_norm(torch.zeros(2, 3, 8), torch.zeros(8), 1e-5)
    assert [arguments[4:8] for _, arguments in launches] == [(4, 8, 20, 8), (1, 8, 8, 8), (6, 8, 8, 8)]


def test_queries_may_be_rotated_where_they_lie(launches: Launches) -> None:
    arguments = rotary_write_arguments()
    qkv: Tensor = arguments["qkv"]
    queries = qkv.view(3, 8, 8)[:, :4]
    assert cuda.rotary_write(**arguments, out=queries) is queries
    _, (_, q, k, v, *rest) = launches[0]
    assert q == (qkv.data_ptr(), 4, 64, 8)
    assert k == (qkv.data_ptr() + 4 * 32, 2, 64, 8)
    assert v == (qkv.data_ptr() + 4 * 48, 2, 64, 8)
    assert rest[6] == qkv.data_ptr()
    assert rest[-8:-6] == [64, 8]


def test_positions_past_the_block_tables_are_not_asked_for(launches: Launches) -> None:
    cuda.paged_attention(**paged_attention_arguments(), max_context=10_000, max_queries=2)
    cuda.paged_attention(**paged_attention_arguments(), max_context=7)
    assert [arguments[9:13] for _, arguments in launches] == [(2, 3, 2, 48), (2, 3, 3, 7)]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A GPU of compute capability 9.0 that runs code compiled for the given architecture; 0: there is none."""

    def loaded(architecture: int) -> int:
        if architecture == 0:
            raise RuntimeError("loaded_architecture: the CUDA module has no code for this device")
        return architecture

    def make(architecture: int) -> None:
        module = SimpleNamespace(architectures=lambda: "80,86", loaded_architecture=lambda: loaded(architecture))
        monkeypatch.setitem(sys.modules, "tide_core.kernels._cuda", module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    for cached in (select._import_error, select._log_once):
        cached.cache_clear()
    yield make
    for cached in (select._import_error, select._log_once):
        cached.cache_clear()


def test_a_module_without_code_for_the_gpu_cannot_run(a_gpu: Callable[[int], None]) -> None:
    a_gpu(0)
    reason = str(kernels.cuda_unsupported_reason())
    assert "the CUDA module was built for 80,86, not for compute capability 9.0" in reason


@pytest.mark.parametrize(("architecture", "warns"), [(90, False), (86, True), (80, True)])
def test_a_module_for_an_older_generation_runs_and_says_what_would_be_faster(
    a_gpu: Callable[[int], None], caplog: pytest.LogCaptureFixture, architecture: int, warns: bool
) -> None:
    a_gpu(architecture)
    assert kernels.cuda_unsupported_reason() is None
    with caplog.at_level("WARNING", logger="tide"):
        kernels.select_kernels("auto", "cuda")
    assert ("a build with TIDE_CUDA_ARCHS=90 is faster" in caplog.text) == warns


def test_counters_are_cleared_when_a_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("top2: out of memory")

    monkeypatch.setattr(cuda_launch, "module", lambda: SimpleNamespace(top2_logsumexp=fail))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    counters = torch.ones(3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda_launch.launch(torch.device("cuda", 0), "top2_logsumexp", counters=counters)
    assert counters.tolist() == [0, 0, 0]


def test_a_pool_of_more_rows_than_32_bits_count_is_refused() -> None:
    assert cuda_checks.pool_size_fault((2**20, 8, 256, 64)) is not None
    assert cuda_checks.pool_size_fault((2**20, 8, 128, 64)) is None


def test_a_module_that_was_never_built_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tide_core.kernels._cuda", None)
    select._import_error.cache_clear()
    assert "the CUDA module cannot be imported" in str(kernels.cuda_unsupported_reason())
    select._import_error.cache_clear()
    assert kernels.cuda_unsupported_reason("cpu") == "the CUDA kernels run on a GPU, not on cpu"
