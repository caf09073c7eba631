"""Text of the target, as a calibration makes it: sequences to train on, and answers to two kinds of held-out prompts.

    <folder>/train-*   prompts that the model wrote, and its answers
    <folder>/test-*    the same, held out
    <folder>/given-*   prompts that people wrote (those of the benchmarks), and the model's answers
    <folder>/text.safetensors   the shortlist, written last: if it is there, all shards are complete

All answers are greedy, because the study counts drafts of greedy requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from benchmarks.common.bars import Log
from benchmarks.common.prompts import PROMPT_FILE, read_texts
from tide_core.calibration.collect.collect import Unit, choose_shortlist, count_emitted, plan, sequences_of
from tide_core.calibration.collect.decoder import GREEDY
from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.collect.shards import TokenSequence, TokenShards, write_shard
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.dataset import gather, split
from tide_core.calibration.data.encode import Lengths, PromptEncoder
from tide_core.calibration.data.records import Record
from tide_core.calibration.data.self_prompts import PromptBatch, WrittenPrompt, add_self_prompts, write_prompts
from tide_core.calibration.progress import SilentProgress
from tide_core.disk import write_whole
from tide_core.models.adapter import ModelAdapter

DONE = "text.safetensors"
HELD_OUT = {"own": "test", "people": "given"}
"""Kinds of held-out prompts and their parts."""


@dataclass(frozen=True, slots=True)
class Text:
    """Sequences by part, and the shortlist."""

    train: list[TokenSequence]
    held_out: dict[str, list[TokenSequence]]
    shortlist: Tensor


def make_text(
    folder: Path, config: CalibrationConfig, adapter: ModelAdapter, tokenizer: Any, people: int, log: Log
) -> Text:
    """The text in `folder`, which is made if it is not there; with at most `people` prompts that people wrote."""
    if not (folder / DONE).exists():
        began = time.perf_counter()
        _make(folder, config, adapter, tokenizer, people)
        log(f"text: made in {time.perf_counter() - began:.1f} s")
    shortlist = load((folder / DONE).read_bytes())["shortlist"]
    parts = {part: _read(folder, part) for part in ("train", *HELD_OUT.values())}
    log("text: " + ", ".join(f"{len(them)} sequences of {part}" for part, them in parts.items()))
    return Text(parts["train"], {kind: parts[part] for kind, part in HELD_OUT.items()}, shortlist)


def _make(folder: Path, config: CalibrationConfig, adapter: ModelAdapter, tokenizer: Any, people: int) -> None:
    eos_ids = adapter.eos_ids
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(eos_ids), 0)
    generator = Generator(adapter, pad_id=pad_id, batch=config.generation_batch)
    lengths = Lengths.of(config, adapter.max_positions)
    encoder = PromptEncoder(tokenizer, lengths.prompt)

    def write(batches: Sequence[PromptBatch]) -> Iterator[list[WrittenPrompt]]:
        return (write_prompts(batch, config, tokenizer, generator, eos_ids) for batch in batches)

    pool = gather(config)
    given = pool.lines()
    add_self_prompts(pool, config, write, generator.batch, SilentProgress())
    parts = split(pool.lines(), config, given)
    units = [unit for unit in plan(config, parts, generator.batch) if unit.part in ("train", "test")]
    texts = [text for _, text in read_texts(PROMPT_FILE)]
    chosen = [texts[index * len(texts) // people] for index in range(min(people, len(texts)))]
    units.append(Unit("given", 0, GREEDY, [Record("prompt", text) for text in chosen]))
    folder.mkdir(parents=True, exist_ok=True)
    for unit in units:
        sequences = sequences_of(unit, config, encoder, generator, lengths, eos_ids)
        write_shard(folder, unit.part, unit.index, sequences)
    generator.release()
    counts = count_emitted(TokenShards(folder, "train"), adapter.vocab_size)
    ids = choose_shortlist(counts, size=config.shortlist_size, coverage=config.shortlist_coverage, eos_ids=eos_ids)
    write_whole(folder / DONE, save({"shortlist": ids}))


def _read(folder: Path, part: str) -> list[TokenSequence]:
    shards = TokenShards(folder, part)
    return [shards.sequence(index) for index in range(shards.num_sequences)]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences padded to one of a few shapes, on the CPU; rows without a sequence have length 0."""

    tokens: Tensor
    """[B, S], right-padded with 0."""
    lengths: Tensor
    prompt_lens: Tensor
    """[B]"""


@dataclass
class Batches:
    """Batches of sequences of similar length, in an order that seed and epoch determine. The number of rows depends on
    the padded length alone, so that few shapes occur and few CUDA graphs are captured."""

    sequences: Sequence[TokenSequence]
    batch_tokens: int
    seed: int
    length_step: int = 128
    _groups: dict[int, list[int]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._groups = {}
        for index, sequence in enumerate(self.sequences):
            self._groups.setdefault(_up(len(sequence.tokens), self.length_step), []).append(index)

    def epochs(self) -> Iterator[Batch]:
        """Batches of one epoch after another, without end."""
        epoch = 0
        while True:
            random = np.random.default_rng((self.seed, epoch))
            batches = [
                (length, chunk)
                for length, indices in sorted(self._groups.items())
                for chunk in self._chunks(random.permutation(indices), length)
            ]
            for place in random.permutation(len(batches)):
                length, chunk = batches[place]
                yield self.gather([self.sequences[index] for index in chunk], length, self.rows(length))
            epoch += 1

    def in_order(self) -> Iterator[tuple[list[int], Batch]]:
        """Every sequence once, with its index; batches have no empty rows."""
        for length, indices in sorted(self._groups.items()):
            for chunk in self._chunks(np.array(indices), length):
                some = [int(index) for index in chunk]
                yield some, self.gather([self.sequences[index] for index in some], length, len(some))

    def rows(self, length: int) -> int:
        return max(1, self.batch_tokens // length)

    def _chunks(self, indices: Iterable[Any], length: int) -> Iterator[Any]:
        indices = np.asarray(indices)
        for start in range(0, len(indices), self.rows(length)):
            yield indices[start : start + self.rows(length)]

    @staticmethod
    def gather(sequences: Sequence[TokenSequence], length: int, rows: int) -> Batch:
        tokens = np.zeros((rows, length), np.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence.tokens)] = sequence.tokens
        empty = [0] * (rows - len(sequences))
        lengths = torch.tensor([*(len(sequence.tokens) for sequence in sequences), *empty])
        prompts = torch.tensor([*(sequence.prompt_len for sequence in sequences), *empty])
        return Batch(torch.from_numpy(tokens), lengths, prompts)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
