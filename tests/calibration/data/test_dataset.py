from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.calibration.tiny_runs import tiny_calibration
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.dataset import gather, kind_of, split
from tide_core.calibration.data.records import MAX_RECORD_BYTES, Record
from tide_core.errors import ConfigError

TEXTS = [f"Document number {n} about rivers." for n in range(200)]


def jsonl(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def records(data: Path | str, **settings: Any) -> list[Record]:
    pool = gather(tiny_calibration(**{"num_samples": 1000, **settings, "data": str(data)}))
    return [Record.of_line(line) for line in pool.lines()]


def test_the_shipped_prompts_are_the_source_called_self() -> None:
    found = records("self")

    assert len(found) >= 320
    assert {record.kind for record in found} == {"prompt"}


def test_a_prompt_or_messages_are_answered_and_text_is_a_document(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    lines: list[Any] = [{"prompt": "Why?"}, {"messages": chat}, {"text": "Once upon a time."}]

    found = {record.kind: record.content for record in records(jsonl(tmp_path / "data.jsonl", lines))}

    assert found == {"prompt": "Why?", "messages": chat[:1], "text": "Once upon a time."}


def test_documents_of_a_text_file_lie_between_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("one\ntwo\n\n  \nthree\n", encoding="utf-8")

    assert sorted(str(record.content) for record in records(path)) == ["one\ntwo", "three"]


def test_without_a_blank_line_every_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\nthree")

    assert sorted(str(record.content) for record in records(path)) == ["one", "three", "two"]


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    jsonl(tmp_path / "a.jsonl", [{"text": "from a"}])
    (tmp_path / "sub" / "b.txt").write_text("from b", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not read", encoding="utf-8")

    assert sorted(str(record.content) for record in records(tmp_path)) == ["from a", "from b"]


def test_parquet_files_are_read_by_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["first", "second"]}), path)

    assert sorted(str(record.content) for record in records(path)) == ["first", "second"]
    parquet.write_table(pyarrow.table({"id": [1, 2]}), path)
    with pytest.raises(ConfigError, match="a column messages or prompt or text; there are id"):
        records(path)
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(ConfigError, match="a parquet file"):
        records(path)


BAD_LINES = {
    "not UTF-8": b'{"text": "\xff\xfe"}\n',
    "NULs only": b'{"text": "\\u0000\\u0000"}\n',
    "empty": b'{"text": "  "}\n',
    "not JSON": b"{text}\n",
    "no known field": b'{"body": "words"}\n',
    "not text": b'{"text": 3}\n',
    "half a surrogate pair": b'{"text": "\\ud800"}\n',
    "too long": b'{"text": "' + b"x" * MAX_RECORD_BYTES + b'"}\n',
    "messages without a user": b'{"messages": [{"role": "assistant", "content": "Hello"}]}\n',
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_record_is_skipped_and_counted(tmp_path: Path, what: str) -> None:
    path = jsonl(tmp_path / "data.jsonl", [{"text": text} for text in TEXTS])
    path.write_bytes(BAD_LINES[what] + path.read_bytes())

    pool = gather(tiny_calibration(data=str(path), num_samples=1000))

    assert (pool.num_bad, pool.num_seen, len(pool)) == (1, 201, 200)


@pytest.mark.parametrize("what", BAD_LINES)
def test_more_than_one_in_a_hundred_bad_records_stop_the_run(tmp_path: Path, what: str) -> None:
    path = jsonl(tmp_path / "data.jsonl", [{"text": text} for text in TEXTS[:99]])
    path.write_bytes(path.read_bytes() + BAD_LINES[what] * 2)

    with pytest.raises(ConfigError, match="2 of 101 cannot"):
        records(path)


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_bad_documents_of_a_text_file_are_counted_too(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "data.txt"
    good = separator.join(TEXTS).encode()
    bad = [b"\0\0\0", b"\xff\xff", b"x" * (MAX_RECORD_BYTES + 1), b"y " * MAX_RECORD_BYTES]
    path.write_bytes(good + b"".join(separator.encode() + line for line in bad[:2]))

    pool = gather(tiny_calibration(data=str(path), num_samples=1000))
    assert (pool.num_bad, pool.num_seen, len(pool)) == (2, 202, 200)

    path.write_bytes(good + b"".join(separator.encode() + line for line in bad))
    with pytest.raises(ConfigError, match="4 of 204 cannot"):
        records(path)


def test_what_cannot_be_read_stops_the_run_and_nothing_takes_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was found at this path"):
        records(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="a folder with"):
        records(tmp_path)
    (tmp_path / "data.csv").write_text("a,b", encoding="utf-8")
    with pytest.raises(ConfigError, match="a file of a known kind"):
        records(tmp_path / "data.csv")
    empty = jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(ConfigError, match="at least 3 different records"):
        split(gather(tiny_calibration(data=str(empty))).lines(), tiny_calibration(data=str(empty)))


def test_a_large_file_gives_the_asked_number_whatever_its_order(tmp_path: Path) -> None:
    lines = [{"text": text} for text in TEXTS]
    forward = records(jsonl(tmp_path / "a.jsonl", lines), num_samples=20)
    backward = records(jsonl(tmp_path / "b.jsonl", lines[::-1] + lines), num_samples=20)

    assert len(forward) == 20
    assert forward == backward
    assert forward != records(tmp_path / "a.jsonl", num_samples=20, seed=1)


def test_a_long_document_is_cut(tmp_path: Path) -> None:
    [record] = records(jsonl(tmp_path / "a.jsonl", [{"text": "word " * 10000}]), text_tokens=16)

    assert len(record.content) == 16 * 32


def test_parts_never_overlap_and_hold_everything() -> None:
    config = CalibrationConfig()
    lines = [Record("prompt", text).line for text in TEXTS * 2]

    parts = split(lines, config)

    assert sorted(line for part in parts.values() for line in part) == sorted(set(lines))
    assert len(parts["calibration"]) == 64
    assert len(parts["test"]) == 32


def test_shares_are_kept_where_there_is_enough() -> None:
    lines = [Record("prompt", f"prompt {n}").line for n in range(20000)]

    sizes = {part: len(some) / 20000 for part, some in split(lines, CalibrationConfig()).items()}

    assert sizes == {
        "train": pytest.approx(0.8, abs=0.01),
        "calibration": pytest.approx(0.14, abs=0.01),
        "test": pytest.approx(0.06, abs=0.01),
        "given": 0.0,
    }


def test_a_record_stays_in_its_part_when_others_join() -> None:
    few = [Record("prompt", f"prompt {n}").line for n in range(10000)]
    before = split(few, CalibrationConfig())
    after = split([*few, *(Record("prompt", f"other {n}").line for n in range(10000))], CalibrationConfig())

    assert all(set(before[part]) <= set(after[part]) for part in before)


def test_another_seed_splits_otherwise() -> None:
    lines = [Record("prompt", text).line for text in TEXTS]

    assert split(lines, CalibrationConfig())["test"] != split(lines, CalibrationConfig(seed=1))["test"]


@pytest.mark.parametrize("num", [3, 4, 5, 10])
def test_every_part_of_a_tiny_set_has_something(num: int) -> None:
    parts = split([Record("prompt", text).line for text in TEXTS[:num]], CalibrationConfig())

    assert all(lines for part, lines in parts.items() if part != "given")
    assert sum(map(len, parts.values())) == num


def test_given_prompts_are_a_part_of_their_own_among_many_others() -> None:
    given = [Record("prompt", f"given {n}").line for n in range(50)]
    others = [Record("prompt", f"other {n}").line for n in range(150)]

    parts = split([*given, *others], CalibrationConfig(), given)

    assert sorted(parts["given"]) == sorted(given)
    assert sorted(line for part in ("train", "calibration", "test") for line in parts[part]) == sorted(others)


def test_given_prompts_are_split_like_any_where_there_is_little_else() -> None:
    given = [Record("prompt", f"given {n}").line for n in range(50)]
    others = [Record("prompt", f"other {n}").line for n in range(149)]

    assert split([*given, *others], CalibrationConfig(), given)["given"] == []


class Rows(list[dict[str, Any]]):
    """As much of a data set as is used."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def shuffle(self, seed: int) -> Rows:
        return self

    def select(self, indices: range) -> Rows:
        return Rows(self[i] for i in indices)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], Rows]:
    known: dict[tuple[str, str | None, str], Rows] = {}

    def load_dataset(name: str, configuration: str | None, *, split: str) -> Rows:
        try:
            return known[name, configuration, split]
        except KeyError:
            raise ConnectionError("no such set") from None

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return known


def test_names_of_the_datasets_library_give_set_configuration_split_and_column(hub: Any) -> None:
    hub["sums", None, "train"] = Rows([{"prompt": "1 + 1?"}])
    hub["org/sums", None, "train"] = Rows([{"text": "plain"}])
    hub["org/sums", "hard", "test[:10%]"] = Rows([{"question": "2 + 2?", "answer": "4"}])
    hub["sums", "main", "valid"] = Rows([{"passage": "words"}])

    assert records("sums") == [Record("prompt", "1 + 1?")]
    assert records("org/sums") == [Record("text", "plain")]
    assert records("org/sums/hard:test[:10%]:question") == [Record("prompt", "2 + 2?")]
    assert records("sums/main:valid:passage") == [Record("text", "words")]


def test_a_data_set_that_fails_to_load_stops_the_run_with_its_reason(hub: Any) -> None:
    hub["sums", None, "train"] = Rows([{"body": "words"}])

    with pytest.raises(ConfigError, match="ConnectionError: no such set"):
        records("nowhere/nothing")
    with pytest.raises(ConfigError, match="one of the columns body"):
        records("sums:train:question")
    with pytest.raises(ConfigError, match="the name of a column"):
        records("sums")
    with pytest.raises(ConfigError, match="self, an existing file or folder, or a datasets name"):
        records("two words")


def test_the_artefact_names_no_path_of_this_machine(tmp_path: Path) -> None:
    assert kind_of("self") == "self"
    assert kind_of(str(jsonl(tmp_path / "secret.jsonl", []))) == "local files"
    assert kind_of("org/sums:train") == "org/sums:train"
