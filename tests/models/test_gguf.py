from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from tests.models.gguf_factory import (
    HEAD_DIM,
    HIDDEN,
    TinyGGUF,
    byte_vocab,
    make_gguf,
    reference_model,
)
from tide_core.errors import ModelError
from tide_core.models.gguf.architectures import describe
from tide_core.models.gguf.convert import convert as convert_gguf
from tide_core.models.gguf.file import GGUFFile
from tide_core.models.gguf.tokenizer import build_tokenizer, token_ids


def convert(tiny: TinyGGUF, tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(tiny.path, folder)
    return folder


def refuse(path: Path, tmp_path: Path) -> ModelError:
    folder = tmp_path / "refused"
    folder.mkdir()
    with pytest.raises(ModelError) as caught:
        convert_gguf(path, folder)
    assert not list(folder.iterdir()), "a refused file must leave nothing behind"
    return caught.value


def assert_same_logits(tiny: TinyGGUF, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    ids = torch.arange(3, 83).reshape(2, 40)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, tiny.model(ids).logits)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_converted_model_gives_the_logits_of_the_same_weights_in_transformers(kind: str, tmp_path: Path) -> None:
    tiny = make_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType[kind])
    assert_same_logits(tiny, convert(tiny, tmp_path))


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    tiny = make_gguf(tmp_path / "tiny.gguf", tie_word_embeddings=False)
    folder = convert(tiny, tmp_path)
    assert '"tie_word_embeddings": false' in (folder / "config.json").read_text()
    assert_same_logits(tiny, folder)


def test_biases_are_kept_and_put_in_order(tmp_path: Path) -> None:
    tiny = make_gguf(tmp_path / "tiny.gguf", attention_bias=True, mlp_bias=True)
    assert_same_logits(tiny, convert(tiny, tmp_path))


def test_heads_of_a_size_other_than_width_over_heads_are_kept(tmp_path: Path) -> None:
    sizes = {"llama.attention.head_count": 2, "llama.attention.key_length": 16, "llama.attention.value_length": 16}
    tiny = make_gguf(tmp_path / "tiny.gguf", metadata=sizes, num_attention_heads=2)
    assert_same_logits(tiny, convert(tiny, tmp_path))


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_of_the_file_is_followed(metadata: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    parameters = {"rope_theta": 5000.0, **rope}
    tiny = make_gguf(tmp_path / "tiny.gguf", metadata=metadata, rope_parameters=parameters)
    assert_same_logits(tiny, convert(tiny, tmp_path))


def llama3_factors(theta: float) -> tuple[dict[str, Any], np.ndarray]:
    plain = {"rope_theta": theta, "rope_type": "default"}
    scaled = {**plain, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled["original_max_position_embeddings"] = 8192
    frequencies = [reference_model(8, rope_parameters=rope).model.rotary_emb.inv_freq for rope in (plain, scaled)]
    return scaled, (frequencies[0] / frequencies[1]).numpy()


def test_llama3_frequency_factors_become_the_rule_that_made_them(tmp_path: Path) -> None:
    rope, factors = llama3_factors(500000.0)
    tiny = make_gguf(
        tmp_path / "tiny.gguf",
        metadata={"llama.rope.freq_base": 500000.0},
        tensors={"rope_freqs.weight": factors},
        rope_parameters=rope,
    )
    assert_same_logits(tiny, convert(tiny, tmp_path))


def test_frequency_factors_of_an_unknown_rule_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)
    tiny = make_gguf(tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": factors})
    assert "rope_freqs.weight" in refuse(tiny.path, tmp_path).field


def test_end_of_turn_is_an_end_in_the_generation_config(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    tiny = make_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.eot_token_id": 0})
    folder = convert(tiny, tmp_path)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 0]


def test_the_end_of_a_turn_ends_an_answer_though_the_file_names_the_end_of_a_document_alone(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    tiny = make_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.eos_token_id": 0})
    folder = convert(tiny, tmp_path)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, 2]


@pytest.mark.parametrize("size", [0, 7, 23])
def test_a_file_too_small_for_a_header_is_refused(size: int, tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"[:size])
    error = refuse(path, tmp_path)
    assert "small.gguf" in error.field
    assert f"{size} bytes" in str(error)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "zip.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    assert "not a GGUF" in refuse(path, tmp_path).expected


@pytest.mark.parametrize(("version", "came"), [(1, "1"), (99, "99"), (3 << 24, "big-endian")])
def test_other_versions_and_byte_orders_are_refused(version: int, came: str, tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "tiny.gguf").path
    data = path.read_bytes()
    path.write_bytes(data[:4] + version.to_bytes(4, "little") + data[8:])
    error = refuse(path, tmp_path)
    assert "version" in error.field
    assert came in str(error.value)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = make_gguf(tmp_path / "tiny.gguf").path.read_bytes()
    cut = tmp_path / "cut.gguf"
    places = {*range(0, 200, 7), *range(200, len(data), len(data) // 60), len(data) - 1}
    for place in sorted(places):
        cut.write_bytes(data[:place])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile.open(cut)


def test_damaged_headers_are_read_or_refused_but_nothing_else(tmp_path: Path) -> None:
    data = make_gguf(tmp_path / "tiny.gguf").path.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    rng = random.Random(3)
    refused = 0
    for _ in range(400):
        bad = bytearray(data)
        bad[rng.randrange(4, 9000)] = rng.randrange(256)
        damaged.write_bytes(bad)
        try:
            file = GGUFFile.open(damaged)
            describe(file)
            build_tokenizer(file, token_ids(file), 128)
        except ModelError:
            refused += 1
    assert refused > 100


def test_a_count_that_cannot_be_true_ends_at_once(tmp_path: Path) -> None:
    for offset in (8, 16):  # tensor count, metadata count
        data = bytearray(make_gguf(tmp_path / "tiny.gguf").path.read_bytes())
        data[offset : offset + 8] = (2**63).to_bytes(8, "little")
        path = tmp_path / "huge.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelError):
            GGUFFile.open(path)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    error = refuse(make_gguf(tmp_path / "tiny.gguf", architecture="mamba").path, tmp_path)
    assert error.value == "mamba"
    assert "llama" in error.expected


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.eos_token_id",
    ],
)
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    assert key in refuse(make_gguf(tmp_path / "tiny.gguf", drop=[key]).path, tmp_path).field


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    assert name in refuse(make_gguf(tmp_path / "tiny.gguf", drop=[name]).path, tmp_path).field


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, dtype=np.float32)}
    assert "attn_q_norm" in refuse(make_gguf(tmp_path / "tiny.gguf", tensors=tensors).path, tmp_path).field


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_v.weight": np.ones((8, HIDDEN), dtype=np.float32)}
    error = refuse(make_gguf(tmp_path / "tiny.gguf", tensors=tensors).path, tmp_path)
    assert "(8, 64)" in str(error)
    assert "(32, 64)" in error.expected


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = {"output_norm.weight": np.full(HIDDEN, np.nan, dtype=np.float32)}
    path = make_gguf(tmp_path / "tiny.gguf", tensors=tensors).path
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="output_norm"):
        convert_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.head_count_kv": 3}, "head_count_kv"),
        ({"llama.attention.head_count": [4, 4]}, "head_count"),
        ({"llama.block_count": 0}, "block_count"),
        ({"llama.block_count": "two"}, "block_count"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.vocab_size": 9}, "vocab_size"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type"),
        ({"tokenizer.ggml.merges": ["h e", "one"]}, "merges"),
        ({"tokenizer.ggml.merges": ["x y"]}, "merges"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused_by_name(
    metadata: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert named in refuse(make_gguf(tmp_path / "tiny.gguf", metadata=metadata).path, tmp_path).field


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.ones((100, HIDDEN), dtype=np.float32)}
    error = refuse(make_gguf(tmp_path / "tiny.gguf", tensors=tensors).path, tmp_path)
    assert "tokens" in error.field


def test_a_token_twice_is_refused(tmp_path: Path) -> None:
    tokens = byte_vocab()
    tokens[-1] = tokens[-2]
    path = make_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.tokens": tokens}).path
    assert "tokens" in refuse(path, tmp_path).field


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(OSError, match="GB needed"):
        convert(tiny, tmp_path)
    assert not list((tmp_path / "converted").iterdir())
