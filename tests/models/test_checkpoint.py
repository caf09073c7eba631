"""What `dtype: auto` means for a checkpoint on a device, read from config.json and headers alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tide_core.config import DTYPES
from tide_core.errors import ModelError
from tide_core.models.checkpoint import checkpoint_dtype, chosen_dtype

pytestmark = pytest.mark.unit


def folder(path: Path, config: dict[str, Any], **tensors: tuple[str, int]) -> Path:
    """A model without weights: the file ends after its header, so whoever reads further fails."""
    entries = {
        name: {"dtype": kind, "shape": [count], "data_offsets": [0, 0]} for name, (kind, count) in tensors.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return path


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "float64"}, "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
    ],
    ids=str,
)
def test_on_a_gpu_auto_is_the_checkpoints_own_and_bfloat16_for_one_in_float32(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    assert chosen_dtype("auto", "cuda", folder(tmp_path / "m", config, a=("F32", 4))) == expected


@pytest.mark.parametrize("own", ["float32", "float16", "bfloat16"])
def test_on_a_cpu_auto_is_float32_for_every_checkpoint(tmp_path: Path, own: str) -> None:
    assert chosen_dtype("auto", "cpu", folder(tmp_path / "m", {"dtype": own})) == "float32"


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_explicit_dtype_stays_and_nothing_is_read(tmp_path: Path, given: str, device: str) -> None:
    assert chosen_dtype(given, device, tmp_path / "nothing") == given


def test_without_a_line_in_the_config_most_weights_decide(tmp_path: Path) -> None:
    tensors = {"norm": ("F32", 10), "big": ("F16", 100), "other": ("BF16", 50)}
    assert checkpoint_dtype(folder(tmp_path / "m", {}, **tensors)) == "float16"
    assert checkpoint_dtype(folder(tmp_path / "m", {}, one=("I8", 10))) is None


@pytest.mark.parametrize(
    "content", [b"", b"\x08\0\0\0\0\0\0\0not json", struct.pack("<Q", 2**60), struct.pack("<Q", 2) + b"[]"], ids=repr
)
def test_a_broken_header_is_refused_by_file(tmp_path: Path, content: bytes) -> None:
    path = folder(tmp_path / "m", {})
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: got .*, expected a safetensors file with a sound header"
    ):
        checkpoint_dtype(path)
