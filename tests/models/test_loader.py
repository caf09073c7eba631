from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.gguf_factory import make_gguf, reference_model
from tide_core.errors import ConfigError, ModelError
from tide_core.models.identity import weights_digest
from tide_core.models.loader import fingerprint, load_model, load_tokenizer
from tide_core.models.resolver import ResolvedModel, resolve

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    place = tmp_path_factory.mktemp("loader")
    return resolve(str(make_gguf(place / "tiny.gguf").path), cache_dir=place / "cache")


@pytest.fixture
def folder(converted: ResolvedModel, tmp_path: Path) -> ResolvedModel:
    """A copy that a test may break."""
    shutil.copytree(converted.path, tmp_path / "copy")
    return resolve(str(tmp_path / "copy"))


def change_weights(folder: ResolvedModel, change: Callable[[Weights], object]) -> None:
    weights = load_file(folder.path / "model.safetensors")
    change(weights)
    save_file(weights, folder.path / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: ResolvedModel, **values: object) -> None:
    path = folder.path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_dtype_of_auto_is_decided_when_the_model_is_loaded(
    converted: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def chosen(dtype: str, device_type: str, folder: Path) -> str:
        asked.append((dtype, device_type, folder))
        return "bfloat16"

    monkeypatch.setattr("tide_core.models.loader.chosen_dtype", chosen)
    assert load_model(converted, dtype="auto", device="cpu").dtype is torch.bfloat16
    assert asked == [("auto", "cpu", converted.path)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_model_is_loaded_frozen_in_eval_mode_and_in_the_asked_dtype(dtype: str, converted: ResolvedModel) -> None:
    model = load_model(converted, dtype=dtype, device="cpu")
    assert not model.training
    assert all(not parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


def test_a_tied_head_may_be_absent_from_the_checkpoint(converted: ResolvedModel) -> None:
    assert "lm_head.weight" not in load_file(converted.path / "model.safetensors")
    model = load_model(converted, dtype="float32", device="cpu")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_sharded_weights_are_loaded(folder: ResolvedModel) -> None:
    whole = load_model(folder, dtype="float32", device="cpu")
    (folder.path / "model.safetensors").unlink()
    whole.save_pretrained(folder.path, max_shard_size="100KB")
    assert len(list(folder.path.glob("model-*.safetensors"))) > 1
    model = load_model(resolve(str(folder.path)), dtype="float32", device="cpu")
    for name, value in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"), "missing: model.layers.1.mlp.up_proj"),
        (lambda weights: weights.update({"model.extra.weight": torch.ones(3)}), "unexpected: model.extra.weight"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight"),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_checkpoint_that_does_not_fill_its_model_is_refused_by_key(
    change: Callable[[Weights], object], named: str, folder: ResolvedModel
) -> None:
    change_weights(folder, change)
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype="float32", device="cpu")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 200, 100_000])
def test_cut_weights_are_refused_in_one_line(size: int, folder: ResolvedModel) -> None:
    path = folder.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "unheard-of", "architectures": ["UnheardOfForCausalLM"]},
        {"model_type": None},
        {"num_hidden_layers": 3},
        {"hidden_size": "wide"},
        {"model_type": "unheard-of", "auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"}},
    ],
)
def test_a_config_transformers_cannot_follow_is_refused_in_one_line(
    values: dict[str, object], folder: ResolvedModel
) -> None:
    (folder.path / "evil.py").write_text("raise SystemExit('remote code ran')")
    change_config(folder, **values)
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype="float32", device="cpu")
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_is_refused_in_one_line(folder: ResolvedModel) -> None:
    (folder.path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer of copy"):
        load_tokenizer(folder)


def test_loading_writes_nothing_to_the_terminal(folder: ResolvedModel, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(folder, dtype="float32", device="cpu")
    load_tokenizer(folder)
    change_weights(folder, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ModelError):
        load_model(folder, dtype="float32", device="cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", ["int8", "fp32", "torch.float32", ""])
def test_an_unknown_dtype_is_a_config_error(dtype: str, converted: ResolvedModel) -> None:
    with pytest.raises(ConfigError, match="float32, float16, bfloat16"):
        load_model(converted, dtype=dtype, device="cpu")


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cuda:0", ""])
def test_an_unknown_device_is_a_config_error(device: str, converted: ResolvedModel) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(converted, dtype="float32", device=device)
    assert caught.value.field == "device"


@pytest.mark.parametrize("device", ["cuda"])
def test_cuda_without_cuda_is_a_config_error(
    device: str, converted: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as caught:
        load_model(converted, dtype="float32", device=device)
    assert (caught.value.field, caught.value.value) == ("device", device)
    assert load_model(converted, dtype="float32", device="auto").device == torch.device("cpu")


def test_equal_files_have_equal_fingerprints_wherever_they_lie(converted: ResolvedModel, folder: ResolvedModel) -> None:
    assert (converted.source, folder.source) == ("gguf", "folder")
    assert fingerprint(converted) == fingerprint(folder)
    assert len(fingerprint(folder)) == 64


def test_the_fingerprint_of_a_folder_does_not_trust_a_manifest_beside_the_weights(folder: ResolvedModel) -> None:
    before = fingerprint(folder)
    change_weights(folder, lambda weights: weights["model.norm.weight"].mul_(1.5))
    assert fingerprint(folder) != before


def test_a_digest_of_the_weights_that_is_known_gives_the_same_fingerprint_without_reading_them(
    folder: ResolvedModel,
) -> None:
    digest, expected = weights_digest(folder), fingerprint(folder)
    (folder.path / "model.safetensors").unlink()
    assert fingerprint(folder, digest) == expected
    assert fingerprint(folder, "0" * 64) != expected


def test_the_fingerprint_changes_with_the_config(folder: ResolvedModel) -> None:
    before = fingerprint(folder)
    change_config(folder, rms_norm_eps=1e-6)
    assert fingerprint(folder) != before


def test_an_untied_reference_model_saved_by_transformers_is_loaded(folder: ResolvedModel) -> None:
    reference = reference_model(268, tie_word_embeddings=False)
    reference.save_pretrained(folder.path)
    ids = torch.arange(20)[None]
    model = load_model(folder, dtype="float32", device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, reference(ids).logits)


@pytest.mark.demo
def test_the_demo_model_answers_and_its_tokenizer_is_the_original_one() -> None:
    demo = resolve("demo")
    tokenizer = load_tokenizer(demo)
    for text, ids in {
        "It's 2024, isn't it?": [1589, 506, 216, 34, 32, 34, 36, 28, 3247, 982, 357, 47],
        "naïve  façade": [3546, 46494, 216, 40852],
        "x = [\n    1,\n    22]": [104, 446, 933, 2367, 33, 28, 2367, 34, 34, 77],
        "<|im_start|>": [1],
        "<|im_end|>": [2],
    }.items():
        assert tokenizer(text).input_ids == ids
    for text in ("naïve — “x” 日本語 🙂👩‍👩‍👧 ﷽ \x00", "def f():\n    return [\n        1,  22]\r\n\t"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.pad_token == "<|im_end|>"
    model = load_model(demo, dtype="float32", device="cpu")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        answer = model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    assert tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True) == "The capital of France is Paris."
