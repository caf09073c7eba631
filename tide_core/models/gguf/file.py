"""Read a GGUF file; every read is checked against the size of the file.

The reader of the gguf package trusts the counts it reads: a damaged array length makes it loop, and a short file raises
a bare IndexError. The header is therefore read here; the package decodes the block formats.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tide_core.errors import ModelError

Scalar: TypeAlias = str | bool | int | float
Value: TypeAlias = Scalar | list[Scalar]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 2**16 - 1

STRING_TYPE = 8
ARRAY_TYPE = 9
SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Position of a tensor in the file. `shape` is row-major, the reverse of the order in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Metadata and tensor table of one file. `read` reads tensor data."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        try:
            with path.open("rb") as stream:
                return _read_header(path, stream)
        except OSError as error:
            raise ModelError("gguf file", path, f"a readable file: {error.strerror or error}") from error

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor in float32."""
        info = self.tensors[name]
        try:
            with self.path.open("rb") as stream:
                stream.seek(info.offset)
                data = stream.read(info.num_bytes)
        except OSError as error:
            raise ModelError("gguf file", self.path, f"a readable file: {error.strerror or error}") from error
        if len(data) != info.num_bytes:
            raise ModelError(f"{self.path}: {name}", f"{len(data)} bytes", f"{info.num_bytes} bytes")
        rows = np.frombuffer(data, dtype=np.uint8).reshape(math.prod(info.shape[:-1]), -1)
        with np.errstate(all="ignore"):  # damaged scales overflow; the check below finds them
            values: npt.NDArray[np.float32] = dequantize(rows, info.kind).astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: {name}", "NaN or infinity", "finite weights")
        return values.reshape(info.shape)

    def missing(self, key: str) -> NoReturn:
        raise ModelError(f"{self.path}: {key}", None, "this metadata key to be present")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if value is None:
            self.missing(key)
        if not isinstance(value, str):
            raise ModelError(f"{self.path}: {key}", value, "a string")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1) -> int:
        value = self.metadata.get(key, default)
        if value is None:
            self.missing(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ModelError(f"{self.path}: {key}", value, f"an integer in {low}..{high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number. Float32 values return as their shortest decimal: 1e-05, not 9.99e-06."""
        value = self.metadata.get(key, default)
        if value is None:
            self.missing(key)
        if isinstance(value, (bool, str, list)) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"{self.path}: {key}", value, "a finite number above 0")
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: {key}", value, "true or false")
        return value

    def strings(self, key: str) -> list[str]:
        if key not in self.metadata:
            self.missing(key)
        value = self.metadata[key]
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ModelError(f"{self.path}: {key}", value, "an array of strings")
        return [str(entry) for entry in value]

    def numbers(self, key: str, length: int) -> list[float]:
        if key not in self.metadata:
            self.missing(key)
        value = self.metadata[key]
        if not isinstance(value, list) or len(value) != length:
            raise ModelError(f"{self.path}: {key}", value, f"an array of {length} numbers")
        if any(isinstance(entry, str) or not math.isfinite(entry) for entry in value):
            raise ModelError(f"{self.path}: {key}", value, f"an array of {length} finite numbers")
        return [float(entry) for entry in value]


class _Cursor:
    """Reads forward; a read past the end raises an error with the position and the field."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.stream = stream
        self.size = stream.seek(0, 2)
        self.position = stream.seek(0)

    def take(self, count: int, what: str) -> bytes:
        left = self.size - self.position
        data = self.stream.read(count) if count <= left else b""
        if len(data) != count:
            raise ModelError(f"{self.path}: {what}", f"{left} bytes left", f"{count} bytes; the file is cut or damaged")
        self.position += count
        return data

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack("<" + code, self.take(struct.calcsize(code), what))[0])

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number("Q", what)
        if limit is not None and length > limit:
            raise ModelError(f"{self.path}: {what}", f"{length} bytes", f"at most {limit} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {what}", f"byte {error.object[error.start]:#04x}", "UTF-8 text") from error

    def texts(self, count: int, what: str) -> list[Scalar]:
        """`text` many times, for a vocabulary. Each takes 8 bytes or more, so a bad count fails soon."""
        found: list[Scalar] = []
        read, unpack = self.stream.read, struct.Struct("<Q").unpack
        for _ in range(count):
            try:
                (length,) = unpack(read(8))
                data = read(min(length, self.size))
                found.append(data.decode())
            except (struct.error, UnicodeDecodeError):
                length, data = 0, None
            if data is None or len(data) != length:
                self.stream.seek(self.position)
                self.text(what)  # it says what is wrong
            self.position += 8 + length
        return found

    def value(self, key: str) -> Value:
        kind = self.number("I", key)
        if kind != ARRAY_TYPE:
            return self.values(kind, 1, key)[0]
        return self.values(self.number("I", key), self.number("Q", key), key)

    def values(self, kind: int, count: int, key: str) -> list[Scalar]:
        if kind == STRING_TYPE:
            return self.texts(count, key)
        if kind not in SCALAR_CODES:
            raise ModelError(f"{self.path}: {key}", kind, "a value type of the GGUF format (no arrays of arrays)")
        code = SCALAR_CODES[kind]
        data = self.take(struct.calcsize(code) * count, key)
        return list(struct.unpack(f"<{count}{code}", data))


def _read_header(path: Path, stream: BinaryIO) -> GGUFFile:
    cursor = _Cursor(path, stream)
    if cursor.size < 24:
        raise ModelError(str(path), f"a file of {cursor.size} bytes", "a GGUF file (its header alone takes 24 bytes)")
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise ModelError(f"{path}: first bytes", magic, f"{MAGIC!r}: this is not a GGUF file")
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        came = f"{swapped} in big-endian order" if swapped in VERSIONS else version
        raise ModelError(f"{path}: GGUF version", came, "version 2 or 3, little-endian")
    num_tensors = cursor.number("Q", "tensor count")
    metadata: dict[str, Value] = {}
    for _ in range(cursor.number("Q", "metadata count")):
        key = cursor.text("metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise ModelError(f"{path}: {key}", "twice", "every metadata key once")
        metadata[key] = cursor.value(key)
    raw: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text("tensor name", MAX_NAME_BYTES)
        if name in raw:
            raise ModelError(f"{path}: {name}", "twice", "every tensor once")
        num_dims = cursor.number("I", name)
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise ModelError(f"{path}: {name}", f"{num_dims} dimensions", f"1 to {MAX_DIMENSIONS}")
        dims = tuple(cursor.number("Q", name) for _ in range(num_dims))
        raw[name] = (dims[::-1], cursor.number("I", name), cursor.number("Q", name))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise ModelError(f"{path}: general.alignment", alignment, "a positive multiple of 8")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _locate(path, name, *entry, start, cursor.size) for name, entry in raw.items()}
    return GGUFFile(path, metadata, tensors)


def _locate(
    path: Path, name: str, shape: Sequence[int], kind_id: int, offset: int, start: int, size: int
) -> TensorInfo:
    field = f"{path}: {name}"
    try:
        kind = GGMLQuantizationType(kind_id)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except (ValueError, KeyError):
        raise ModelError(field, f"tensor type {kind_id}", "a type the gguf package knows") from None
    except NotImplementedError:
        raise ModelError(field, kind.name, "a type the gguf package can dequantise") from None
    if min(shape) < 1 or shape[-1] % block:
        raise ModelError(field, tuple(shape), f"sizes above 0, the last a multiple of {block} ({kind.name})")
    num_bytes = math.prod(shape) // block * block_bytes
    if start + offset + num_bytes > size:
        raise ModelError(
            field, f"{max(size - start - offset, 0)} bytes", f"{num_bytes} bytes; the file is cut or damaged"
        )
    return TensorInfo(name, tuple(shape), kind, start + offset, num_bytes)
