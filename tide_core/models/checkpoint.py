"""What a model folder says of itself while its weights stay on disk: config.json and the headers of its safetensors.
No torch here."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_core.config import AUTO, DTYPES
from tide_core.errors import ModelError
from tide_core.models.folder import json_object, weight_files

STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of the safetensors format."""
MAX_HEADER_BYTES = 100 * 2**20
"""Of the format itself."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header of its file says of a tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def chosen_dtype(dtype: str, device_type: str, folder: Path) -> str:
    """What a dtype of `auto` means for this model on a device; another stays as it is.

    On a CPU it is float32, whatever the checkpoint has: half the bytes would not make the CPU kernels faster, and
    results equal the library's in float32."""
    if dtype != AUTO:
        return dtype
    if device_type != "cuda":
        return "float32"
    own = checkpoint_dtype(folder)
    return own if own in ("bfloat16", "float16") else "bfloat16"


def checkpoint_dtype(folder: Path) -> str | None:
    """As config.json says; where it does not, that of most of the weights. None for types that no model runs in."""
    config = json_object(folder / "config.json")
    for key in ("dtype", "torch_dtype"):
        named = config.get(key)
        if isinstance(named, str):
            named = named.removeprefix("torch.")
            return named if named in DTYPES else None
    sizes: Counter[str] = Counter()
    for tensor in stored_tensors(folder).values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    return STORED.get(sizes.most_common(1)[0][0]) if sizes else None


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All weights, by name."""
    return {
        name: StoredTensor(path, str(entry.get("dtype")), tuple(entry["shape"]), _num_bytes(path, entry))
        for path in weight_files(folder)
        for name, entry in _header(path).items()
    }


def _num_bytes(path: Path, entry: Mapping[str, Any]) -> int:
    match entry.get("data_offsets"):
        case [int(begin), int(end)] if begin <= end:
            return end - begin
        case other:
            raise ModelError(str(path), f"data_offsets {other}", "a safetensors file with a sound header")


def _header(path: Path) -> dict[str, Mapping[str, Any]]:
    expected = "a safetensors file with a sound header"
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ModelError(str(path), f"a header of {length} bytes", expected)
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        if not all(isinstance(entry["shape"], list) for entry in header.values()):
            raise TypeError("shape")
    except OSError as error:
        raise ModelError(str(path), error.strerror or str(error), "a readable file") from error
    except (ValueError, struct.error, AttributeError, TypeError, KeyError) as error:
        raise ModelError(str(path), str(error), expected) from error
    return dict(header)
