"""Segments in passes of fixed shapes and layers in few launches, against the plain engine; here on the CPU, where the
CUDA kernels' twin stands in for them and nothing is captured."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.factories import make_parts, random_prompts
from tests.kernels.twin import twin_kernels
from tests.tiny_models import tiny_model
from tide_core.engine import assemble
from tide_core.execution.graphs.base import obstacle
from tide_core.execution.graphs.cycle import CapturedCycles
from tide_core.execution.graphs.segments import CapturedSegments
from tide_core.kernels import select_kernels
from tide_core.kernels.reference import ops as reference
from tide_core.kv.cache import RowSpan
from tide_core.kv.kernel_view import view_kind, write_only_kind
from tide_core.models.fused_layers import fuse_layers
from tide_core.request import SamplingParams

FUSED = ("llama", "mistral", "qwen2", "qwen3")
OTHERS = ("gpt2", "gemma2", "phi3")
GREEDY = {"max_tokens": 16, "ignore_eos": True}
MODES: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "verified"},
    {"mode": "fast", "threshold": 0.3},
    {"mode": "verified", "temperature": 0.9, "seed": 5},
]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass had."""
    seen: list[int] = []
    run = CapturedSegments.run

    def counted(self: CapturedSegments, segment: int, parts: Any, entering: Any) -> Any:
        seen.append(sum(stop - first for _, (first, stop) in parts))
        return run(self, segment, parts, entering)

    monkeypatch.setattr(CapturedSegments, "run", counted)
    return seen


def on_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: twin_kernels())
    monkeypatch.setattr(CapturedCycles, "takes", staticmethod(lambda row: False))  # or they would take most rows


@pytest.mark.parametrize("family", [*FUSED, *OTHERS])
def test_full_depth_says_what_the_plain_engine_says(
    family: str, monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    prompts = [*random_prompts(2, 11), random_prompts(1, 70)[0]]
    params = SamplingParams(**GREEDY)
    with poisoned(make_parts(family, kernels="reference")) as engine:
        plain = engine.generate(prompts, params)
    assert not runs
    on_twins(monkeypatch)
    with poisoned(make_parts(family)) as engine:
        fixed = engine.generate(prompts, params)
    assert all_ids(fixed) == all_ids(plain)
    assert runs.count(3) > 8, "the three rows decode together"


@pytest.mark.parametrize("params", MODES, ids=str)
@pytest.mark.parametrize("artefact", [{"kind": "mlp"}, {"kind": "block", "taps": (2, 3)}], ids=str)
def test_every_mode_says_what_the_plain_engine_says(
    artefact: dict[str, Any], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    prompts, asked = random_prompts(3, 11), SamplingParams(**GREEDY, **params)
    with poisoned(exit_parts(artefact=artefact, kernels="reference")) as engine:
        plain = engine.generate(prompts, asked)
    on_twins(monkeypatch)
    with poisoned(exit_parts(artefact=artefact)) as engine:
        fixed = engine.generate(prompts, asked)
    assert all_ids(fixed) == all_ids(plain)
    assert [exit_layers(answer) for answer in fixed] == [exit_layers(answer) for answer in plain]
    assert runs


@pytest.mark.parametrize("family", FUSED)
def test_a_fused_layer_is_the_layer_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States, not only tokens: through the adapter, one step at a time."""
    prompts = random_prompts(1, 6)
    logits = []
    for twins in (False, True):
        if twins:
            on_twins(monkeypatch)
        parts = make_parts(family, kernels="reference")
        with poisoned(parts, kernels="reference") as engine:
            [answer] = engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True, logprobs=5))
        logits.append([token.logprob for token in answer.tokens])
    assert logits[0] == pytest.approx(logits[1], abs=1e-5)


@pytest.mark.parametrize("family", FUSED)
def test_tokens_that_skip_fused_layers_leave_there_what_the_library_would_cache(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = torch.randn(1, 5, tiny_model(family).config.hidden_size, generator=torch.Generator().manual_seed(4))
    projected: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        projected.append(len(weight))
        return reference.fused_linear(x, weight, *given, **more)

    pools = []
    for kernels in (select_kernels("reference", "cpu"), dataclasses.replace(twin_kernels(), fused_linear=counted)):
        monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: kernels)  # noqa: B023
        runner = make_parts(family).runner
        adapter, cache = runner.adapter, runner.cache
        kind = write_only_kind(view_kind(cache, kernels, gathers_kv=False))
        view = kind(cache, kernels, [RowSpan([2, 0, 1], cache.block_size - 1, 3), RowSpan([3], 0, 2)])
        written = [pool.zero_() for layer in cache.pools for pool in layer]
        projected.clear()
        adapter.project_kv(states, 1, adapter.num_layers, adapter.layer_inputs(view.positions, view))
        pools.append(written)
    for plain, fused in zip(*pools, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    assert all(pool.any() for pool in pools[1][2:])
    assert not any(pool.any() for pool in pools[1][:2]), "of the first layer nothing was asked"
    key, _ = cache.pools[0]
    assert projected == [2 * key.shape[1] * key.shape[3]] * (adapter.num_layers - 1), "K and V, and no queries"


@pytest.mark.parametrize("family", FUSED)
def test_all_layers_of_known_kinds_are_fused_and_no_weight_is_kept_twice(family: str) -> None:
    model = copy.deepcopy(tiny_model(family))
    layers = list(model.model.layers)
    before = sum(p.numel() for p in model.parameters())
    assert fuse_layers(layers, twin_kernels()) == len(layers)
    for layer in layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj):
            assert linear.weight.untyped_storage().data_ptr() == layer._qkv.untyped_storage().data_ptr()
        assert layer.mlp.up_proj.weight.untyped_storage().data_ptr() == layer._gate_up.untyped_storage().data_ptr()
    assert sum(p.numel() for p in model.parameters()) == before


def test_layers_that_were_fused_before_keep_their_weights_where_they_are() -> None:
    """Another engine's graphs may read them there: a swap of exits makes a second one on the same model."""
    model = copy.deepcopy(tiny_model("qwen2"))
    layers = list(model.model.layers)
    fuse_layers(layers, twin_kernels())
    kinds = [type(layer) for layer in layers]
    places = [(layer._qkv.data_ptr(), layer._qkv_bias.data_ptr(), layer._gate_up.data_ptr()) for layer in layers]
    assert fuse_layers(layers, twin_kernels()) == len(layers)
    assert [type(layer) for layer in layers] == kinds
    assert places == [
        (layer._qkv.data_ptr(), layer._qkv_bias.data_ptr(), layer._gate_up.data_ptr()) for layer in layers
    ]
    changed = layers[0].self_attn.k_proj
    changed.weight = torch.nn.Parameter(changed.weight.detach() + 1.0)
    fuse_layers(layers, twin_kernels())
    assert torch.equal(
        layers[0]._qkv, torch.cat([layers[0].self_attn.get_submodule(f"{x}_proj").weight for x in "qkv"])
    )


@pytest.mark.parametrize("family", OTHERS)
def test_other_layers_are_left_alone(family: str) -> None:
    model = copy.deepcopy(tiny_model(family))
    layers = list(model.transformer.h if family == "gpt2" else model.model.layers)
    kinds = [type(layer) for layer in layers]
    assert fuse_layers(layers, twin_kernels()) == 0
    assert [type(layer) for layer in layers] == kinds


def test_why_no_pass_is_captured_is_said() -> None:
    parts = make_parts(kernels="reference")
    assert "reference" in str(obstacle(parts.runner.adapter, parts.runner.cache, parts.kernels))
    assert obstacle(parts.runner.adapter, parts.runner.cache, twin_kernels()) is None
    latent = make_parts("deepseek_v2", kernels="reference").runner
    assert "contexts" in str(obstacle(latent.adapter, latent.cache, twin_kernels()))
    experts = make_parts("mixtral", kernels="reference").runner
    assert "experts" in str(obstacle(experts.adapter, experts.cache, twin_kernels()))


def test_a_step_of_many_tokens_is_left_to_the_plain_path(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    on_twins(monkeypatch)
    with poisoned(make_parts(max_rows=4, max_batch_tokens=32)) as engine:
        engine.generate([random_prompts(1, 64)[0]], SamplingParams(max_tokens=1, ignore_eos=True))
    assert not runs
