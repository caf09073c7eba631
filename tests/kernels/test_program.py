"""Programs against the ops one by one: the same bits where the same kernels run."""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.kernel_cases import PagedCase, assert_same_bits
from tide_core.exits.artefact.router import confidence_of

_native = pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
native = importlib.import_module("tide_core.kernels.cpu.ops")
program_module = importlib.import_module("tide_core.kernels.cpu.program")
Program = program_module.Program

TOKENS = [0, 1, 5, 33]
MANY = 70
"""More than a program keeps memory for."""


def tokens(num: int, **changed: Any) -> dict[str, Any]:
    """`num` tokens, each a row of its own, on the page of its number."""
    return {
        "positions": np.arange(num, dtype=np.int64),
        "slots": np.arange(num, dtype=np.int64),
        "block_tables": np.arange(num, dtype=np.int32).reshape(num, 1),
        "query_starts": np.arange(num + 1, dtype=np.int32),
        "context_lens": np.ones(num, dtype=np.int32),
        **changed,
    }


def origins(sources: Tensor, distances: Tensor) -> Any:
    return torch.stack((sources, distances)).numpy()


@pytest.mark.parametrize("num", [*TOKENS, MANY])
@pytest.mark.parametrize("width", [1, 7, 576])
def test_rms_norm_into_columns_beside_one_another(num: int, width: int) -> None:
    x, weight = torch.randn(num, width) * 3, torch.randn(width)
    program = Program()
    given = program.external(width)
    both = program.external(2 * width + 1)
    for start in (0, width + 1):
        program.rms_norm(given, weight, 1e-5, to=both.part(start, width))
    y = torch.full((num, 2 * width + 1), 9.0)
    program.run((x, y), **tokens(num))
    expected = native.rms_norm(x, weight, 1e-5)
    assert_same_bits(y, torch.cat((expected, torch.full((num, 1), 9.0), expected), -1))


@pytest.mark.parametrize("num", [*TOKENS, MANY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (7, 5), (33, 130), (576, 401)])
def test_linear(num: int, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    x, weight, bias = (
        torch.randn(num, in_features),
        torch.randn(out_features, in_features).to(dtype),
        torch.randn(out_features),
    )
    for added in (None, bias):
        program = Program()
        program.linear(program.external(in_features), weight, added, to=program.external(out_features))
        y = torch.empty(num, out_features)
        program.run((x, y), **tokens(num))
        assert_same_bits(y, native.linear(x, weight, added))


@pytest.mark.parametrize("num", TOKENS)
def test_sums_and_gates_of_columns(num: int) -> None:
    x = torch.randn(num, 30) * 4
    for name, expected in (
        ("add", x[:, 2:13] + x[:, 17:28]),
        ("silu_mul", native.silu_mul(x[:, 2:13].contiguous(), x[:, 17:28].contiguous())),
    ):
        program = Program()
        given, to = program.external(30), program.external(11)
        getattr(program, name)(given.part(2, 11), given.part(17, 11), to=to)
        y = torch.empty(num, 11)
        program.run((x, y), **tokens(num))
        assert_same_bits(y, expected)


@pytest.mark.parametrize("name", ["silu", "sigmoid"])
@pytest.mark.parametrize("num", TOKENS)
def test_silu_and_sigmoid_are_those_of_torch_but_for_rounding(name: str, num: int) -> None:
    x = torch.randn(num, 9) * 20
    if num:
        x[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    program = Program()
    given, to = program.external(9), program.external(9)
    getattr(program, name)(given, to=to)
    y = torch.empty(num, 9)
    program.run((x, y), **tokens(num))
    expected = torch.nn.functional.silu(x) if name == "silu" else x.sigmoid()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("num", TOKENS)
def test_deep_states_are_gathered_and_what_is_not_known_is_zero(num: int) -> None:
    table, distances = torch.randn(50, 13), torch.arange(num) % 4
    sources = torch.randint(0, 50, (num,))
    table[49] = math.nan
    sources[distances == 0] = 49
    sources[distances > 0] %= 49
    embedding = torch.randn(3, 13)
    program = Program()
    to = program.external(13)
    program.gather(table, to=to)
    program.add_distance(embedding, to=to)
    y = torch.empty(num, 13)
    program.run((y,), **tokens(num), origins=origins(sources, distances))
    expected = table[sources].masked_fill((distances == 0).unsqueeze(-1), 0.0) + embedding[distances.clamp(max=2)]
    assert_same_bits(y, expected)


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("dim", [2, 12, 64])
def test_rotary_in_place_by_position(num: int, dim: int) -> None:
    x, cos, sin = torch.randn(num, 3 * dim + 5), torch.randn(60, dim), torch.randn(60, dim)
    positions = torch.randint(0, 60, (num,))
    program = Program()
    program.rotary(program.external(3 * dim + 5).part(2, 3 * dim), cos, sin)
    y = x.clone()
    program.run((y,), **tokens(num, positions=positions.numpy()))
    heads = x[:, 2:-3].unflatten(-1, (3, dim))
    expected = native.rotary(heads, cos[positions], sin[positions]).flatten(1)
    assert_same_bits(y, torch.cat((x[:, :2], expected, x[:, -3:]), -1))


@pytest.mark.parametrize("num", TOKENS)
def test_keys_and_values_reach_their_slots_and_no_other(num: int) -> None:
    x = torch.randn(num, 2 * 12 + 2 * 8)
    slots = torch.randperm(4 * 16)[:num]
    if num > 1:
        slots[1] = -1
    pools = [torch.full((4, 2, 16, size), 9.0) for size in (12, 8)]
    expected = [pool.clone() for pool in pools]
    native.write_kv(x[:, :24].unflatten(-1, (2, 12)), x[:, 24:].unflatten(-1, (2, 8)), *expected, slots)
    program = Program()
    given = program.external(40)
    program.write_kv(given.part(0, 24), given.part(24, 16), *pools)
    program.run((x,), **tokens(num, slots=slots.numpy()))
    for pool, wanted in zip(pools, expected, strict=True):
        assert_same_bits(pool, wanted)


@pytest.mark.parametrize(("contexts", "queries"), [([], []), ([1], [1]), ([40, 3], [4, 1]), ([90, 17, 33], [20, 5, 8])])
def test_attention_over_pages(contexts: list[int], queries: list[int]) -> None:
    case = PagedCase(contexts, queries, key_dim=12, value_dim=20)
    num = sum(queries)
    program = Program()
    given = program.external(6 * 12 + 3)
    to = program.external(6 * 20)
    program.paged_attention(given.part(1, 6 * 12), case.k_pool, case.v_pool, case.scaling, to=to)
    x, y = torch.randn(num, 6 * 12 + 3), torch.empty(num, 6 * 20)
    case.q = x[:, 1:-2].unflatten(-1, (6, 12))
    program.run((x, y), **paged(case))
    assert_same_bits(y, native.paged_attention(*case.arguments()).flatten(1))


def paged(case: PagedCase) -> dict[str, Any]:
    num = sum(case.queries)
    index = {name: getattr(case, name).numpy() for name in ("block_tables", "query_starts", "context_lens")}
    return {"positions": np.zeros(num, dtype=np.int64), "slots": np.full(num, -1, dtype=np.int64), **index}


@pytest.mark.parametrize("each", [False, True])
def test_the_last_token_of_each_row_is_chosen_or_each(each: bool) -> None:
    x = torch.randn(9, 5)
    program = Program()
    program.select(program.external(5), to=program.external(5, chosen=True))
    y = torch.empty(9 if each else 3, 5)
    starts, lengths = np.array([0, 1, 5, 9], dtype=np.int32), np.full(3, 40, dtype=np.int32)
    index = tokens(9, query_starts=starts, context_lens=lengths, block_tables=np.zeros((3, 1), dtype=np.int32))
    program.run((x, y), **index, each=each)
    assert_same_bits(y, x if each else x[[0, 4, 8]])


def confident(logits: Tensor) -> tuple[Tensor, list[int]]:
    program = Program()
    given, to = program.external(logits.shape[1], chosen=True), program.external(3, chosen=True)
    program.confidence(given, to=to.part(1, 2))
    y = torch.zeros(len(logits), 3)
    _, best = program.run((logits, y), **tokens(len(logits)))
    return y[:, 1:], best


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("width", [2, 5, 384, 2048, 8195])
def test_confidence_is_that_of_torch_but_for_rounding(num: int, width: int) -> None:
    logits = torch.randn(num, width) * 10
    got, best = confident(logits)
    torch.testing.assert_close(got, confidence_of(logits), rtol=1e-5, atol=2e-5)
    assert best == logits.argmax(-1).tolist()


def test_confidence_of_equals_and_of_what_is_no_number() -> None:
    logits = torch.randn(7, 4100)
    logits[0, [17, 4000]] = 50.0
    logits[6, [21, 900]] = 50.0
    logits[1, 2050] = math.nan
    logits[2, 4099] = math.inf
    logits[3] = -math.inf
    logits[4, 1:] = -math.inf
    logits[5, :4000] = -math.inf
    got, best = confident(logits)
    torch.testing.assert_close(got, confidence_of(logits), rtol=1e-5, atol=2e-5, equal_nan=True)
    assert got[[0, 6], 1].tolist() == [0.0, 0.0]
    assert not got[1:4, 0].isfinite().any()
    assert [best[row] for row in (0, 1, 2, 6)] == [17, 2050, 4099, 21]


def network(width: int = 48, hidden: int = 65) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """A program of every kind of op on one token alone, and the same op by op."""
    norm, down = torch.randn(width), torch.randn(width, hidden)
    gates = torch.randn(2 * hidden, width).bfloat16()
    program = Program()
    given, to = program.external(width), program.external(width)
    both = program.linear(program.rms_norm(given, norm, 1e-5), gates)
    program.add(given, program.linear(program.silu_mul(both.part(0, hidden), both.part(hidden, hidden)), down), to=to)
    program.result(program.select(to).part(3, 1))

    def plain(x: Tensor) -> Tensor:
        gate, up = native.linear(native.rms_norm(x, norm, 1e-5), gates).chunk(2, -1)
        return x + native.linear(native.silu_mul(gate.contiguous(), up.contiguous()), down)

    return program, plain


def run_network(program: Any, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    results, best = program.run((x, y), **tokens(len(x)))
    assert np.array_equal(results, y[:, 3].numpy(), equal_nan=True)
    assert best == []
    return y


def test_runs_of_any_size_in_any_order_equal_the_ops_one_by_one() -> None:
    program, plain = network()
    for num in (33, 1, 0, 64, 5, 200, 2, 65, 33):
        x = torch.randn(num, 48)
        assert_same_bits(run_network(program, x), plain(x))


def test_a_token_is_bitwise_the_same_alone_and_in_any_batch_and_for_any_number_of_threads() -> None:
    program, _ = network(width=576, hidden=700)
    x = torch.randn(40, 576)
    _native.set_num_threads(1)
    alone = torch.cat([run_network(program, x[i : i + 1]) for i in range(40)])
    for threads in (1, 2, 3):
        _native.set_num_threads(threads)
        for num in (1, 2, 7, 8, 9, 33, 40):
            assert_same_bits(run_network(program, x[:num]), alone[:num])
            assert_same_bits(run_network(program, x[-num:]), alone[-num:])


def test_nan_stays_in_its_own_row() -> None:
    program, _ = network()
    x = torch.randn(6, 48)
    expected = run_network(program, x)
    x[2, 5] = math.nan
    got = run_network(program, x)
    assert got[2].isnan().all()
    assert_same_bits(got[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


def test_programs_run_in_several_threads_and_one_takes_turns() -> None:
    programs = [network() for _ in range(3)]
    inputs = [torch.randn(num % 7 + 1, 48) for num in range(24)]
    with ThreadPoolExecutor(6) as executor:
        for _ in range(10):
            jobs = [(program, plain, x) for program, plain in programs for x in inputs]
            for got, (_, plain, x) in zip(
                executor.map(lambda job: run_network(job[0], job[2]), jobs), jobs, strict=True
            ):
                assert_same_bits(got, plain(x))


def test_a_program_keeps_its_weights_alive_and_sees_them_change_in_place() -> None:
    program = Program()
    weight = torch.full((40_000, 8), 2.0)
    program.linear(program.external(8), weight, to=program.external(40_000))
    y = torch.empty(1, 40_000)
    program.run((torch.ones(1, 8), y), **tokens(1))
    assert (y == 16.0).all()
    weight.fill_(3.0)
    del weight
    gc.collect()
    torch.zeros(40_000, 8)  # would take the memory if it were free
    program.run((torch.ones(1, 8), y), **tokens(1))
    assert (y == 24.0).all()


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda p, x: p.linear(x, torch.zeros(3, 8).half()), TypeError, "weight: got torch.float16, expected torch.fl"),
        (lambda p, x: p.linear(x, torch.zeros(3, 7)), ValueError, r"weight: got shape \[3, 7\], expected \[3, 8\]"),
        (lambda p, x: p.linear(x, torch.zeros(8)), ValueError, r"weight: got shape \[8\], expected 2 dimensions"),
        (lambda p, x: p.linear(x, torch.zeros(8, 3).T), ValueError, r"weight: got strides \[1, 3\]"),
        (lambda p, x: p.linear(x, torch.zeros(3, 8, device="meta")), ValueError, "weight: got a tensor on meta"),
        (
            lambda p, x: p.linear(x, torch.zeros(3, 8), torch.zeros(4)),
            ValueError,
            r"bias: got shape \[4\], expected \[3",
        ),
        (lambda p, x: p.linear(x, torch.zeros(3, 8), torch.zeros(3).bfloat16()), TypeError, "bias: got torch.bfloat16"),
        (lambda p, x: p.linear(x.part(0, 4), torch.zeros(3, 4)), ValueError, "x, to: got some columns"),
        (lambda p, x: p.rms_norm(x, torch.zeros(7), 1e-5), ValueError, r"weight: got shape \[7\], expected \[8\]"),
        (lambda p, x: p.rms_norm(x, torch.zeros(8).bfloat16(), 1e-5), TypeError, "weight: got torch.bfloat16"),
        (lambda p, x: x.part(5, 4), ValueError, "columns: got 5 to 9, expected some of 8"),
        (lambda p, x: p.add(x, x.part(0, 4)), ValueError, "columns of one width"),
        (lambda p, x: p.add(x, p.select(x)), ValueError, "buffers of the same tokens"),
        (lambda p, x: p.select(p.select(x)), ValueError, "select takes tokens"),
        (lambda p, x: p.rotary(x, torch.zeros(4, 6), torch.zeros(4, 6)), ValueError, "heads of even size"),
        (lambda p, x: p.rotary(x, torch.zeros(4, 8), torch.zeros(4, 6)), ValueError, "sin: got shape"),
        (lambda p, x: p.gather(torch.zeros(4, 8).double()), TypeError, "table: got torch.float64"),
        (lambda p, x: p.add_distance(torch.zeros(4, 7), x), ValueError, r"table: got shape \[4, 7\]"),
        (lambda p, x: p.write_kv(x, x, *[torch.zeros(2, 2, 4, 3)] * 2), ValueError, "k and v must fit the pools"),
        (lambda p, x: p.write_kv(x, x, *[torch.zeros(2, 2, 4, 4).half()] * 2), TypeError, "k_pool: got torch.float16"),
        (lambda p, x: p.paged_attention(x, *[torch.zeros(2, 3, 4, 4)] * 2, 1.0), ValueError, "whole groups of heads"),
        (lambda p, x: p.confidence(x, x.part(0, 2)), ValueError, "confidence is of chosen tokens"),
        (lambda p, x: p.result(x.part(0, 1)), ValueError, "a result is one number of chosen"),
        (lambda p, x: p.buffer(0), ValueError, "must have a width"),
    ],
)
def test_a_step_that_cannot_be_right_is_refused(
    build: Callable[[Any, Any], object], error: type[Exception], message: str
) -> None:
    program = Program()
    with pytest.raises(error, match=message):
        build(program, program.external(8))


def everything() -> Any:
    """A program that reads all that a run can be told."""
    program = Program()
    x = program.external(8)
    program.gather(torch.zeros(5, 8), to=x)
    program.add_distance(torch.zeros(2, 8), to=x)
    program.rotary(x, torch.zeros(6, 4), torch.zeros(6, 4))
    pools = torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4)
    program.write_kv(x, x, *pools)
    program.select(program.paged_attention(x, *pools, 1.0))
    return program


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"positions": np.arange(3, dtype=np.int32)}, TypeError, "positions: got int32, expected int64"),
        ({"positions": np.arange(3).reshape(3, 1)}, ValueError, r"positions: got shape \[3, 1\], expected \[3\]"),
        ({"positions": np.array([0, 6, 0])}, IndexError, r"positions\[1\]: got 6, expected 0 to 5"),
        ({"positions": np.array([0, 0, -1])}, IndexError, r"positions\[2\]: got -1"),
        ({"slots": np.arange(2)}, ValueError, r"slots: got shape \[2\], expected \[3\]"),
        ({"slots": np.arange(6)[::2]}, ValueError, "slots: got an array with gaps"),
        ({"slots": np.array([0, 1, 3])}, IndexError, r"slots\[2\]: got 3"),
        ({"block_tables": np.zeros((2, 1), dtype=np.int32)}, ValueError, r"block_tables: got shape \[2, 1\]"),
        ({"block_tables": np.zeros(3, dtype=np.int32)}, ValueError, r"block_tables: got shape \[3\]"),
        ({"block_tables": np.full((3, 1), 3, dtype=np.int32)}, IndexError, r"block_tables\[0\]: got 3"),
        ({"query_starts": np.zeros(3, dtype=np.int32)}, ValueError, r"query_starts: got shape \[3\], expected \[4\]"),
        ({"query_starts": np.array([0, 0, 1, 3], dtype=np.int32)}, IndexError, r"query_starts\[1\]: got 0"),
        ({"query_starts": np.array([0, 1, 2, 4], dtype=np.int32)}, IndexError, r"query_starts\[3\]: got 4"),
        ({"context_lens": np.ones(3, dtype=np.int64)}, TypeError, "context_lens: got int64, expected int32"),
        ({"context_lens": np.full(3, 2, dtype=np.int32)}, IndexError, r"context_lens\[0\]: got 2"),
        ({"origins": np.zeros((2, 4), dtype=np.int64)}, ValueError, r"origins: got shape \[2, 4\], expected \[2, 3\]"),
        ({"origins": None}, ValueError, "sources and distances must be given"),
        ({"origins": np.array([[0, 5, 0], [1, 1, 1]])}, IndexError, r"sources\[1\]: got 5, expected 0 to 4"),
        ({"origins": np.array([[0, 0, 0], [1, -1, 1]])}, IndexError, r"distances\[1\]: got -1"),
    ],
)
def test_a_run_names_what_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    program = everything()
    index = {**tokens(3), "origins": np.array([[0, 4, 1], [0, 1, 9]])}
    program.run((torch.zeros(3, 8),), **index)
    with pytest.raises(error, match=message):
        program.run((torch.zeros(3, 8),), **{**index, **changed})
    program.run((torch.zeros(3, 8),), **index)


@pytest.mark.parametrize(
    ("external", "error", "message"),
    [
        (torch.zeros(3, 8).double(), TypeError, "external: got torch.float64"),
        (torch.zeros(2, 8), ValueError, r"external: got shape \[2, 8\], expected \[3, 8\]"),
        (torch.zeros(8, 3).T, ValueError, "external: got strides"),
    ],
)
def test_a_run_refuses_what_it_is_handed(external: Tensor, error: type[Exception], message: str) -> None:
    program = Program()
    program.external(8)
    with pytest.raises(error, match=message):
        program.run((external,), **tokens(3))
    with pytest.raises(ValueError, match="zip"):
        program.run((), **tokens(3))
