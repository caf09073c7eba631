"""Checkpoints that go to the device tensor by tensor: the model is the one that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import FAMILIES, tiny_model
from tide_core.errors import ConfigError, ModelError
from tide_core.models import load_progress, loader, streamed
from tide_core.models.resolver import ResolvedModel
from tide_core.models.streamed import load_streamed

RENAMED = ("granite_moe", "gpt2", "gpt_neox", "gpt_neox_serial")
"""Families some of whose tensors transformers renames, or makes of others, while it loads them."""
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_one_that_transformers_loads(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    got: Any = load_streamed(tmp_path, family, dtype=torch.bfloat16, place=CPU, scheme=None, fp8=False)
    assert (got is None) == (family in RENAMED)
    if got is None:
        return
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert_same(dict(got.named_parameters()), dict(expected.named_parameters()))
    assert_same(dict(got.named_buffers()), dict(expected.named_buffers()))
    assert got.config.to_dict() == expected.config.to_dict()
    assert got.generation_config.to_dict() == expected.generation_config.to_dict()
    assert not any(parameter.requires_grad for parameter in got.parameters())
    ids = torch.tensor([[5, 3, 9, 2]])
    assert torch.equal(got(ids).logits, expected(ids).logits)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype is tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def test_a_file_is_opened_again_after_so_many_bytes_of_it_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read of a mapped file stays in the memory of the process until it is closed."""
    tiny_model("llama").save_pretrained(tmp_path)
    opened: list[Path] = []
    open_file = streamed.safe_open
    monkeypatch.setattr(streamed, "safe_open", lambda path, **more: opened.append(path) or open_file(path, **more))
    for limit, least in ((2**30, 1), (20_000, 3)):
        opened.clear()
        monkeypatch.setattr(streamed, "MAPPED_BYTES", limit)
        got: Any = load_streamed(tmp_path, "llama", dtype=torch.float32, place=CPU, scheme=None, fp8=False)
        assert (len(opened) == 1) if least == 1 else (len(opened) >= least)
        assert_same(dict(got.named_parameters()), dict(tiny_model("llama").named_parameters()))


def test_a_load_tells_how_far_it_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(load_progress, "LOG_EVERY_S", 0.0)
    with (
        caplog.at_level("INFO", logger="tide"),
        load_progress.notifying(lambda read, total: told.append((read, total))),
    ):
        load_streamed(tmp_path, "mine", dtype=torch.float32, place=CPU, scheme=None, fp8=False)
    sizes = [tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values()]
    assert told[-1] == (sum(sizes), sum(sizes))
    assert len(told) == len(sizes)
    assert sorted(told) == told
    assert "loading mine: " in caplog.text
    load_streamed(tmp_path, "mine", dtype=torch.float32, place=CPU, scheme=None, fp8=False)
    assert len(told) == len(sizes), "nobody listens outside the block"


def test_one_file_is_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    num_open, opened = 0, 0

    class Counted:
        def __init__(self, *given: Any, **more: Any) -> None:
            self._file = open_file(*given, **more)

        def __enter__(self) -> Any:
            nonlocal num_open, opened
            num_open, opened = num_open + 1, opened + 1
            assert num_open == 1
            return self._file.__enter__()

        def __exit__(self, *given: Any) -> None:
            nonlocal num_open
            num_open -= 1
            self._file.__exit__(*given)

    open_file = streamed.safe_open
    monkeypatch.setattr(streamed, "safe_open", Counted)
    load_streamed(tmp_path, "llama", dtype=torch.float32, place=CPU, scheme=None, fp8=False)
    files = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values()
    assert (opened, num_open) == (len(set(files)), 0)
    assert opened > 2, "each file is read once"


@pytest.mark.parametrize("other", [False, True])
def test_a_stored_head_that_is_not_the_embedding_stays_though_the_config_ties_them(other: bool, tmp_path: Path) -> None:
    tiny_model("llama_tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0) if other else tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": head.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    got: Any = load_streamed(tmp_path, "tied", dtype=torch.float32, place=CPU, scheme=None, fp8=False)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(got.lm_head.weight, head)
    assert torch.equal(got.lm_head.weight, expected.lm_head.weight)
    assert (got.lm_head.weight is got.model.embed_tokens.weight) == (not other)


def test_a_model_whose_linears_are_not_known_is_not_rounded_in_silence(tmp_path: Path) -> None:
    tiny_model("falcon_new_layout").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"quantization: got 'fp8'.*Falcon"):
        load_streamed(tmp_path, "falcon", dtype=torch.bfloat16, place=CPU, scheme=None, fp8=True)


def test_a_device_that_runs_out_of_memory_is_an_error_with_the_models_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)

    def read(reader: object, key: str) -> torch.Tensor:
        raise torch.OutOfMemoryError("no 2 GiB are free")

    monkeypatch.setattr(loader, "torch_device", lambda device: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(streamed._Reader, "read", read)
    with pytest.raises(ModelError, match="model large: got 'OutOfMemoryError: no 2 GiB"):
        loader.load_model(ResolvedModel(tmp_path, "large", "folder"), dtype="bfloat16", device="cuda")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_on_a_gpu_a_checkpoint_is_streamed_where_it_can_be(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    streamed_to: list[Any] = []

    def stream(*given: Any, place: Any, **more: Any) -> Any:
        streamed_to.append(place.type)
        return load_streamed(*given, place=CPU, **more)

    monkeypatch.setattr(loader, "torch_device", lambda device: SimpleNamespace(type=device))
    monkeypatch.setattr(loader, "load_streamed", stream)
    monkeypatch.setattr(loader, "_load_by_library", lambda *given, **more: "by the library")
    resolved = ResolvedModel(tmp_path, family, "folder")
    on_gpu, on_cpu = (loader.load_model(resolved, dtype="bfloat16", device=device) for device in ("cuda", "cpu"))
    assert (on_gpu == "by the library") == (family == "gpt2")
    assert on_cpu == "by the library"
    assert streamed_to == ["cuda"]
