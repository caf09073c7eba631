"""Token sequences on disk: one safetensors file per generation batch, written atomically.

    <folder>/<part>-<nnnnn>.safetensors    tokens int32 [N], offsets int64 [B + 1], prompt_lens int32 [B]

A sequence is a prompt and the model's own continuation, or a piece of a document, whose prompt is its first token. A
reader holds the place of every sequence in memory and reads tokens from the file when they are needed. It does not map
files into memory: if a mapped file becomes shorter, the process gets a bus error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import LongTensor

from tide_core.calibration.ledger import ShardEntry
from tide_core.disk import write_whole
from tide_core.errors import ConfigError

__all__ = [
    "PARTS",
    "SequenceBatch",
    "ShardEntry",
    "TokenSequence",
    "TokenShards",
    "remove_others",
    "shard_name",
    "write_shard",
    "write_whole",
]

PARTS = ("train", "calibration", "test", "given")
"""`given`: prompts written by people, held out if the model wrote most of the others; else empty."""
SUFFIX = ".safetensors"
BUCKET_BATCHES = 32
"""Sequences of about this many batches are sorted by length together."""
MAX_OPEN = 64
"""Maximum number of shards that one reader keeps open."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Prompt and continuation as one array of ids."""

    tokens: NDArray[np.int32]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """A padded batch of sequences on the CPU."""

    tokens: LongTensor
    """[B, S], right-padded with 0."""
    lengths: LongTensor
    """[B]"""
    prompt_lens: LongTensor
    """[B], at least 1 and at most the length."""
    indices: LongTensor
    """[B] numbers of the sequences in their part."""


def shard_name(part: str, index: int) -> str:
    return f"{part}-{index:05d}{SUFFIX}"


def write_shard(folder: Path, part: str, index: int, sequences: Sequence[TokenSequence]) -> ShardEntry:
    """Write one shard atomically."""
    lengths = [len(sequence.tokens) for sequence in sequences]
    arrays = {
        "tokens": np.concatenate([np.zeros(0, np.int32), *(sequence.tokens for sequence in sequences)]).astype("<i4"),
        "offsets": np.cumsum([0, *lengths], dtype="<i8"),
        "prompt_lens": np.array([sequence.prompt_len for sequence in sequences], dtype="<i4"),
    }
    raw = save(arrays)
    name = shard_name(part, index)
    write_whole(folder / name, raw)
    return ShardEntry(name, hashlib.sha256(raw).hexdigest(), len(lengths), sum(lengths))


def remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove the shards in `folder` that are not in `names`, and the temporary files of killed writers."""
    for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob(".*.tmp")):
        if path.name not in names:
            path.unlink(missing_ok=True)


class TokenShards:
    """All sequences of one part, in file order."""

    def __init__(self, folder: Path, part: str, *, expected: Mapping[str, str] | None = None) -> None:
        """`expected` maps the names of all shards of the part to their SHA-256; without it nothing is checked."""
        if part not in PARTS:
            raise ConfigError("part", part, f"one of {', '.join(PARTS)}")
        names = sorted(path.name for path in folder.glob(f"{part}-*{SUFFIX}"))
        if expected is not None and names != sorted(expected):
            raise ConfigError(f"{part} shards in {folder}", names, f"exactly {', '.join(sorted(expected)) or 'none'}")
        places, prompt_lens, whole = [np.zeros((0, 3), np.int64)], [np.zeros(0, np.int32)], hashlib.sha256()
        self._files = _Files()
        for number, name in enumerate(names):
            raw, digest = self._files.add(folder / name, None if expected is None else expected[name])
            arrays, start = _parse(folder / name, raw)
            lengths = np.diff(arrays["offsets"])
            starts = start + 4 * arrays["offsets"][:-1]
            places.append(np.stack([np.full_like(lengths, number), starts, lengths], axis=1))
            prompt_lens.append(arrays["prompt_lens"])
            whole.update(f"{name} {digest}\n".encode())
        self.part = part
        self.digest = whole.hexdigest()
        self._places = np.concatenate(places)
        """[B, 3]: for each sequence the number of its file, its first byte there, and its number of tokens."""
        self._lengths = self._places[:, 2]
        self._prompt_lens = np.concatenate(prompt_lens)

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return int(self._lengths.sum())

    def sequence(self, index: int) -> TokenSequence:
        return TokenSequence(self._files.tokens(*self._places[index].tolist()), int(self._prompt_lens[index]))

    def batches(self, batch_tokens: int, *, seed: int | None, epoch: int = 0) -> Iterator[SequenceBatch]:
        """Batches of at most `batch_tokens`, padding included; a longer sequence is a batch of its own.

        With a seed: shuffled for every epoch, with sequences of similar length together. Without: in file order."""
        for indices in self._plan(batch_tokens, seed, epoch):
            yield self._gather(indices)

    def num_batches(self, batch_tokens: int, *, seed: int | None, epoch: int = 0) -> int:
        return len(self._plan(batch_tokens, seed, epoch))

    def _plan(self, batch_tokens: int, seed: int | None, epoch: int) -> list[NDArray[np.int64]]:
        order = np.arange(self.num_sequences)
        if seed is None:
            return self._cut(order, batch_tokens)
        random = np.random.default_rng((seed, epoch))
        random.shuffle(order)
        mean = max(1.0, self.num_tokens / max(1, self.num_sequences))
        bucket = max(1, int(BUCKET_BATCHES * batch_tokens / mean))
        batches = []
        for start in range(0, len(order), bucket):
            near = order[start : start + bucket]
            batches += self._cut(near[np.argsort(self._lengths[near], kind="stable")], batch_tokens)
        return [batches[i] for i in random.permutation(len(batches))]

    def _cut(self, order: NDArray[np.int64], batch_tokens: int) -> list[NDArray[np.int64]]:
        """Group neighbours in `order` while their padded batch fits."""
        batches, start, longest = [], 0, 0
        for end, length in enumerate(self._lengths[order].tolist()):
            if end > start and max(longest, length) * (end - start + 1) > batch_tokens:
                batches.append(order[start:end])
                start, longest = end, 0
            longest = max(longest, length)
        return [*batches, order[start:]] if start < len(order) else batches

    def _gather(self, indices: NDArray[np.int64]) -> SequenceBatch:
        lengths = self._lengths[indices]
        tokens = np.zeros((len(indices), int(lengths.max())), np.int64)
        for row in np.argsort(indices):  # in file order
            tokens[row, : lengths[row]] = self._files.tokens(*self._places[indices[row]].tolist())
        return SequenceBatch(_long(tokens), _long(lengths), _long(self._prompt_lens[indices]), _long(indices))


def _long(values: NDArray[np.int64] | NDArray[np.int32]) -> LongTensor:
    return torch.from_numpy(values.astype(np.int64))  # type: ignore[return-value]


class _Files:
    """Files that were read once in full and must not change afterwards. The most recently used ones are open."""

    def __init__(self) -> None:
        self._known: list[_Known] = []
        self._open: dict[int, BinaryIO] = {}  # most recently used last

    def __del__(self) -> None:
        for file in self._open.values():
            file.close()

    def add(self, path: Path, expected: str | None) -> tuple[bytes, str]:
        """Add the file of the next number; returns its bytes and their SHA-256."""
        try:
            with path.open("rb") as file:
                raw, stamp = file.read(), _stamp(file)
        except OSError as error:
            raise _unreadable(path, error) from error
        digest = hashlib.sha256(raw).hexdigest()
        _check_digest(path, digest, digest if expected is None else expected)
        self._known.append(_Known(path, digest, stamp))
        return raw, digest

    def tokens(self, number: int, start: int, length: int) -> NDArray[np.int32]:
        """`length` tokens of a file from byte `start` on."""
        path = self._known[number].path
        try:
            raw = os.pread(self._opened(number).fileno(), 4 * length, start)
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(raw) < 4 * length:
            raise ConfigError(f"shard {path}", "fewer bytes than before", "a file that stays as it is while it is read")
        return np.frombuffer(raw, "<i4")

    def _opened(self, number: int) -> BinaryIO:
        file = self._open.pop(number, None) or self._open_again(self._known[number])
        if len(self._open) == MAX_OPEN:
            self._open.pop(next(iter(self._open))).close()
        self._open[number] = file
        return file

    def _open_again(self, known: _Known) -> BinaryIO:
        file = known.path.open("rb", buffering=0)
        try:
            if _stamp(file) != known.stamp:  # rewritten: the content may be the same, from a late worker
                _check_digest(known.path, hashlib.file_digest(file, "sha256").hexdigest(), known.digest)
        except BaseException:
            file.close()
            raise
        return file


@dataclass(frozen=True, slots=True)
class _Known:
    path: Path
    digest: str
    stamp: tuple[int, ...]


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    """Changes when a file is written or replaced."""
    stat = os.fstat(file.fileno())
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _check_digest(path: Path, digest: str, expected: str) -> None:
    if digest != expected:
        raise ConfigError(f"shard {path}", digest, f"SHA-256 {expected}")


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"shard {path}", error.strerror or str(error), "a readable file")


def _parse(path: Path, raw: bytes) -> tuple[dict[str, NDArray[Any]], int]:
    """The arrays, and the byte at which the tokens begin."""
    try:
        arrays = load(raw)
    except SafetensorError as error:
        raise ConfigError(f"shard {path}", str(error), "a whole safetensors file") from error
    kinds = {name: array.dtype.str for name, array in arrays.items() if array.ndim == 1}
    if kinds != {"tokens": "<i4", "offsets": "<i8", "prompt_lens": "<i4"}:
        raise ConfigError(f"shard {path}", kinds, "tokens int32, offsets int64 and prompt_lens int32, each flat")
    tokens, offsets, prompt_lens = arrays["tokens"], arrays["offsets"], arrays["prompt_lens"]
    lengths = np.diff(offsets)
    whole = len(offsets) == len(prompt_lens) + 1 and offsets[0] == 0 and offsets[-1] == len(tokens)
    if not whole or not ((prompt_lens >= 1) & (prompt_lens <= lengths)).all() or (tokens < 0).any():
        raise ConfigError(f"shard {path}", "offsets or prompt_lens that do not fit", "sequences that fill the file")
    header_end = 8 + int.from_bytes(raw[:8], "little")
    return arrays, header_end + json.loads(raw[8:header_end])["tokens"]["data_offsets"][0]
