"""The identity of a model: equal for equal models wherever and however they are loaded, different for any other."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer as RawTokenizer

from tests.factories import tiny_tokenizer
from tests.tiny_models import CONFIGS, FAMILIES, tiny_model
from tide_core.errors import ModelError
from tide_core.exits.artefact.match import check_identity
from tide_core.models import model_cache
from tide_core.models.adapter import ModelAdapter
from tide_core.models.identity import config_digest, identify, tokenizer_digest, weights_sample
from tide_core.models.loader import load_model, load_tokenizer
from tide_core.models.resolver import ResolvedModel, resolve


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_an_identity_that_its_adapter_agrees_with(family: str) -> None:
    model = tiny_model(family)
    found, adapter = identify(model, tiny_tokenizer(), None), ModelAdapter(model, paged=False)
    assert (found.architecture, found.num_layers, found.vocab_size) == (type(model).__name__, 4, 384)
    assert adapter.norm(torch.zeros(1, found.width)).shape == (1, found.width)
    assert (found.revision, found.weights_sha256, found.dtype) == (None, None, "float32")
    assert 0 < len(found.weights_sample) <= 32
    assert all(0 < len(values) <= 8 for values in found.weights_sample.values())
    check_identity(found, identify(copy.deepcopy(model), copy.deepcopy(tiny_tokenizer()), None))


def test_no_two_tiny_models_have_one_identity() -> None:
    found = [identify(tiny_model(family), tiny_tokenizer(), None) for family in FAMILIES]
    assert len({one.config_sha256 for one in found}) == len(FAMILIES)


def test_a_loaded_folder_is_the_model_that_was_saved(folder: Path) -> None:
    resolved = resolve(str(folder))
    model, tokenizer = load_model(resolved, dtype="float32", device="cpu"), load_tokenizer(resolved)
    found, expected = identify(model, tokenizer, resolved), identify(tiny_model("llama"), tiny_tokenizer(), None)
    assert found.weights_sha256 is not None
    assert replace(found, weights_sha256=None, name=expected.name) == expected
    assert found.name == "tiny"


def test_where_equal_files_lie_and_what_wrote_their_config_does_not_matter(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    config = json.loads((other / "config.json").read_text())
    config |= {"transformers_version": "5.0.0", "use_cache": False, "new_switch_of_a_later_version": False}
    (other / "config.json").write_text(json.dumps(config))

    def found(path: Path) -> Any:
        resolved = resolve(str(path))
        return identify(load_model(resolved, dtype="float32", device="cpu"), load_tokenizer(resolved), resolved)

    assert replace(found(other), name="tiny") == found(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_coarser_dtype_changes_the_sample_within_its_rounding_only(dtype: torch.dtype) -> None:
    found = identify(tiny_model("llama"), tiny_tokenizer(), None)
    coarse = identify(copy.deepcopy(tiny_model("llama")).to(dtype), tiny_tokenizer(), None)
    assert coarse.dtype == str(dtype).removeprefix("torch.")
    assert coarse.config_sha256 == found.config_sha256
    check_identity(found, coarse)
    check_identity(coarse, found)


def test_preparing_a_model_for_the_engine_keeps_its_identity() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    before = identify(model, tiny_tokenizer(), None)
    ModelAdapter(model)
    assert identify(model, tiny_tokenizer(), None) == before


def test_identifying_leaves_the_model_as_it_was() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    attention, ids = model.config._attn_implementation, torch.arange(5)[None]
    before = model(ids).logits
    identify(model, tiny_tokenizer(), None)
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, before)


# --- configuration ---

FULL, SLIDING = "full_attention", "sliding_attention"
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"intermediate_size": 97}),
    ("llama", {"rms_norm_eps": 1e-3}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ("mistral_window", {"sliding_window": 7}),
    ("gemma2", {"final_logit_softcapping": 2.0}),
    ("gemma2", {"attn_logit_softcapping": 2.0}),
    ("gemma2", {"query_pre_attn_scalar": 7}),
    ("gpt2", {"layer_norm_epsilon": 1e-3}),
    ("gpt2", {"activation_function": "relu"}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("phi", {"partial_rotary_factor": 0.25}),
    ("falcon_alibi", {"alibi": False}),
    ("opt", {"do_layer_norm_before": False}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("deepseek_v3", {"routed_scaling_factor": 1.5}),
    ("qwen3_moe", {"num_experts": 4}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"mlp_only_layers": [2]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0], "layer_types": [FULL, SLIDING, SLIDING, FULL]}),
    ("granite", {"embedding_multiplier": 2.0}),
    ("granite", {"residual_multiplier": 2.0}),
    ("granite", {"attention_multiplier": 2.0}),
    ("granite", {"logits_scaling": 2.0}),
    ("stablelm", {"use_qkv_bias": False}),
    ("starcoder2", {"use_bias": False}),
    ("starcoder2", {"norm_epsilon": 1e-3}),
    ("cohere2", {"logit_scale": 2.0}),
    ("cohere2", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("gpt_oss", {"swiglu_limit": 5.0}),
]


def test_a_setting_that_other_versions_have_as_a_constant_does_not_count_where_it_is_that() -> None:
    settings = tiny_model("gpt_oss").config.to_dict()
    more = {**settings, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    fewer = {key: value for key, value in settings.items() if not key.startswith("swiglu")}
    assert config_digest(SimpleNamespace(to_dict=lambda: more)) == config_digest(SimpleNamespace(to_dict=lambda: fewer))


@pytest.mark.parametrize(("family", "change"), CHANGES, ids=lambda part: str(part)[:50])
def test_what_changes_the_forward_changes_the_digest(family: str, change: dict[str, Any]) -> None:
    _, config_class, settings = CONFIGS[family]
    one, other = (getattr(hf, config_class)(**{**settings, **extra}) for extra in ({}, change))
    assert config_digest(one) != config_digest(other)


@pytest.mark.parametrize(
    "change",
    [
        {"use_cache": False},
        {"dtype": "bfloat16"},
        {"architectures": ["LlamaForCausalLM"]},
        {"attn_implementation": "eager"},
        {"output_hidden_states": True},
        {"eos_token_id": 5},
        {"attention_dropout": 0.1},
        {"a_switch_of_a_later_version": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
    ],
    ids=str,
)
def test_what_does_not_change_the_forward_does_not_change_the_digest(change: dict[str, Any]) -> None:
    settings = CONFIGS["llama"][2]
    assert config_digest(hf.LlamaConfig(**{**settings, **change})) == config_digest(hf.LlamaConfig(**settings))


# --- tokenizer ---


def changed_tokenizer(**changes: Any) -> hf.PreTrainedTokenizerFast:
    values = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    values |= changes
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=RawTokenizer.from_str(json.dumps(values)), eos_token="<|end|>", pad_token="<|end|>"
    )


def test_padding_truncation_and_chat_template_do_not_tell_tokenizers_apart() -> None:
    other = changed_tokenizer()
    other.backend_tokenizer.enable_truncation(7)
    other.backend_tokenizer.enable_padding(length=9)
    other.chat_template = "{{ messages }}"
    other.pad_token = None
    assert tokenizer_digest(other) == tokenizer_digest(tiny_tokenizer())


def test_ids_merges_and_ends_tell_tokenizers_apart() -> None:
    model = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    *_, one, other = model["vocab"]
    swapped = {**model["vocab"], one: model["vocab"][other], other: model["vocab"][one]}
    others = [
        changed_tokenizer(model={**model, "vocab": swapped}),
        changed_tokenizer(model={**model, "merges": model["merges"][:-1]}),
        changed_tokenizer(model={**model, "merges": [model["merges"][1], model["merges"][0], *model["merges"][2:]]}),
        changed_tokenizer(),
        changed_tokenizer(),
    ]
    others[3].eos_token = "<|start|>"
    others[4].add_tokens(["<|new|>"])
    digests = {tokenizer_digest(tokenizer) for tokenizer in [tiny_tokenizer(), *others]}
    assert len(digests) == len(others) + 1


# --- weights ---


def test_weights_that_are_tied_are_sampled_once_and_all_values_are_where_they_were_taken() -> None:
    model = tiny_model("llama_tied")
    sample = weights_sample(model)
    assert "lm_head.weight" not in sample
    weights = dict(model.named_parameters())
    for name, values in sample.items():
        assert values[0] == weights[name].flatten()[0].item()
        assert values[-1] == weights[name].flatten()[-1].item()


def test_a_weight_that_is_no_contiguous_block_is_sampled_by_its_values() -> None:
    model = torch.nn.Linear(6, 10, bias=False)
    expected = weights_sample(model)
    model.weight = torch.nn.Parameter(model.weight.detach().T.contiguous().T)
    assert not model.weight.is_contiguous()
    assert weights_sample(model) == expected


def test_other_weights_give_other_files_and_another_sample(folder: Path, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3
    model.save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    digests = [
        identify(tiny_model("llama"), tiny_tokenizer(), ResolvedModel(path, "tiny", "folder")).weights_sha256
        for path in (folder, tmp_path / "tiny")
    ]
    assert digests[0] != digests[1]
    assert weights_sample(model) != weights_sample(tiny_model("llama"))


def test_a_snapshot_of_the_hub_is_named_by_its_commit(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ("a" * 40)).symlink_to(folder)
    for path, source, revision in (
        (tmp_path / ("a" * 40), "hub", "a" * 40),
        (tmp_path / ("a" * 40), "folder", None),
        (folder, "hub", None),
    ):
        resolved = ResolvedModel(path, "org/name", source)  # type: ignore[arg-type]
        assert identify(tiny_model("llama"), tiny_tokenizer(), resolved).revision == revision


def test_an_unknown_architecture_has_no_identity() -> None:
    config = hf.BloomConfig(vocab_size=384, hidden_size=48, n_layer=2, n_head=4)
    with pytest.raises(ModelError):
        identify(hf.BloomForCausalLM(config), tiny_tokenizer(), None)


def test_weight_files_that_vanish_are_named(tmp_path: Path) -> None:
    tmp_path.joinpath("model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelError, match=r"gone\.safetensors"):
        identify(tiny_model("llama"), tiny_tokenizer(), ResolvedModel(tmp_path, "x", "folder"))


@pytest.mark.demo
def test_the_demo_model_is_the_same_by_name_and_by_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve("demo")
    model, tokenizer = load_model(resolved, dtype="bfloat16", device="cpu"), load_tokenizer(resolved)
    by_folder = identify(model, tokenizer, resolve(str(resolved.path)))
    monkeypatch.setattr(model_cache, "sha256", None)  # by name no weight file is read once more
    found = identify(model, tokenizer, resolved)
    assert (found.num_layers, found.width, found.vocab_size) == (30, 576, 49152)
    assert replace(by_folder, name=found.name) == found
    # As they came out on transformers 5.17 and 5.22.
    assert found.config_sha256.startswith("a1d638f54d18f53d")
    assert found.tokenizer_sha256.startswith("9d4dcf36e8fda78b")
