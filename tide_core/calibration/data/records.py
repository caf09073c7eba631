"""Records of local files: prompts, chats and documents, one at a time. Unusable records are counted, not replaced.

    .txt      documents between blank lines; a file without a blank line has one on every line
    .jsonl    one object per line: {"messages": [...]} or {"prompt": ...} for the model to answer, or {"text": ...}
    .parquet  the same by column
    folder    all such files in it, by name

A bad record is one that is not UTF-8, not of this form, empty, nothing but NULs, or longer than 1 MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_core.errors import ConfigError

MAX_RECORD_BYTES = 2**20
FIELDS = ("messages", "prompt", "text")
SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Record:
    """`kind` is one of FIELDS; `content` a text, or for messages a list of role and content, the user's last."""

    kind: str
    content: str | list[dict[str, str]]

    @property
    def line(self) -> str:
        """As canonical JSON; equal records have equal lines."""
        return json.dumps({self.kind: self.content}, ensure_ascii=False, sort_keys=True)

    @classmethod
    def of_line(cls, line: str) -> Record:
        [(kind, content)] = json.loads(line).items()
        return cls(kind, content)


def local_files(path: Path) -> list[Path]:
    """The file itself, or all files of a folder with a known suffix."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise ConfigError("data", path, f"a folder with {', '.join(SUFFIXES)} files in it")
        return files
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError("data", path, f"a file of a known kind: {', '.join(SUFFIXES)}")
    return [path]


def read_records(path: Path) -> Iterator[Record | None]:
    """All records of a file, None for each bad one."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            yield from _parquet(path)
        elif suffix == ".jsonl":
            yield from (_of_json(line) for line in _lines(path) if line.strip())
        else:
            yield from (_of_text(raw) for raw in _documents(path))
    except OSError as error:
        raise ConfigError(f"data {path}", error.strerror or str(error), "a readable file") from error


def as_record(values: Mapping[str, Any], column: str | None = None) -> Record | None:
    """The record in the fields of an object or the columns of a row; None for a bad one."""
    kind = next((field for field in FIELDS if field in values), None) if column is None else kind_of_column(column)
    if kind is None:
        return None
    value = values.get(column or kind)
    if isinstance(value, list):
        messages = _messages(value)
        return None if messages is None else Record("messages", messages)
    return Record(kind, value) if kind != "messages" and isinstance(value, str) and _usable(value) else None


def kind_of_column(column: str) -> str:
    """The kind of a column that the user named: a prompt for the usual names of prompts, else a document."""
    usual = {"prompt": "prompt", "question": "prompt", "instruction": "prompt", "messages": "messages"}
    return usual.get(column, "text")


def _messages(values: list[Any]) -> list[dict[str, str]] | None:
    """Role and content of each message, up to the last one of the user."""
    messages = []
    for value in values:
        if not isinstance(value, dict) or not _usable(value.get("content")) or not _usable(value.get("role")):
            return None
        messages.append({"role": value["role"], "content": value["content"]})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages or None


def _usable(value: object) -> bool:
    if not isinstance(value, str) or len(value) > MAX_RECORD_BYTES or not value.strip("\0 \t\r\n\f\v"):
        return False
    try:
        return len(value.encode()) <= MAX_RECORD_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
        return False


def _of_json(line: bytes) -> Record | None:
    if len(line) > MAX_RECORD_BYTES:
        return None
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return as_record(value) if isinstance(value, dict) else None


def _of_text(raw: bytes) -> Record | None:
    try:
        text = raw.decode().strip()
    except UnicodeDecodeError:
        return None
    return Record("text", text) if _usable(text) else None


def _documents(path: Path) -> Iterator[bytes]:
    """The texts between blank lines, or every line if no line is blank."""
    if all(line.strip() for line in _lines(path)):
        yield from _lines(path)
        return
    held: list[bytes] = []
    size = 0
    for line in _lines(path):
        if line.strip():
            if size <= MAX_RECORD_BYTES:  # the rest of a document that is already too long is not needed
                held.append(line)
            size += len(line)
        elif held:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines. A line that is too long is cut, but stays too long to be used; so memory is bounded."""
    with path.open("rb") as stream:
        first = True
        while line := stream.readline(MAX_RECORD_BYTES + 2):
            end = line
            while not end.endswith(b"\n") and (end := stream.readline(MAX_RECORD_BYTES)):
                pass
            yield line.removeprefix(b"\xef\xbb\xbf") if first else line
            first = False


def _parquet(path: Path) -> Iterator[Record | None]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("data", path, "the package pyarrow to read parquet files with") from error
    try:
        file = parquet.ParquetFile(path)
        columns = [field for field in FIELDS if field in file.schema_arrow.names][:1]
        if not columns:
            expected = f"a column {' or '.join(FIELDS)}; there are {', '.join(file.schema_arrow.names)}"
            raise ConfigError("data", path, expected)
        for batch in file.iter_batches(batch_size=256, columns=columns):
            yield from map(as_record, batch.to_pylist())
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError("data", path, f"a parquet file; {type(error).__name__}: {error}") from error
