"""FP8 weights: what a checkpoint holds, which of its matrices stay in 8 bits, and that their numbers are the same."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.exits.artefact.artefact_factory import make_artefact, make_head, make_spec
from tests.factories import make_config, random_prompts, tiny_tokenizer
from tests.models.fp8_factory import FORMATS, Weights, compressed, make_fp8
from tests.tiny_models import CONFIGS, tiny_model
from tide_core.calibration.train.candidates import copy_block_weights
from tide_core.engine.engine import Engine
from tide_core.engine.plan import device_named, plan_for_folder
from tide_core.errors import ArtefactError, ConfigError, ModelError
from tide_core.exits.artefact.match import check_identity
from tide_core.kernels.fp8 import Fp8Weight, quantised_by_row
from tide_core.models.adapter import ModelAdapter
from tide_core.models.checkpoint import chosen_dtype
from tide_core.models.fp8.layers import layer_linears, quantise_layers
from tide_core.models.fp8.scheme import fp8_scheme
from tide_core.models.identity import identify
from tide_core.models.loader import load_model, load_tokenizer
from tide_core.models.quantised import Fp8Linear
from tide_core.models.resolver import resolve
from tide_core.models.weights import num_weights, weight_bytes
from tide_core.request import SamplingParams

DOWN = "model.layers.1.mlp.down_proj"
IDS = torch.tensor([[2, 9, 41, 300, 7, 7, 120, 33]])


def load(path: Path, quantization: str = "none", dtype: str = "float32") -> Any:
    return load_model(resolve(str(path)), dtype=dtype, device="cpu", quantization=quantization)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def fp8_linears(model: Any) -> dict[str, Fp8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


@pytest.mark.parametrize("quantization", ["none", "auto", "fp8"])
@pytest.mark.parametrize("form", FORMATS)
def test_logits_are_those_of_the_same_weights_widened_by_hand(form: str, quantization: str, tmp_path: Path) -> None:
    tiny = make_fp8(tmp_path, form, attention_bias=True)
    model = load(tmp_path, quantization)
    assert torch.equal(logits_of(model), logits_of(tiny.model))
    assert len(fp8_linears(model)) == (3 * 7 if quantization == "fp8" else 0), "a cpu has no kernel: auto widens"
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("keep", ["none", "fp8"])
@pytest.mark.parametrize(
    "settings",
    [
        {"family": "qwen3"},
        {"tie_word_embeddings": True},
        {"shards": 3},
        {"plain": ("lm_head", "embed_tokens", "norm", "layers.0.", "down_proj")},
        {"plain": ("norm",), "form": "compressed channel"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
    ids=["qwen3", "tied", "shards", "modules left out", "head and embedding", "rope"],
)
def test_models_of_other_shapes_have_the_same_logits(settings: dict[str, Any], keep: str, tmp_path: Path) -> None:
    tiny = make_fp8(tmp_path, **settings)
    model = load(tmp_path, keep)
    assert torch.equal(logits_of(model), logits_of(tiny.model))
    plain = settings.get("plain", ())
    if keep == "fp8":
        assert not any(each in name for name in fp8_linears(model) for each in (*plain, "lm_head"))
        assert fp8_linears(model)


@pytest.mark.parametrize("keep", ["none", "fp8"])
def test_matrices_of_experts_are_widened_into_the_tensors_of_the_library(keep: str, tmp_path: Path) -> None:
    tiny = make_fp8(tmp_path, family="qwen3_moe")
    assert "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv" in load_file(tmp_path / "model.safetensors")
    model = load(tmp_path, keep)
    assert torch.equal(logits_of(model), logits_of(tiny.model))
    assert not any("experts" in name for name in fp8_linears(model))


def test_states_in_bfloat16_multiply_with_numbers_rounded_once(tmp_path: Path) -> None:
    tiny = make_fp8(tmp_path, "compressed channel")
    widened, kept = load(tmp_path, dtype="bfloat16"), load(tmp_path, "fp8", "bfloat16")
    assert torch.equal(logits_of(widened), logits_of(kept))
    expected = tiny.model.get_submodule(DOWN).weight.bfloat16()
    assert torch.equal(widened.get_submodule(DOWN).weight, expected)
    assert torch.equal(kept.get_submodule(DOWN).fp8.dequantised(torch.bfloat16), expected)


def test_a_scale_that_divides_instead_would_be_seen(tmp_path: Path) -> None:
    def invert(weights: Weights) -> None:
        for name in [name for name in weights if name.endswith("scale_inv")]:
            weights[name] = 1 / weights[name]

    tiny = make_fp8(tmp_path, change=invert)
    assert not torch.allclose(logits_of(load(tmp_path)), logits_of(tiny.model), atol=1e-2)


def test_another_device_or_dtype_leaves_the_8_bits_what_they_are(tmp_path: Path) -> None:
    make_fp8(tmp_path)
    model = load(tmp_path, "fp8")
    values = model.get_submodule(DOWN).fp8.values
    model.to(torch.bfloat16)
    assert model.get_submodule(DOWN).fp8.values is values
    model.to("meta")
    assert model.get_submodule(DOWN).fp8.device.type == "meta"


# Refusals: by name, and before memory is taken.


def without(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def with_nan(weights: Weights) -> None:
    weights[f"{DOWN}.weight"].view(torch.uint8)[3, 5] = 0xFF


def with_infinite_scale(weights: Weights) -> None:
    weights[f"{DOWN}.weight_scale_inv"][0, 1] = float("inf")


def put(name: str, tensor: torch.Tensor) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(f"{DOWN}.weight"), f"missing: {DOWN}.weight"),
        (without(f"{DOWN}.weight_scale_inv"), rf"{DOWN}.weight: got 'F8_E4M3 without scales'.*{DOWN}.weight_scale_inv"),
        (put("model.extra.weight", torch.ones(3)), "unexpected: model.extra.weight"),
        (put("model.norm.weight_scale_inv", torch.ones(1)), "unexpected: model.norm.weight_scale_inv"),
        (put("model.norm.weight", torch.ones(3)), r"shapes in: model.norm.weight \(got \[3\], expected \[192\]\)"),
        (put(f"{DOWN}.weight_scale_inv", torch.ones(3, 2)), r"weight_scale_inv: got \[3, 2\], expected \[2, 3\]"),
        (put(f"{DOWN}.weight_scale_inv", torch.ones(192, 1)), r"weight_scale_inv: got \[192, 1\], expected \[2, 3\]"),
        (put(f"{DOWN}.weight_scale_inv", torch.ones(2, 3).to(torch.float8_e8m0fnu)), "scale_inv: got 'F8_E8M0'"),
        (put(f"{DOWN}.weight", torch.ones(192, 384).to(torch.float8_e5m2)), f"{DOWN}.weight: got 'F8_E5M2"),
        (put(f"{DOWN}.weight", torch.ones(192, 384, dtype=torch.int8)), f"{DOWN}.weight: got 'I8"),
        (with_nan, f"{DOWN}.weight: got 'NaN or infinity', expected finite weights"),
        (with_infinite_scale, f"{DOWN}.weight: got 'NaN or infinity'"),
    ],
)
def test_what_does_not_fit_is_refused_by_key(
    change: Callable[[Weights], object], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fp8(tmp_path, change=change)
    if "NaN" not in named:
        monkeypatch.setattr("tide_core.models.streamed.safe_open", None)  # headers tell
    with pytest.raises(ModelError, match=named) as caught:
        load(tmp_path, "fp8")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 200, 100_000])
def test_cut_weights_are_refused_in_one_line(size: int, tmp_path: Path) -> None:
    make_fp8(tmp_path, shards=2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": compressed(**{"strategy": "tensor", **weights})["config_groups"]}


GROUP = "quantization_config.config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("form", "quantization", "named"),
    [
        ("fp8 block", {"quant_method": "awq", "bits": 4}, "quantization_config.quant_method: got 'awq'"),
        ("fp8 block", {"quant_method": "gptq"}, "quant_method: got 'gptq', expected FP8 in E4M3"),
        ("fp8 block", {"quant_method": "bitsandbytes"}, "got 'bitsandbytes'"),
        ("fp8 block", {"quant_method": "mxfp4"}, "got 'mxfp4'"),
        ("fp8 block", {"quant_method": None}, "quant_method: got None"),
        ("fp8 block", {"fmt": "e5m2"}, "quantization_config.fmt: got 'e5m2', expected e4m3"),
        ("fp8 block", {"weight_block_size": [64, 128]}, r"weight_block_size: got \[64, 128\], expected \[128, 128\]"),
        ("compressed tensor", {"format": "pack-quantized"}, "format: got 'pack-quantized', expected float-quantized"),
        ("compressed tensor", {"format": "int-quantized"}, "quantization_config.format: got 'int-quantized'"),
        ("compressed tensor", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("compressed tensor", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ("compressed tensor", {"config_groups": {}}, "quantization_config.config_groups: got {}"),
        ("compressed tensor", group(num_bits=4), f"{GROUP}.num_bits: got 4, expected 8"),
        ("compressed tensor", group(type="int"), f"{GROUP}.type: got 'int', expected float"),
        ("compressed tensor", group(strategy="group"), f"{GROUP}.strategy: got 'group', expected tensor or channel"),
        ("compressed tensor", group(symmetric=False), f"{GROUP}.symmetric: got False"),
        ("compressed tensor", group(strategy="block", block_structure=[64, 64]), r"block_structure: got \[64, 64\]"),
    ],
)
def test_other_quantisations_are_refused_by_name(
    form: str, quantization: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**FORMATS[form][0], **quantization}}))
    with pytest.raises(ModelError, match=named):
        fp8_scheme(tmp_path)


# quantization: fp8 of a model that is not.


def unquantised(folder: Path, **settings: Any) -> Path:
    return make_fp8(folder, plain=("",), quantization=None, **settings).path


def forget(folder: Path) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    return folder


def test_linears_of_the_layers_are_rounded_by_row_and_all_else_stays(tmp_path: Path) -> None:
    forget(unquantised(tmp_path, attention_bias=True))
    plain, model = load(tmp_path), load(tmp_path, "fp8")
    found = fp8_linears(model)
    assert len(found) == 3 * 7
    for name, linear in found.items():
        expected = quantised_by_row(plain.get_submodule(name).weight).dequantised(torch.float32)
        assert torch.equal(linear.fp8.dequantised(torch.float32), expected)
        assert linear.bias is None or torch.equal(linear.bias, plain.get_submodule(name).bias)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert weight_bytes(model) < 0.5 * weight_bytes(plain)
    assert num_weights(model) == num_weights(plain)
    difference = logits_of(model) - logits_of(plain)
    assert 0 < difference.std() < 0.1 * logits_of(plain).std()
    assert ModelAdapter(model).num_layer_weights == ModelAdapter(plain).num_layer_weights


def test_a_matrix_is_freed_before_the_next_one_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    weights = [weakref.ref(linear.weight) for _, linear in layer_linears(model)]
    alive = []

    def counted(weight: torch.Tensor) -> Fp8Weight:
        alive.append(sum(each() is not None for each in weights))
        return quantised_by_row(weight)

    monkeypatch.setattr("tide_core.models.fp8.layers.quantised_by_row", counted)
    quantise_layers(model, torch.device("cpu"))
    assert alive == list(range(4 * 7, 0, -1))


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"gpt2"}))
def test_linears_of_every_family_run_in_8_bits(family: str) -> None:
    """And no router: experts would be chosen by other numbers."""
    model = copy.deepcopy(tiny_model(family))
    if "falcon" in family:
        with pytest.raises(ConfigError, match="FalconForCausalLM, whose layers have no linears"):
            quantise_layers(model, torch.device("cpu"))
        return
    assert quantise_layers(model, torch.device("cpu")) == len(fp8_linears(model)) >= 4 * 2
    expected = copy.deepcopy(tiny_model(family))
    for name, linear in fp8_linears(model).items():
        expected.get_submodule(name).weight.data = linear.fp8.dequantised(torch.float32)
    assert torch.equal(logits_of(model), logits_of(expected))
    assert not any("gate." in name or "router" in name for name in fp8_linears(model))


def test_a_weight_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    def break_it(weights: Weights) -> None:
        weights[f"{DOWN}.weight"][3, 5] = float("nan")

    forget(unquantised(tmp_path, change=break_it))
    with pytest.raises(ModelError, match=f"{DOWN}.weight: got 'NaN or infinity', expected finite weights"):
        load(tmp_path, "fp8")


def test_a_model_without_plain_linears_is_refused_by_name(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantization: got 'fp8', expected auto or none with GPT2LMHeadModel"):
        load(tmp_path, "fp8")


# What reads weights.


def test_a_head_begins_with_the_numbers_of_a_layer_in_8_bits(tmp_path: Path) -> None:
    make_fp8(tmp_path)
    heads = []
    for quantization in ("none", "fp8"):
        model = load(tmp_path, quantization)
        sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "ffn": 300}
        head = make_head(make_spec("block", 192, **sizes))
        copied = copy_block_weights(head, model.model.layers[-1])
        assert {"q_proj", "k_proj", "v_proj", "mlp.gate_proj", "mlp.up_proj", "attention_norm"} <= set(copied)
        heads.append(head.state_dict())
    assert all(torch.equal(weight, heads[1][name]) for name, weight in heads[0].items())


@pytest.mark.parametrize("shape", ["block", "row"])
def test_gradients_flow_through_a_layer_in_8_bits(shape: str) -> None:
    weight = quantised_by_row(torch.randn(130, 200))
    if shape == "block":
        weight = Fp8Weight(weight.values, torch.rand(2, 2), 128, 128)
    linear, x = Fp8Linear(weight), torch.randn(3, 200, requires_grad=True)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantised(torch.float32).sum(0).expand(3, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "l4"])
@pytest.mark.parametrize("quantization", ["none", "auto", "fp8"])
@pytest.mark.parametrize("form", ["fp8 block", "compressed channel", "unquantised"])
def test_a_plan_counts_the_bytes_that_the_loader_keeps(
    form: str, quantization: str, device: str, tmp_path: Path
) -> None:
    if form == "unquantised":
        forget(unquantised(tmp_path, attention_bias=True))
    else:
        make_fp8(tmp_path, form, attention_bias=True, plain=("lm_head", "embed_tokens", "norm", ".bias", "0.mlp.up"))
    config = make_config(quantization=quantization, dtype="auto", max_model_len=16)
    planned = plan_for_folder(config, tmp_path, device_named(device))
    kept = quantization == "fp8" or (form != "unquantised" and quantization == "auto" and device == "l4")
    loaded = load(tmp_path, "fp8" if kept else "none", planned.config.dtype)
    matrices = [each for linear in fp8_linears(loaded).values() for each in (linear.fp8.values, linear.fp8.scales)]
    assert bool(matrices) == kept
    assert planned.config.dtype == ("float32" if device == "cpu" else "bfloat16")
    assert planned.size.weight_bytes == weight_bytes(loaded)
    assert weight_bytes(loaded) == sum(each.nbytes for each in (*loaded.parameters(), *matrices))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_states_than_bfloat16_on_a_gpu_widen_or_are_refused(dtype: str, tmp_path: Path) -> None:
    make_fp8(tmp_path)
    config = make_config(quantization="auto", dtype=dtype, max_model_len=16)
    assert plan_for_folder(config, tmp_path, device_named("l4")).size.weight_bytes == weight_bytes(
        load(tmp_path, dtype=dtype)
    )
    with pytest.raises(ConfigError, match=f"dtype: got '{dtype}', expected bfloat16 with quantization fp8 on a GPU"):
        plan_for_folder(replace(config, quantization="fp8"), tmp_path, device_named("l4"))


def test_loader_and_plan_refuse_other_quantisations(tmp_path: Path) -> None:
    make_fp8(tmp_path, quantization={"quant_method": "awq"})
    for setting in ("none", "auto", "fp8"):
        with pytest.raises(ModelError, match=r"quantization_config.quant_method: got 'awq'"):
            load(tmp_path, setting)
    with pytest.raises(ModelError, match=r"quantization_config.quant_method: got 'awq'"):
        plan_for_folder(make_config(), tmp_path, device_named("l4"))


@pytest.mark.parametrize("named", [True, False])
def test_dtype_auto_is_never_that_of_the_8_bits(named: bool, tmp_path: Path) -> None:
    make_fp8(tmp_path, dtype=torch.float16)
    if not named:
        path = tmp_path / "config.json"
        config = {key: value for key, value in json.loads(path.read_text()).items() if "dtype" not in key}
        path.write_text(json.dumps(config))
    assert chosen_dtype("auto", "cuda", tmp_path) == ("float16" if named else "bfloat16")


# Identity.


def identity(path: Path, quantization: str, dtype: str = "float32") -> Any:
    resolved = resolve(str(path))
    return identify(load(path, quantization, dtype), load_tokenizer(resolved), resolved)


@pytest.mark.parametrize("form", ["fp8 block", "compressed channel"])
def test_an_artefact_of_the_widened_weights_fits_for_they_are_the_same_numbers(form: str, tmp_path: Path) -> None:
    make_fp8(tmp_path, form)
    for dtype in ("float32", "bfloat16"):
        widened, kept = identity(tmp_path, "none", dtype), identity(tmp_path, "fp8", dtype)
        assert widened == kept


def test_an_artefact_of_the_unquantised_model_does_not_fit_the_rounded_one(tmp_path: Path) -> None:
    forget(unquantised(tmp_path))
    for dtype in ("float32", "bfloat16"):
        plain, rounded = identity(tmp_path, "none", dtype), identity(tmp_path, "fp8", dtype)
        assert rounded.weights_sha256 is None
        for made_for, model in ((plain, rounded), (rounded, plain)):
            with pytest.raises(ArtefactError, match="weights_sample"):
                check_identity(made_for, model)
    check_identity(rounded, identity(tmp_path, "fp8"))


# The engine.


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(("family", "form"), [("llama", "fp8 block"), ("qwen3", "compressed channel")])
def test_verified_gives_the_tokens_of_full_and_8_bits_those_of_widened_weights(
    family: str, form: str, kernels: str, tmp_path: Path
) -> None:
    if kernels == "native":
        pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
    tiny = make_fp8(tmp_path / "model", form, family)
    artefact = make_artefact(tmp_path / "artefact", tiny.model, kind="identity", shortlist_size=380)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kernels": kernels, "kv_memory_gib": 0.01}
    settings.update(model=str(tmp_path / "model"), artefact=str(artefact), drafts=3)
    answers = {}
    for quantization in ("none", "fp8"):
        with Engine(quantization=quantization, **settings) as engine:
            for mode in ("full", "verified"):
                params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, mode=mode)
                found = engine.generate(random_prompts(3, 6), params)
                answers[quantization, mode] = [[token.token_id for token in each.tokens] for each in found]
    assert len({str(each) for each in answers.values()}) == 1
