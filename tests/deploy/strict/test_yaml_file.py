"""YAML of a config: a value that reads differently from how it looks is refused, with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.strict.yaml_file import MAX_BYTES, parse, read
from tide_core.errors import ConfigError

ROOT = Path(__file__).parents[3]
PLAIN = "a: 1\nb: [x, 2.5, true, null]\nc: {d: '1:30', e: -3}\n"
VALUE = {"a": 1, "b": ["x", 2.5, True, None], "c": {"d": "1:30", "e": -3}}
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


def refusal_of(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(text if isinstance(text, bytes) else text.encode(), "config.yaml")
    assert refused.value.field == "config.yaml"
    return str(refused.value)


@pytest.mark.parametrize(
    "data",
    [PLAIN.encode(), PLAIN.replace("\n", "\r\n").encode(), b"\xef\xbb\xbf" + PLAIN.encode(), b"---\n" + PLAIN.encode()],
    ids=["plain", "line ends of Windows", "byte order mark", "one document"],
)
def test_plain_yaml_is_read_as_serve_reads_it(data: bytes) -> None:
    assert parse(data, "config.yaml") == VALUE == yaml.safe_load(data)


@pytest.mark.parametrize("name", ["config.yaml", "config.gpu.yaml"])
def test_shipped_files_are_read_as_serve_reads_them(name: str) -> None:
    path = ROOT / "deploy" / name
    assert read(path) == yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "nothing"),
        ("# only words\n", "nothing"),
        ("- a\n- b\n", "list"),
        ("word\n", "str"),
        ("3\n", "int"),
        ("~", "nothing"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(text: str, what: str) -> None:
    assert f"got '{what}', expected keys and values" in refusal_of(text)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (".nan", "line 2: .nan would become nan"),
        (".inf", "write a finite decimal number"),
        ("-.INF", "write a finite decimal number"),
        ("no", "line 2: no would become false; write that, or quote it"),
        ("Yes", "Yes would become true"),
        ("on", "on would become true"),
        ("OFF", "OFF would become false"),
        ("1:30", "line 2: 1:30 would become 90"),
        ("1:30.5", "1:30.5 would become 90.5"),
        ("1e-3", "line 2: 1e-3 would become text; write 0.001, or quote it"),
        ("1.0e3", "1.0e3 would become text"),
        ("08000", "08000 would become text; write 8000, or quote it"),
        ("-.5", "-.5 would become text; write -0.5, or quote it"),
        ("010", "010 would become 8"),
        ("0x1F", "0x1F would become 31"),
        ("0b11", "0b11 would become 3"),
        ("1_000", "1_000 would become 1000"),
        ("1_000.5", "1_000.5 would become 1000.5"),
        ("2026-11-15", "2026-11-15 would become a date; quote it"),
        ("2026-11-15T10:00:00Z", "would become a date"),
        ("9" * 5000, "4300 digits"),
        ("!!python/object/apply:os.system [echo]", "tags are not allowed"),
        ("!!python/name:os.system", "tags are not allowed"),
        ("!!binary aGk=", "tags are not allowed"),
        ("!!str 3", "tags are not allowed"),
        ("!mine x", "tags are not allowed"),
        ("&anchor x", "line 2: anchors, aliases and tags are not allowed"),
        ("*anchor", "anchors, aliases and tags are not allowed"),
        ("[a, b", "line 3: while parsing a flow sequence"),
        ("'open", "line 3: while scanning a quoted scalar"),
        ("\tx: 1", "line 2: "),
        ("a: b", "mapping values are not allowed here"),
        ("\x00", "special characters are not allowed"),
        ("[" * 5_000, "unlimited nesting"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_not_what_it_looks_like_is_refused_with_its_line(written: str, why: str) -> None:
    assert why in refusal_of(f"first: 1\nsecond: {written}\n")


@pytest.mark.parametrize(
    "quoted", ["'no'", '"1:30"', "'010'", '"1e-3"', "'2026-11-15'", "nowhere", "1.2.3", "7b", "none"]
)
def test_text_stays_text(quoted: str) -> None:
    assert parse(f"a: {quoted}\n".encode(), "config.yaml") == {"a": quoted.strip("'\"")}


@pytest.mark.parametrize("written", ["0", "-7", "+7", "12", "1.5", ".5", "1.5e+3", "2.", "true", "False", "~", "null"])
def test_numbers_and_switches_that_look_like_what_they_are_are_taken(written: str) -> None:
    assert parse(f"a: {written}\n".encode(), "config.yaml") == yaml.safe_load(f"a: {written}\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key a appears twice"),
        ("o:\n  a: {b: 1, 'b': 2}\n", "line 2: the key b appears twice"),
        ("l:\n- a: 1\n  a: 1\n", "line 3: the key a appears twice"),
        ("1: a\n", "the key 1 is not text"),
        ("~: a\n", "the key None is not text"),
        ("on: a\n", "on would become true"),
        ("[a]: b\n", "is not text"),
        ("<<: {a: 1}\n", "line 1"),
    ],
)
def test_keys_are_texts_and_come_once(text: str, why: str) -> None:
    assert why in refusal_of(text)


@pytest.mark.timeout(120)
def test_a_bomb_of_aliases_is_refused_before_it_is_lit() -> None:
    assert "line 1: anchors, aliases and tags are not allowed" in refusal_of(BOMB)


def test_a_second_document_is_refused() -> None:
    assert "single document" in refusal_of("a: 1\n---\nb: 2\n")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_another_encoding_is_refused_in_words(encoding: str) -> None:
    message = refusal_of("a: é\n".encode(encoding))
    assert "UTF-8" in message or "special characters" in message


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"a: 1\n" + b"#" * MAX_BYTES)
    with pytest.raises(ConfigError, match=f"at most {MAX_BYTES} bytes"):
        read(path)
    with pytest.raises(ConfigError, match="at most"):
        read(Path("/dev/zero"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"{path.name}'"):
            read(path)


def test_no_object_is_ever_made_of_a_tag(tmp_path: Path) -> None:
    marker: Any = tmp_path / "marker"
    refusal_of(f"a: !!python/object/apply:os.system ['touch {marker}']\n")
    assert not marker.exists()
