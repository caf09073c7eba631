"""The references of the exit ops say what the modules they stand for say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from tests.kernels.kernel_cases import DTYPES, assert_near, assert_same_bits
from tide_core.exits.artefact.heads import ExitHead, HeadRMSNorm, HeadSpec
from tide_core.exits.artefact.router import Router, confidence_of
from tide_core.kernels.cpu.best import best
from tide_core.kernels.reference import ops as reference
from tide_core.kernels.reference.ops import RouterWeights, Top2

INF, NAN = math.inf, math.nan


def router_and_weights(width: int, bottleneck: int) -> tuple[Router, RouterWeights]:
    router = Router(width, bottleneck)
    with torch.no_grad():
        router.norm.weight.normal_(1.0, 0.2)
        router.down.weight[:, -2:].normal_()  # so that the roundings of the confidence are seen
        router.out.weight.normal_(0.0, 0.5)
    weights = RouterWeights(
        router.norm.weight.detach(),
        router.down.weight.detach(),
        router.down.bias.detach(),
        router.out.weight.detach()[0],
        router.out.bias.detach(),
        router.norm.variance_epsilon,
    )
    return router, weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "bottleneck"), [(0, 8, 4), (1, 576, 128), (7, 33, 5)])
def test_scores_are_those_of_the_router(dtype: torch.dtype, rows: int, width: int, bottleneck: int) -> None:
    router, weights = router_and_weights(width, bottleneck)
    features = (torch.randn(rows, width) * 30).to(dtype)
    logits = (torch.randn(rows, 300) * 4).to(dtype)
    with torch.no_grad():
        expected = router.score(features, confidence_of(logits))
    scores = reference.router(features, reference.top2_logsumexp(logits), weights)
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 3, 385])
def test_peaks_are_the_confidence_and_the_best_token(dtype: torch.dtype, width: int) -> None:
    logits = (torch.randn(9, width) * 3).to(dtype)
    top2 = reference.top2_logsumexp(logits)
    maxima, indices = best(logits.float())
    assert (top2.best.tolist(), top2.best_at.tolist()) == (maxima, indices)
    confidence = torch.stack((-top2.sum.log(), top2.best - top2.second), -1)
    torch.testing.assert_close(confidence, confidence_of(logits))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 3.0, 3.0], (3.0, 1, 3.0, 2 + math.exp(-2))),
        ([-INF, -INF], (-INF, 0, -INF, NAN)),
        ([0.0, INF, 2.0], (INF, 1, 2.0, NAN)),
        ([INF, NAN, 1.0], (NAN, 1, INF, NAN)),
        ([4.0], (4.0, 0, -INF, 1.0)),
    ],
)
def test_equal_infinite_and_missing_numbers(row: list[float], expected: tuple[float, int, float, float]) -> None:
    top2 = reference.top2_logsumexp(torch.tensor([row]))
    assert [part.item() for part in top2] == pytest.approx(list(expected), nan_ok=True)


@pytest.mark.parametrize("width", [8, 576])
def test_the_norm_is_that_of_the_heads(width: int) -> None:
    norm = HeadRMSNorm(width, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(6, width) * 20
    torch.testing.assert_close(reference.rms_norm(x, norm.weight.detach(), 1e-5), norm(x).detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_rotary_write_is_what_the_library_does_between_projection_and_attention(
    dtype: torch.dtype, normed: bool
) -> None:
    tokens, query_heads, heads, dim, block_size = 5, 6, 2, 16, 8
    qkv = torch.randn(tokens, (query_heads + 2 * heads) * dim).to(dtype)
    angles = torch.rand(40, dim // 2) * 6
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))
    positions, slots = torch.tensor([3, 39, 0, 7, 7]), torch.tensor([8, -1, 0, 23, 9])
    q, k, v = qkv.view(tokens, -1, dim).split((query_heads, heads, heads), dim=1)
    norms: list[Tensor | None] = [None, None]
    if normed:
        for i in range(2):
            module = modeling_qwen3.Qwen3RMSNorm(dim, 1e-6).to(dtype)
            torch.nn.init.normal_(module.weight)
            norms[i] = module.weight.detach()
            q, k = (module(q).detach(), k) if i == 0 else (q, module(k).detach())
    turn = cos[positions][None], sin[positions][None]
    q, k = modeling_llama.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *turn)
    k_pool, v_pool = torch.zeros(3, heads, block_size, dim).to(dtype), torch.zeros(3, heads, block_size, dim).to(dtype)
    expected_k, expected_v = k_pool.clone(), v_pool.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_k[slot // block_size, :, slot % block_size] = k[0, :, token]
            expected_v[slot // block_size, :, slot % block_size] = v[token]
    out = reference.rotary_write(qkv, cos, sin, positions, slots, k_pool, v_pool, norms[0], norms[1], 1e-6)
    assert_same_bits(out, q[0].transpose(0, 1))
    assert_same_bits(k_pool, expected_k)
    assert_same_bits(v_pool, expected_v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_linear_is_the_gated_mlp_with_its_residual(dtype: torch.dtype) -> None:
    gate, up, down = (torch.nn.Linear(*size, bias=False).to(dtype) for size in ((24, 40), (24, 40), (40, 24)))
    x = torch.randn(3, 24).to(dtype)
    with torch.no_grad():
        expected = x + down(torch.nn.functional.silu(gate(x)) * up(x))
        joined = torch.cat((gate.weight, up.weight))
        inner = reference.fused_linear(x, joined, gated=True)
        assert_near(reference.fused_linear(inner, down.weight, residual=x), expected)


def test_rows_are_gathered_scattered_and_embedded_by_index() -> None:
    table = torch.randn(4, 3)
    assert_same_bits(reference.embed(torch.tensor([2, 0, 2]), table), table[[2, 0, 2]])
    assert reference.embed(torch.tensor([-1, 4]), table).isnan().all()
    gathered = reference.gather_rows(table, torch.tensor([1, -1, 4, 3]))
    assert gathered[0].equal(table[1])
    assert gathered[3].equal(table[3])
    assert gathered[1].tolist() == [0.0] * 3
    assert gathered[2].isnan().all()
    out = torch.zeros(4, 3)
    reference.scatter_rows(table, torch.tensor([3, -1, 0, 9]), out)
    assert_same_bits(out, torch.stack((table[2], torch.zeros(3), torch.zeros(3), table[0])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_normed_linear_is_a_norm_and_a_linear(dtype: torch.dtype) -> None:
    norm = HeadRMSNorm(24, 1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    linear = torch.nn.Linear(24, 40).to(dtype)
    x = (torch.randn(3, 24) * 9).to(dtype)
    with torch.no_grad():
        fused = reference.fused_linear(x, linear.weight, linear.bias, norm=(norm.weight, 1e-5))
        assert_near(fused, linear(norm(x)))


@pytest.mark.parametrize("inner", [0, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_input_of_an_exit_is_what_its_head_mixes(dtype: torch.dtype, inner: int) -> None:
    block = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "ffn": 8, "inner": inner}
    head = ExitHead(HeadSpec(kind="block", width=24, deep=True, max_distance=3, **block)).to(dtype)
    for weight in (head.state_norm.weight, head.deep_norm.weight, head.distance.weight):
        torch.nn.init.normal_(weight)
    torch.nn.init.normal_(head.mix.weight, std=0.1)  # it would see the state alone
    states, deep = ((torch.randn(rows, width) * 5).to(dtype) for rows, width in ((6, 24), (4, inner or 24)))
    slots, distances = torch.tensor([3, 0, 99, 1, -1, 2]), torch.tensor([1, 3, 0, 7, 0, 2])
    fed = deep[slots.clamp(0, 3)].masked_fill((distances == 0)[:, None], NAN)  # must not be looked at
    with torch.no_grad():
        norms = head.state_norm.weight, deep, slots, head.deep_norm.weight
        inputs = reference.exit_input(states, *norms, distances, head.distance.weight, head.spec.norm_eps)
        assert_near(head.mix(inputs), head.embed(states, fed, distances))


def test_a_peak_has_the_fields_that_scores_need() -> None:
    assert Top2._fields == ("best", "best_at", "second", "sum")
