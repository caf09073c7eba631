"""What settings come to on a device that is not here: the same as the engine would choose there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig

from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tests.factories import make_config
from tests.models.gguf_factory import make_family_gguf, make_gguf
from tests.models.test_gguf_architectures import GEMMA, gemma
from tests.tiny_models import CONFIGS, tiny_model
from tide_core.config import GIB, EngineConfig
from tide_core.engine.assemble import assemble
from tide_core.engine.plan import GPUS, Outline, device_named, outline, plan, plan_for_folder
from tide_core.errors import ConfigError, ModelError
from tide_core.exits.artefact.artefact import load_artefact
from tide_core.kv import memory
from tide_core.models.adapter import ATTENTION, ModelAdapter
from tide_core.models.layout_probe import probe_layouts
from tide_core.models.loader import load_model, widening_reason
from tide_core.models.resolver import ResolvedModel, resolve
from tide_core.models.weights import weight_bytes

NEEDS_DATA = {"falcon_alibi"}


@pytest.fixture(scope="module")
def large() -> Outline:
    """2.4 billion weights; a token takes 80 KiB in 16 bit."""
    sizes: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 6912}
    config = LlamaConfig(**sizes, num_hidden_layers=32, num_attention_heads=20, num_key_value_heads=5)
    config.max_position_embeddings = 32768
    return outline(config)


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - NEEDS_DATA))
def test_weights_and_layouts_of_every_family_are_those_of_its_model(family: str) -> None:
    model = tiny_model(family)
    found, adapter = outline(model.config), ModelAdapter(copy.deepcopy(model))
    assert weight_bytes(found.weights, torch.bfloat16) == 2 * sum(weight.numel() for weight in model.parameters())
    shapes = [(layout.num_heads, layout.key_size, layout.value_size) for layout in found.slots.layouts]
    assert shapes == probe_layouts(adapter)
    assert (found.max_positions, found.vocab) == (adapter.max_positions, adapter.vocab_size)
    assert model.config._attn_implementation != ATTENTION, "the configuration stays as it was"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "bfloat16") for family in sorted(set(CONFIGS) - NEEDS_DATA)), ("llama", "float32")],
)
def test_counted_bytes_of_weights_are_those_that_the_loader_keeps(family: str, dtype: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    loaded = load_model(ResolvedModel(tmp_path, family, "folder"), dtype=dtype, device="cpu")
    memory = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in loaded.parameters()}
    planned = plan_for_folder(make_config(dtype=dtype, max_model_len=16), tmp_path, device_named("cpu"))
    assert planned.size.weight_bytes == weight_bytes(loaded) == sum(memory.values())


@pytest.mark.parametrize(("quantization", "device"), [("auto", "cpu"), ("none", "cpu"), ("auto", "l4")])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_matrices_that_stay_quantised_count_as_the_loader_keeps_them(
    architecture: str, tied: bool, quantization: str, device: str, tmp_path: Path
) -> None:
    pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
    file, kind = tmp_path / "tiny.gguf", GGMLQuantizationType.Q4_1
    if architecture == "llama":
        make_gguf(file, kind=kind, tie_word_embeddings=tied)
    else:
        make_family_gguf(file, architecture, kind=kind, metadata=GEMMA, **gemma(tie_word_embeddings=tied))
    config = make_config(quantization=quantization, dtype="auto", max_model_len=16)
    place = device_named(device)
    resolved = resolve(str(file), cache_dir=tmp_path, quantised=widening_reason(config, place.type) is None)
    planned = plan_for_folder(config, resolved.path, place, gguf=resolved.gguf)
    loaded = load_model(resolved, dtype=planned.config.dtype, device="cpu")
    in_modules = [module.panels.data for module in loaded.modules() if hasattr(module, "panels")]
    panels = {data.data_ptr(): data for data in in_modules}
    kept = sum(weight.nbytes for weight in (*loaded.parameters(), *panels.values()))
    assert bool(panels) == (quantization == "auto" and device == "cpu")
    assert planned.size.weight_bytes == weight_bytes(loaded) == kept


@pytest.mark.parametrize("family", sorted(NEEDS_DATA))
def test_a_family_whose_layers_need_data_is_refused_by_its_type(family: str) -> None:
    with pytest.raises(ModelError, match=r"model of type falcon: .*whose layers can be run without their weights"):
        outline(tiny_model(family).config)


@pytest.mark.parametrize("exits", [True, False])
@pytest.mark.parametrize("pool", ["auto", 0.01])
def test_a_plan_is_what_the_engine_chooses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pool: float | str,
    exits: bool,
) -> None:
    caplog.set_level("INFO", "tide")
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    model = save_model(tmp_path / "model")
    artefact = str(save_artefact_for_it(tmp_path / "artefact", kind="block")) if exits else "none"
    config = make_config(
        model=str(model),
        artefact=artefact,
        drafts=2,
        kv_memory_gib=pool,
        dtype="auto",
        max_rows="auto",
        max_batch_tokens="auto",
    )
    heads = [checkpoint.head for checkpoint in load_artefact(artefact, None).manifest.checkpoints] if exits else []
    found, parts = plan_for_folder(config, model, device_named("cpu"), heads), assemble(config)
    assert found.config == parts.config
    assert f"settings: {found}" in caplog.text
    assert found.size.block_bytes * parts.core.scheduler.blocks.num_blocks <= found.config.kv_memory_gib * GIB


def test_weights_leave_less_for_the_pool_in_a_wider_type(large: Outline) -> None:
    device, config = device_named("cuda:24GiB"), EngineConfig(kv_memory_gib="auto", max_model_len=4096)
    narrow, wide = (plan(config, large, device, dtype) for dtype in ("bfloat16", "float32"))
    num_weights = sum(weight.numel() for weight in large.weights.parameters())
    assert (narrow.size.weight_bytes, wide.size.weight_bytes) == (2 * num_weights, 4 * num_weights)
    assert narrow.config.kv_memory_gib - wide.config.kv_memory_gib > num_weights / GIB


def test_spare_blocks_are_kept_on_a_gpu_with_exits_alone(tmp_path: Path, large: Outline) -> None:
    folder = save_artefact_for_it(tmp_path / "artefact", kind="block")
    heads = [checkpoint.head for checkpoint in load_artefact(folder, None).manifest.checkpoints]
    with_exits = outline(tiny_model("llama").config, heads)
    spare = {
        (device, which.has_exits): plan(EngineConfig(), which, device_named(device), "float32").size.spare_blocks
        for device in ("cpu", "l4")
        for which in (large, with_exits)
    }
    assert [key for key, blocks in spare.items() if blocks] == [("l4", True)]


def test_a_model_that_is_larger_than_the_device_is_refused(large: Outline) -> None:
    with pytest.raises(
        ConfigError, match=r"device: got '4\.00 GiB', expected more memory than the weights take, 4\.45"
    ):
        plan(EngineConfig(), large, device_named("cuda:4GiB"), "bfloat16")


def test_a_given_pool_that_does_not_fit_is_refused(large: Outline) -> None:
    config = EngineConfig(kv_memory_gib=30)
    with pytest.raises(ConfigError, match=r"kv_memory_gib: got 30, expected at most 1\d\.\d\d GiB there, or auto"):
        plan(config, large, device_named("l4"), "bfloat16")
    plan(config, large, device_named("l40s"), "bfloat16")
    plan(config, large, device_named("cpu"), "float32")


def test_devices_have_names_or_sizes() -> None:
    assert device_named("H200").total == GPUS["h200"] * GIB
    assert (device_named("cuda:79.5GiB").type, device_named("cuda:79.5GiB").total) == ("cuda", int(79.5 * GIB))
    assert device_named("cpu").total == 0
    assert device_named("cpu:16GiB").total == 16 * GIB


@pytest.mark.parametrize(
    "text", ["", "h2000", "cuda", "cuda:80", "cuda:0GiB", "cuda:-1GiB", "cuda:9999GiB", "tpu:8GiB"]
)
def test_another_device_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"device: got .*, expected cpu, t4, .*h200, or a size as in cuda:80GiB"):
        device_named(text)
