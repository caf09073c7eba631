"""From records to token sequences, and from these to the shortlist.

The model answers prompts and continues the beginnings of documents; some documents of the train part are used as they
are, cut into pieces. `plan` lists the units of this work, the same for the same settings. Each unit becomes one shard,
so a killed run resumes with the units that have no shard. The held-out parts are always decoded greedily, because the
stated figures are about greedy decoding, and they never contain documents as they are.

The shortlist holds the tokens that an exit head can emit: those that the model itself emits most often.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tide_core.calibration.collect.decoder import GREEDY, Sampling
from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.collect.shards import PARTS, TokenSequence, TokenShards, shard_name
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.dataset import hash_of
from tide_core.calibration.data.encode import Lengths, PromptEncoder
from tide_core.calibration.data.records import Record
from tide_core.errors import ConfigError

MIN_TEXT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """The records of one shard, continued with one sampling setting; None: documents, cut into pieces."""

    part: str
    index: int
    sampling: Sampling | None
    records: Sequence[Record]

    @property
    def path(self) -> str:
        """Path of its shard in the run."""
        return f"shards/{shard_name(self.part, self.index)}"


def plan(config: CalibrationConfig, parts: Mapping[str, Sequence[str]], unit_size: int) -> list[Unit]:
    """All units in order. Records of similar length share a unit, so that there is little padding."""
    units: list[Unit] = []
    sampled = Sampling(config.temperature, config.top_p)
    for part in PARTS:
        by_sampling: dict[Sampling | None, list[str]] = {GREEDY: [], sampled: [], None: []}
        for line in parts[part]:
            by_sampling[_sampling_of(config, part, line, sampled)].append(line)
        index = 0
        for sampling, lines in by_sampling.items():
            lines.sort(key=lambda line: (len(line.encode()), line))
            for start in range(0, len(lines), unit_size):
                records = [Record.of_line(line) for line in lines[start : start + unit_size]]
                units.append(Unit(part, index, sampling, records))
                index += 1
    return units


def _sampling_of(config: CalibrationConfig, part: str, line: str, sampled: Sampling) -> Sampling | None:
    """The sampling setting of a record, by its hash; None for a document that is used as it is."""
    if part != "train":
        return GREEDY
    if Record.of_line(line).kind == "text" and hash_of(config.seed, "text", line) < config.text_share * 2**64:
        return None
    return GREEDY if hash_of(config.seed, "greedy", line) < config.greedy_share * 2**64 else sampled


def sequences_of(
    unit: Unit,
    config: CalibrationConfig,
    encoder: PromptEncoder,
    generator: Generator,
    lengths: Lengths,
    eos_ids: tuple[int, ...],
) -> list[TokenSequence]:
    """The sequences of a unit: the same on every worker."""
    if unit.sampling is None:
        return list(_pieces(encoder.texts([str(record.content) for record in unit.records]), lengths.text))
    # The prompt of a document is at most its first half. A record without a token is left out.
    prompts = [
        ids if record.kind != "text" else ids[: max(1, len(ids) // 2)]
        for ids, record in zip(encoder.prompts(unit.records), unit.records, strict=True)
        if ids
    ]
    seed = hash_of(config.seed, "collect", shard_name(unit.part, unit.index)) >> 1
    answers = generator.run(prompts, unit.sampling, max_new=lengths.new, stop_ids=eos_ids, seed=seed)
    return [
        TokenSequence(np.concatenate([np.array(prompt, np.int32), answer]), len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _pieces(texts: Sequence[list[int]], size: int) -> Iterator[TokenSequence]:
    """Documents cut into pieces of at most `size` ids; the first id of a piece is its prompt."""
    for ids in texts:
        for start in range(0, len(ids), size):
            piece = np.array(ids[start : start + size], np.int32)
            if len(piece) >= MIN_TEXT_TOKENS:
                yield TokenSequence(piece, 1)


def count_emitted(shards: TokenShards, vocab_size: int) -> NDArray[np.int64]:
    """How often the model emitted each token, [V]. Pieces of documents, with one prompt token, count only if there is
    nothing else."""
    counts = np.zeros(vocab_size, np.int64)
    texts = np.zeros(vocab_size, np.int64)
    for index in range(shards.num_sequences):
        sequence = shards.sequence(index)
        new = sequence.tokens[sequence.prompt_len :]
        if new.size and int(new.max()) >= vocab_size:
            raise ConfigError(f"token of the {shards.part} part", int(new.max()), f"an id below {vocab_size}")
        np.add.at(texts if sequence.prompt_len == 1 else counts, new, 1)
    return counts if counts.any() else texts


def choose_shortlist(counts: NDArray[np.int64], *, size: int | None, coverage: float, eos_ids: Iterable[int]) -> Tensor:
    """Sorted ids [S], S below the vocabulary size: the `size` most frequent, or as many as reach the `coverage`.

    A size of at least the vocabulary is replaced by the coverage. If too few ids were emitted, the lowest other ids
    fill the list: in BPE vocabularies these are the most frequent."""
    vocab_size = len(counts)
    order = np.lexsort((np.arange(vocab_size), -counts))
    if size is None or size >= vocab_size:
        shares = np.cumsum(counts[order]) / max(1, counts.sum())
        size = int(np.searchsorted(shares, coverage - 1e-12)) + 1
    size = min(max(size, 2), vocab_size - 1)
    always = np.array(sorted(set(eos_ids)), np.int64)
    if len(always) > size or vocab_size < 3:
        raise ConfigError("shortlist_size", size, f"at least {len(always)} end-of-text ids, below the vocabulary")
    others = order[~np.isin(order, always)]
    return torch.from_numpy(np.sort(np.concatenate([always, others[: size - len(always)]])))


def coverage_of(ids: Tensor, counts: NDArray[np.int64]) -> float:
    """Share of the counted tokens that the shortlist contains; 0 if nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids.numpy()].sum()) / total if total else 0.0
