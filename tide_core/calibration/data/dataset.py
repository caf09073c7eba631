"""The records of a calibration, and the part of each.

    self                        the shipped prompts, and thousands that the model writes
    a file or folder            see records.py
    name[/config][:split[:column]]   anything that the `datasets` library loads

The parts never overlap: equal records are one record, and the hash of a record determines its part, whatever else is in
the data. Prompts that the model writes have no near-duplicates; other sources are used as they are. A source that
cannot be read stops the run; nothing replaces it.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tide_core.calibration.collect.shards import PARTS
from tide_core.calibration.config import SELF_DATA, CalibrationConfig
from tide_core.calibration.data.records import SUFFIXES, Record, as_record, local_files, read_records
from tide_core.calibration.ledger import digest_of
from tide_core.errors import ConfigError, one_line

SHIPPED = Path(__file__).with_name("prompts.jsonl")
OPENINGS = Path(__file__).with_name("openings.txt")
"""Beginnings of prompts that the model continues."""
MAX_BAD_SHARE = 0.01
TEXT_CHARS_PER_TOKEN = 32
"""Documents are cut to this many characters per token of a piece: memory is bounded, and no document dominates."""

_DATASET = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+){0,2})(:(?P<split>[\w\[\]:%.+-]*?))?(:(?P<column>\w+))?")
GIVEN_AMONG = 4
"""Prompts written by people are a part of their own if there are at least this many times as many prompts in all."""


class RecordPool:
    """Distinct records, at most `size` of them: those with the smallest hashes, independent of their order."""

    def __init__(self, size: int, seed: int, max_chars: int) -> None:
        self._size, self._seed, self._max_chars = size, seed, max_chars
        self._heap: list[tuple[int, str]] = []
        self._kept: set[str] = set()
        self.num_seen = self.num_bad = 0
        self.num_near = 0
        """Near-duplicates among the model's prompts, which were dropped."""

    def add(self, records: Iterable[Record | None]) -> None:
        for record in records:
            self.num_seen += 1
            if record is None:
                self.num_bad += 1
                continue
            if record.kind == "text":
                record = Record("text", str(record.content)[: self._max_chars])
            self.add_line(record.line)

    def add_line(self, line: str) -> bool:
        """Whether the line was new and is in the pool."""
        if line in self._kept:
            return False
        entry = (-hash_of(self._seed, "choose", line), line)
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        else:
            _, dropped = heapq.heappushpop(self._heap, entry)
            if dropped == line:
                return False
            self._kept.remove(dropped)
        self._kept.add(line)
        return True

    def __len__(self) -> int:
        return len(self._heap)

    def lines(self) -> list[str]:
        return sorted(self._kept)

    def check(self, data: str) -> None:
        if self.num_bad > MAX_BAD_SHARE * self.num_seen:
            expected = f"records that can be used; {self.num_bad} of {self.num_seen} cannot, and 1 % may"
            raise ConfigError("data", data, expected)


def gather(config: CalibrationConfig) -> RecordPool:
    """All records of the source, without prompts that the model writes."""
    pool = RecordPool(config.num_samples, config.seed, config.text_tokens * TEXT_CHARS_PER_TOKEN)
    data = config.data
    if data == SELF_DATA:
        pool.add(read_records(SHIPPED))
    elif (path := _local(data)) is not None:
        for file in local_files(path):
            pool.add(read_records(file))
    else:
        pool.add(_rows(data, config))
    pool.check(data)
    return pool


def source_of(config: CalibrationConfig) -> dict[str, str]:
    """SHA-256 of every file that is read, by name; empty for a data set that the `datasets` library loads."""
    if config.data == SELF_DATA:
        return {file.name: _digest(file) for file in (SHIPPED, OPENINGS)}
    path = _local(config.data)
    if path is None:
        return {}
    return {str(file.relative_to(path) if file != path else file.name): _digest(file) for file in local_files(path)}


def split(lines: Iterable[str], config: CalibrationConfig, given: Collection[str] = ()) -> dict[str, list[str]]:
    """Lines by part, each part in the order of its hashes.

    If `given` are few among the lines, they are a part of their own and in no other part: what is stated of
    prompts of the model is then measured on prompts written by people as well."""
    every = set(lines)
    given = every.intersection(given)
    if len(every) < GIVEN_AMONG * len(given):
        given = set()
    ranked = sorted((hash_of(config.seed, "split", line), line) for line in every - given)
    if len(ranked) < 3:
        raise ConfigError("data", config.data, f"at least 3 different records, one for each part; got {len(ranked)}")
    shares = [rank / 2**64 for rank, _ in ranked]
    num_test = max(sum(u < config.test_share for u in shares), min(config.min_test, len(ranked) // 4), 1)
    held_out = config.test_share + config.calibration_share
    least = num_test + max(min(config.min_calibration, len(ranked) // 3), 1)
    num_held_out = min(max(sum(u < held_out for u in shares), least), len(ranked) - 1)
    ordered = [line for _, line in ranked]
    own = sorted(given, key=lambda line: hash_of(config.seed, "split", line))
    parts = (ordered[num_held_out:], ordered[num_test:num_held_out], ordered[:num_test], own)
    return dict(zip(PARTS, parts, strict=True))


def hash_of(seed: int, purpose: str, line: str) -> int:
    """64-bit hash of a line, for one purpose of one run."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{purpose}\0{line}".encode()).digest()[:8], "big")


def kind_of(data: str) -> str:
    """How an artefact describes its data: without paths of the machine."""
    return data if data == SELF_DATA or _local(data) is None else "local files"


def _local(data: str) -> Path | None:
    """The path in `data`, or None for the name of a data set."""
    path = Path(data).expanduser()
    try:
        if path.exists():
            return path
    except OSError:  # a name too long for a file
        pass
    if data.startswith(("/", ".", "~")) or path.suffix.lower() in SUFFIXES:
        raise ConfigError("data", data, "an existing file or folder; nothing was found at this path")
    return None


def _digest(file: Path) -> str:
    digest = digest_of(file)
    if digest is None:
        raise ConfigError(f"data {file}", "nothing that can be read", "a readable file")
    return digest


def _rows(data: str, config: CalibrationConfig) -> Iterator[Record | None]:
    match = _DATASET.fullmatch(data)
    if match is None:
        raise ConfigError("data", data, "self, an existing file or folder, or a datasets name/config:split:column")
    split_name, column = match["split"] or "train", match["column"]
    rows = _load(data, match["name"].split("/"), split_name)
    names = list(rows.column_names)
    if column is not None and column not in names:
        raise ConfigError("data", data, f"one of the columns {', '.join(names)}")
    if column is None and not {"messages", "prompt", "text"} & set(names):
        raise ConfigError("data", data, f"the name of a column, as in name:{split_name}:column: {', '.join(names)}")
    # Twice as many as needed allow for unusable and equal records, without reading a large set to its end.
    rows = rows.shuffle(seed=config.seed % 2**32).select(range(min(len(rows), 2 * config.num_samples)))
    for row in rows:
        yield as_record(row, column)


def _load(data: str, parts: list[str], split_name: str) -> Any:
    """`a/b/c` is set a/b, configuration c. `a/b` is set a/b, or if that does not exist, set a, configuration b."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("data", data, "an existing file, or the package datasets to load a name with") from error
    readings: dict[int, list[tuple[str, str | None]]] = {1: [(parts[0], None)], 3: [("/".join(parts[:2]), parts[-1])]}
    tried = []
    for name, configuration in readings.get(len(parts), [("/".join(parts), None), (parts[0], parts[-1])]):
        try:
            return datasets.load_dataset(name, configuration, split=split_name)
        except Exception as error:  # the library raises anything from ValueError to its own connection errors
            tried.append(f"{name}{f' ({configuration})' if configuration else ''}: {one_line(error)}")
    raise ConfigError("data", data, f"a data set that can be loaded; {'; '.join(tried)}")
