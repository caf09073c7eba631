"""Tool calls in the shapes that models write them, whole and in pieces of any length."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.tools.call_parser import Answer, CallDelta, ToolParser
from deploy.tools.parsers import HermesParser, Llama3JsonParser, MistralParser

pytestmark = pytest.mark.unit

H, L, M = HermesParser, Llama3JsonParser, MistralParser
PARSERS: list[type[ToolParser]] = [H, L, M]
NESTED = (
    '{"code": "if (a) { return \\"}\\"; } \\\\", "list": [{"x": [1, 2.5e3, null]}, true], "grüße": "日本 🌍 \\u00e9"}'
)


def hermes(*objects: str, between: str = "\n") -> str:
    return between.join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)


def call(name: str, arguments: str = "{}", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


Calls = list[tuple[str, str]]
EXAMPLES: list[tuple[str, type[ToolParser], str, str, Calls]] = [
    ("one call", H, hermes(call("f", '{"a": 1}')), "", [("f", '{"a": 1}')]),
    ("text before", H, "Let me see.\n\n" + hermes(call("f")), "Let me see.\n\n", [("f", "{}")]),
    ("text after", H, hermes(call("f")) + "\nThat is all.", "\nThat is all.", [("f", "{}")]),
    ("several calls", H, hermes(call("f"), call("g", '{"b": 2}')), "", [("f", "{}"), ("g", '{"b": 2}')]),
    ("several without a line end", H, hermes(call("f"), call("g"), between=""), "", [("f", "{}"), ("g", "{}")]),
    ("space around calls", H, "\n\n" + hermes(call("f")) + "\n", "", [("f", "{}")]),
    ("nested braces and quotes", H, hermes(call("f", NESTED)), "", [("f", NESTED)]),
    ("compact", H, '<tool_call>{"name":"f","arguments":{"a":[]}}</tool_call>', "", [("f", '{"a":[]}')]),
    ("space kept in arguments", H, hermes(call("f", '{\n  "a":  1 }')), "", [("f", '{\n  "a":  1 }')]),
    ("end marker in a string", H, hermes(call("f", '{"a": "</tool_call>"}')), "", [("f", '{"a": "</tool_call>"}')]),
    ("arguments before the name", H, hermes('{"arguments": {"a": 1}, "name": "f"}'), "", [("f", '{"a": 1}')]),
    ("other keys", H, hermes('{"id": 7, "name": "f", "arguments": {}, "x": [{"y": "}"}]}'), "", [("f", "{}")]),
    ("the other word for arguments", H, hermes(call("f", '{"a": 1}', "parameters")), "", [("f", '{"a": 1}')]),
    ("no arguments", H, hermes('{"name": "f"}'), "", [("f", "{}")]),
    ("arguments null", H, hermes(call("f", "null")), "", [("f", "{}")]),
    ("arguments as text", H, hermes(call("f", '"{\\"a\\": 1}"')), "", [("f", '{"a": 1}')]),
    ("escapes in the name", H, hermes(call("gr\\u00fcn")), "", [("grün", "{}")]),
    ("a trailing comma", H, hermes('{"name": "f", "arguments": {},}'), "", [("f", "{}")]),
    ("no end marker", H, "<tool_call>\n" + call("f", '{"a": 1}'), "", [("f", '{"a": 1}')]),
    ("no end marker, another call", H, f"<tool_call>{call('f')}\n" + hermes(call("g")), "", [("f", "{}"), ("g", "{}")]),
    ("the outer brace is missing", H, hermes('{"name": "f", "arguments": {"a": 1}'), "", [("f", '{"a": 1}')]),
    ("a brace too many", H, hermes(call("f", '{"a": 1}') + "}"), "}\n", [("f", '{"a": 1}')]),
    ("cut in the arguments", H, '<tool_call>\n{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')]),
    ("broken arguments", H, hermes(call("f", '{"a": <1>}')) + " ok", " ok", [("f", '{"a": <1>}}\n')]),
    ("broken after arguments", H, '<tool_call>{"name": "f", "arguments": {}, oh', ", oh", [("f", "{}")]),
    ("one call", L, call("f", '{"a": 1}', "parameters"), "", [("f", '{"a": 1}')]),
    ("with the tag", L, "<|python_tag|>" + call("f", '{"a": 1}', "parameters"), "", [("f", '{"a": 1}')]),
    ("several", L, f"{call('f', key='parameters')}; {call('g', NESTED)}", "", [("f", "{}"), ("g", NESTED)]),
    ("several, closely", L, f"{call('f')};{call('g')} ;\n{call('h')}", "", [("f", "{}"), ("g", "{}"), ("h", "{}")]),
    ("several on lines", L, f"{call('f')}\n{call('g')}\n", "", [("f", "{}"), ("g", "{}")]),
    ("several with tags", L, f"<|python_tag|>{call('f')}; <|python_tag|>{call('g')}", "", [("f", "{}"), ("g", "{}")]),
    ("with its type", L, '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("text before", L, "Here it is:\n\n" + call("f", '{"a": 1}', "parameters"), "Here it is:\n\n", [("f", '{"a": 1}')]),
    ("text after", L, call("f") + "; and so on", "; and so on", [("f", "{}")]),
    ("cut in the arguments", L, '{"name": "f", "parameters": {"a": [1, ', "", [("f", '{"a": [1, ')]),
    (
        "a call inside other JSON",
        L,
        f'{{"result": {call("f")}}}\n{call("g")}',
        f'{{"result": {call("f")}}}\n',
        [("g", "{}")],
    ),
    ("braces of code", L, "f() { g(); } " + call("f"), "f() { g(); } ", [("f", "{}")]),
    ("the old list", M, "[TOOL_CALLS] [" + call("f", '{"a": 1}') + "]", "", [("f", '{"a": 1}')]),
    ("several in a list", M, f"[TOOL_CALLS][{call('f')}, {call('g', NESTED)}]", "", [("f", "{}"), ("g", NESTED)]),
    ("no list", M, f"[TOOL_CALLS]{call('f')}", "", [("f", "{}")]),
    ("text around a list", M, f"Well, [TOOL_CALLS][{call('f')}] there.", "Well,  there.", [("f", "{}")]),
    ("an open list", M, f"[TOOL_CALLS][{call('f')}, ", "", [("f", "{}")]),
    ("a list with a bad entry", M, f'[TOOL_CALLS][{call("f")}, {{"x": 1}}]', ', {"x": 1}]', [("f", "{}")]),
    ("the new form", M, '[TOOL_CALLS]get-a.b_c{"a": 1}', "", [("get-a.b_c", '{"a": 1}')]),
    ("several of the new form", M, f"[TOOL_CALLS]f{{}}[TOOL_CALLS]g {NESTED}", "", [("f", "{}"), ("g", NESTED)]),
    ("with all its markers", M, '[TOOL_CALLS]f[CALL_ID]a1B[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ("with one marker", M, 'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}', "Hm.", [("f", '{"a": 1}')]),
    ("text after the new form", M, '[TOOL_CALLS]f{"a": 1} bye', " bye", [("f", '{"a": 1}')]),
    ("cut in the arguments", M, '[TOOL_CALLS]f{"a": {', "", [("f", '{"a": {')]),
    ("broken arguments", M, "[TOOL_CALLS]f{\"a\": '1'}[TOOL_CALLS]g{}", "", [("f", "{\"a\": '1'}"), ("g", "{}")]),
]
NO_CALLS = [
    (H, "Plain text, and 1 < 2 <tool or <tool_calls> too."),
    (H, "<tool_call>"),
    (H, "<tool_call>\n{"),
    (H, '<tool_call>\n{"name": "f", "argu'),
    (H, hermes("{'name': 'f', 'arguments': {}}")),
    (H, hermes('{"name": "f", "arguments": {\'a\': 1}}')),
    (H, hermes('{"name": "f", "arguments": [1]}')),
    (H, hermes('{"name": "f", "arguments": "no JSON"}')),
    (H, hermes('{"name": 5, "arguments": {}}')),
    (H, hermes('{"name": "", "arguments": {}}')),
    (H, hermes('{"arguments": {}}')),
    (H, hermes("get_weather(city='Paris')")),
    (H, "The tag <tool_call> begins a call and </tool_call> ends it."),
    (H, "  \n"),
    (L, '{"name": "Bob", "age": 3}'),
    (L, '{"name": "Bob"}'),
    (L, '{"city": "Paris", "n": [{"a": "}"}]}'),
    (L, '{"parameters": {"a": 1}}'),
    (L, '{"name": "f", "parameters": 5}'),
    (L, "<|python_tag|>print('hello')"),
    (L, "{}{ }{{{"),
    (L, '{"'),
    (L, "<|python_"),
    (M, "[TOOL_CALLS]"),
    (M, "[TOOL_CALLS] no call here"),
    (M, "[TOOL_CALLS][]"),
    (M, '[TOOL_CALLS][{"nam": "f"}]'),
    (M, "[TOOL_CALLS]" + "f" * 257 + "{}"),
    (M, "[TOOL_CALLS]f[ARG]{}"),
    (M, "[TOOL_CAL"),
    (M, "A list [1, 2] and [TOOL_CALL]f{}"),
]
PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<", "[", "]", ";", ","),
    *("{", "}", '"', "\\", ":", " ", "\n", "f", "name", "null", '{"name": "f", ', '"arguments": ', '"parameters": '),
    *('{"a": "é"}', '{"name": "f", "arguments": {', call("g", '{"b": [1]}'), '{"x": 1}'),
]


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, Calls]:
    return found(Answer.of([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()))


def found(answer: Answer) -> tuple[str, Calls]:
    return answer.content, [(one["function"]["name"], one["function"]["arguments"]) for one in answer.calls]


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize(("shape", "kind", "text", "content", "calls"), EXAMPLES)
def test_calls_are_found_in_the_shapes_that_models_write(
    shape: str, kind: type[ToolParser], text: str, content: str, calls: Calls
) -> None:
    parser = kind()
    assert found(parser.whole(text)) == (content, calls), shape
    assert read(kind(), list(text)) == (content, calls), shape
    assert parser.finish_reason("stop") == "tool_calls"
    assert parser.finish_reason("length") == "length"


@pytest.mark.parametrize(("kind", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(kind: type[ToolParser], text: str) -> None:
    parser = kind()
    assert found(parser.whole(text)) == (text, [])
    assert read(kind(), list(text)) == (text, [])
    assert parser.finish_reason("stop") == "stop"


@pytest.mark.parametrize("kind", PARSERS)
def test_where_the_text_is_cut_changes_nothing(kind: type[ToolParser]) -> None:
    texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.sampled_from(
        [text for _, other, text, _, _ in EXAMPLES if other is kind]
    )

    @settings(max_examples=120, deadline=None)
    @given(texts, st.lists(st.integers(0, 400), max_size=12))
    def check(text: str, places: list[int]) -> None:
        content, calls = found(kind().whole(text))
        assert read(kind(), cut(text, places)) == (content, calls)
        assert read(kind(), list(text)) == (content, calls)
        if not calls:
            assert content == text
        assert is_subsequence(content, text)

    check()


@pytest.mark.parametrize("kind", PARSERS)
def test_a_call_of_any_name_and_arguments_comes_back_as_written(kind: type[ToolParser]) -> None:
    names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
    values: Any = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(st.tuples(names, st.dictionaries(st.text(max_size=5), values, max_size=3)), min_size=1, max_size=3),
        st.sampled_from([None, 2]),
        st.booleans(),
    )
    def check(calls: list[tuple[str, Any]], indent: int | None, ascii_only: bool) -> None:
        wanted = [(name, json.dumps(one, indent=indent, ensure_ascii=ascii_only)) for name, one in calls]
        objects = [f'{{"name": {json.dumps(name)}, "arguments": {text}}}' for name, text in wanted]
        text = {H: hermes(*objects), L: "; ".join(objects), M: f"[TOOL_CALLS][{', '.join(objects)}]"}[kind]
        assert read(kind(), list(text)) == ("", wanted)

    check()


def is_subsequence(part: str, text: str) -> bool:
    rest = iter(text)
    return all(char in rest for char in part)


def test_a_stream_has_id_and_name_first_and_then_the_arguments_as_they_come() -> None:
    parser = HermesParser()
    deltas = [
        parser.feed(piece) for piece in ("Hi ", '<tool_call>\n{"name": "f", "arg', 'uments": {"a', '": 1', "}}\n</too")
    ]
    assert deltas[0] == ["Hi "]
    assert deltas[1] == []
    first, begun = deltas[2]
    assert isinstance(first, CallDelta)
    assert isinstance(begun, CallDelta)
    assert first.chunk() == {
        "index": 0,
        "id": first.id,
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert begun.chunk() == {"index": 0, "function": {"arguments": '{"a'}}
    assert deltas[3:] == [[CallDelta(0, '": 1')], [CallDelta(0, "}")]]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("kind", "pieces", "wanted"),
    [
        (H, ["a <", "b"], ["a ", "<b"]),
        (H, ["<tool_cal", "m"], ["", "<tool_calm"]),
        (H, ["<tool_call>", " no"], ["", "<tool_call> no"]),
        (L, ["{", '"', "na", "ture", '": 1'], ["", "", "", '{"nature', '": 1']),
        (L, ["{", "x"], ["", "{x"]),
        (L, ['{"name": "Bob", ', '"age"'], ["", '{"name": "Bob", "age"']),
        (M, ["[TOOL", "S]"], ["", "[TOOLS]"]),
        (M, ["[TOOL_CALLS]", "maybe ", "not"], ["", "", "[TOOL_CALLS]maybe not"]),
    ],
)
def test_text_is_held_back_only_while_it_may_become_a_call(
    kind: type[ToolParser], pieces: list[str], wanted: list[str]
) -> None:
    parser = kind()
    assert ["".join(map(str, parser.feed(piece))) for piece in pieces] == wanted


@pytest.mark.parametrize(
    ("kind", "form"), [(H, r"call_[0-9a-f]{24}"), (L, r"call_[0-9a-f]{24}"), (M, r"[A-Za-z0-9]{9}")]
)
def test_every_call_has_an_id_of_its_own(kind: type[ToolParser], form: str) -> None:
    text = {H: hermes(call("f"), call("f")), L: call("f") * 2, M: "[TOOL_CALLS]f{}" * 2}[kind]
    ids = [one["id"] for one in kind().whole(text).calls]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(form, one) for one in ids)


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize(
    "unit", ["{", '{"name":', "<tool_call>{", '<tool_call>{"a":"', "[TOOL_CALLS]", '[TOOL_CALLS]a{"b":[']
)
def test_hostile_text_costs_time_in_proportion_to_its_length(kind: type[ToolParser], unit: str) -> None:
    class Counting(kind):  # type: ignore[misc, valid-type]
        cost = 0

        def _use(self, length: int) -> str:
            self.cost += len(self._pending)  # what one step may look at and copy
            return super()._use(length)

    def cost(length: int) -> int:
        parser = Counting()
        parser.whole(unit * (length // len(unit)))
        return parser.cost

    assert 0 < cost(16_000) < 12 * cost(2_000)  # 8 if linear, 64 if quadratic
