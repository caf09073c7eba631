"""JSON bodies: what is not strict JSON is refused, quickly and without its content."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from deploy.http_api.openai_requests import CompletionRequest
from deploy.strict.json_body import MAX_CONTAINERS, MAX_FIELDS, parse
from tide_core.errors import RequestError

DEPTH = 64
MB2 = 2_000_000


def refusal_of(data: bytes) -> str:
    with pytest.raises(RequestError) as refused:
        parse(data, DEPTH)
    assert refused.value.field == "body"
    return str(refused.value)


@pytest.mark.parametrize("data", [b"[]", b"1", b'"x"', b"null", b"true"])
def test_json_that_is_no_object_is_read_and_fits_no_request(data: bytes) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate(parse(data, DEPTH))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"   ", "Expecting value"),
        (b"not json", "Expecting value"),
        (b'{"a": 1,}', "character 8"),
        (b"[1,]", "Expecting value"),
        (b'{"a": 1} x', "Extra data"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": "\xff"}', "invalid UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "invalid UTF-8 at byte 0"),
        (b'{"a": "\xed\xa0\x80"}', "invalid UTF-8"),
        (b'{"a": "b\nc"}', "control character"),
        (b"{'a': 1}", "double quotes"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "a number without end"),
        (b'{"a": -1e999}', "a number without end"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of thousands of digits"),
        (b'{"a": 0.' + b"9" * 5000 + b"}", "a number of 5002 characters"),
        (b'{"a": 1, "a": 1}', "the same key twice"),
        (b'{"o": [{"a": 1, "b": 2, "\\u0061": 3}]}', "the same key twice"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": "\\uDC00\\uD800"}', "half of a surrogate pair"),
        (b'{"a": [[{"\\ud83d": 1}]]}', "half of a surrogate pair"),
        (b"[" * 20_000, "64 levels"),
        (b'{"a":' * 20_000, "64 levels"),
        (b"[" * 20_000 + b"]" * 20_000, "64 levels"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_what_nobody_should_send_is_refused_with_the_reason(data: bytes, why: str) -> None:
    assert why in refusal_of(data)


def test_an_error_repeats_nothing_of_the_body() -> None:
    for data in (
        b'{"secret": secret}',
        b'{"secret": 1, "secret": 2}',
        b'{"secret": "\\ud800"}',
        b'"secret\\q"',
        b"\xffsecret",
    ):
        assert "secret" not in refusal_of(data)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b' {"a": [1, 2.5, -0.0, true, null, "\\u00e9\\ud83d\\ude00"]} ', {"a": [1, 2.5, -0.0, True, None, "é😀"]}),
        (b'{"a": "\\\\ud800"}', {"a": "\\ud800"}),
        ('{"a": "é\\u0000😀"}'.encode(), {"a": "é\x00😀"}),
        (b'{"a": {"a": {"a": 1}}}', {"a": {"a": {"a": 1}}}),
        (b'{"a": "' + b"[{" * 500 + b'\\" [[[["}', {"a": "[{" * 500 + '" [[[['}),
    ],
    ids=range(5),
)
def test_proper_json_is_read_as_it_is(data: bytes, value: Any) -> None:
    assert parse(data, DEPTH) == value


@pytest.mark.parametrize("opened", [b"[", b'{"a":'])
def test_the_deepest_that_is_allowed_is_read_and_one_more_is_not(opened: bytes) -> None:
    close = b"]" if opened == b"[" else b"}"
    deepest = opened * DEPTH + b"1" + close * DEPTH
    assert parse(deepest, DEPTH) is not None
    assert "64 levels" in refusal_of(b"[" + deepest + b"]")


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='[]{}"\\,:ab', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(value=VALUES, most=st.integers(0, 5), ascii_only=st.booleans())
@settings(max_examples=150, deadline=None)
def test_depth_by_brackets_is_the_depth_of_the_value(value: Any, most: int, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    if depth_of(value) <= most:
        assert parse(data, most) == value
    else:
        with pytest.raises(RequestError, match="levels"):
            parse(data, most)


HOSTILE = {
    "empty lists": b"[" + b",".join([b"[]"] * 660_000) + b"]",
    "lists in lists": b"[" + b",".join([b"[" * 60 + b"]" * 60] * 16_000) + b"]",
    "open lists": b"[" * MB2,
    "escaped quotes": b'"' + b'\\"' * (MB2 // 2),
    "escaped quotes and brackets": b'"[' + b'\\"[' * (MB2 // 3),
    "backslashes": b'"' + b"\\" * MB2 + b"[" * 99,
    "one integer": b"9" * MB2,
    "one float": b"0." + b"9" * MB2,
    "an exponent": b"1e" + b"9" * MB2,
    "blanks": b" " * MB2,
    "a text": json.dumps({"prompt": '{[x]} \\ " ' * 150_000}).encode(),
    "ids": b"[" + b",".join([b"1"] * 999_000) + b"]",
    "pairs": b'["\\ud83d\\ude00"' + b',"\\ud83d\\ude00"' * 130_000 + b"]",
    "keys": b"{" + b",".join(b'"%d":1' % number for number in range(180_000)) + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(60)  # seconds for all that is linear, hours for what is not
def test_two_megabytes_of_anything_are_dealt_with(name: str) -> None:
    with contextlib.suppress(RequestError):
        parse(HOSTILE[name], DEPTH)


def test_a_body_of_countless_parts_is_refused_before_they_are_made() -> None:
    assert str(MAX_CONTAINERS) in refusal_of(HOSTILE["empty lists"])
    assert len(parse(b"[" + b",".join([b"[]"] * (MAX_CONTAINERS - 1)) + b"]", DEPTH)) == MAX_CONTAINERS - 1


def test_bytes_without_any_sense_are_refused_and_nothing_else_is_raised() -> None:
    source = random.Random(0)
    for _ in range(300):
        data = bytes(source.choices(b'[]{}",:\\u0d8e1-. \xff', k=source.randrange(60)))
        try:
            parse(data, 3)
        except RequestError:
            continue
        json.loads(data)


def test_fields_are_counted_in_all_objects_and_not_in_text() -> None:
    def body(number: int) -> bytes:
        return json.dumps({"a": [{"x": 1, "y": 2}] * number, "text": "a: b, " * 100_000}).encode()

    assert len(parse(body((MAX_FIELDS - 2) // 2), 64)["a"]) == (MAX_FIELDS - 2) // 2
    with pytest.raises(RequestError, match=f"at most {MAX_FIELDS} fields"):
        parse(body(MAX_FIELDS // 2), 64)
