"""The dataset made into token sequences: the model answers prompts and continues beginnings, and texts are cut up.

The work is a list of units, the same for the same settings. Each unit becomes one shard, so a killed run goes on with
the first unit that has no shard. The calibration and test parts are always greedy, because the bound that is
calibrated on them is about greedy decoding. They hold no plain text either: documents there are beginnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.collect.sampling import GREEDY, Sampling
from tide_core.calibration.collect.shards import PARTS, TokenSequence, shard_name
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.dataset import hash_of
from tide_core.calibration.data.encode import PromptEncoder
from tide_core.calibration.data.lengths import Lengths
from tide_core.calibration.data.records import Record

MIN_TEXT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Unit:
    """What becomes one shard: records to continue in one way, or, without a way, texts to cut up."""

    part: str
    index: int
    sampling: Sampling | None
    records: Sequence[Record]

    @property
    def path(self) -> str:
        """Of its shard in the run."""
        return f"shards/{shard_name(self.part, self.index)}"


def plan(config: CalibrationConfig, parts: Mapping[str, Sequence[str]], unit_size: int) -> list[Unit]:
    """All units in order. Records of like length share one, so that little is padded."""
    units: list[Unit] = []
    sampled = Sampling(config.temperature, config.top_p)
    for part in PARTS:
        by_way: dict[Sampling | None, list[str]] = {GREEDY: [], sampled: [], None: []}
        for line in parts[part]:
            by_way[_way(config, part, line, sampled)].append(line)
        index = 0
        for way, lines in by_way.items():
            lines.sort(key=lambda line: (len(line.encode()), line))
            for start in range(0, len(lines), unit_size):
                records = [Record.of_line(line) for line in lines[start : start + unit_size]]
                units.append(Unit(part, index, way, records))
                index += 1
    return units


def _way(config: CalibrationConfig, part: str, line: str, sampled: Sampling) -> Sampling | None:
    """How the model continues a record, None for a text taken as it is. The record's own hash decides."""
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
    """What a unit becomes: the same ones wherever and whenever it is done."""
    if unit.sampling is None:
        return list(_pieces(encoder.texts([str(record.content) for record in unit.records]), lengths.text))
    # The beginning of a text is at most its first half. A record that has no token is left out.
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
    """Texts cut into pieces of at most `size` ids; the first id of a piece stands for its prompt."""
    for ids in texts:
        for start in range(0, len(ids), size):
            piece = np.array(ids[start : start + size], np.int32)
            if len(piece) >= MIN_TEXT_TOKENS:
                yield TokenSequence(piece, 1)
