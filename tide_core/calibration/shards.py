"""Token sequences on disk: one safetensors file per generation batch, written whole or not at all.

    <folder>/<part>-<nnnnn>.safetensors    tokens int32 [N], offsets int64 [B + 1], prompt_lens int32 [B]

A sequence is a prompt and the model's own continuation, or a piece of text, whose prompt is its first token. A reader
keeps its part in memory: four bytes a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import LongTensor

from tide_core.calibration.shard_entry import ShardEntry
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
"""`given`: prompts that people wrote, held out where most of the others are made up by the model; else empty."""
SUFFIX = ".safetensors"
BUCKET_BATCHES = 32
"""Sequences of about this many batches are sorted by length together."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Prompt and continuation as one run of ids."""

    tokens: NDArray[np.int32]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Sequences beside one another, on the CPU."""

    tokens: LongTensor
    """[B, S], right-padded with 0."""
    lengths: LongTensor
    """[B]"""
    prompt_lens: LongTensor
    """[B], at least 1 and at most the length."""


def shard_name(part: str, index: int) -> str:
    return f"{part}-{index:05d}{SUFFIX}"


def write_shard(folder: Path, part: str, index: int, sequences: Sequence[TokenSequence]) -> ShardEntry:
    """Write one shard under a temporary name, then rename it: after a kill it is there whole or not at all."""
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
    """Remove the shards in `folder` that are not among `names`: those of records that are no longer there."""
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name not in names:
            path.unlink()


class TokenShards:
    """All sequences of one part, in file order."""

    def __init__(self, folder: Path, part: str, *, expected: Mapping[str, str] | None = None) -> None:
        """`expected` maps the names of all shards of the part to their SHA-256; without it files are as found."""
        if part not in PARTS:
            raise ConfigError("part", part, f"one of {', '.join(PARTS)}")
        names = sorted(path.name for path in folder.glob(f"{part}-*{SUFFIX}"))
        if expected is not None and names != sorted(expected):
            raise ConfigError(f"{part} shards in {folder}", names, f"exactly {', '.join(sorted(expected)) or 'none'}")
        tokens, lengths, prompt_lens, whole = [], [], [], hashlib.sha256()
        for name in names:
            raw = _read(folder / name)
            digest = hashlib.sha256(raw).hexdigest()
            if expected is not None and digest != expected[name]:
                raise ConfigError(f"shard {folder / name}", digest, f"SHA-256 {expected[name]}")
            arrays = _parse(folder / name, raw)
            tokens.append(arrays["tokens"])
            lengths.append(np.diff(arrays["offsets"]))
            prompt_lens.append(arrays["prompt_lens"])
            whole.update(f"{name} {digest}\n".encode())
        self.part = part
        self.digest = whole.hexdigest()
        self._tokens = np.concatenate([np.zeros(0, np.int32), *tokens])
        self._lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths)])
        self._prompt_lens = np.concatenate([np.zeros(0, np.int32), *prompt_lens])

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def sequence(self, index: int) -> TokenSequence:
        return TokenSequence(self._tokens[self._starts[index] : self._starts[index + 1]], int(self._prompt_lens[index]))

    def batches(self, batch_tokens: int, *, seed: int | None, epoch: int = 0) -> Iterator[SequenceBatch]:
        """Batches of at most `batch_tokens`, padding included; a sequence longer than that is a batch of its own.

        With a seed: shuffled anew for every epoch, sequences of like length together. Without: in file order."""
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
        """Neighbours in `order` together while their rectangle fits."""
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
        for row, index in enumerate(indices):
            tokens[row, : lengths[row]] = self._tokens[self._starts[index] : self._starts[index + 1]]
        return SequenceBatch(_long(tokens), _long(lengths), _long(self._prompt_lens[indices]))


def _long(values: NDArray[np.int64] | NDArray[np.int32]) -> LongTensor:
    return torch.from_numpy(values.astype(np.int64))  # type: ignore[return-value]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"shard {path}", error.strerror or str(error), "a readable file") from error


def _parse(path: Path, raw: bytes) -> dict[str, NDArray[np.generic]]:
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
    return arrays
