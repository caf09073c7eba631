"""Structured output: masks that follow a grammar, and engines whose every token does."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np
import pytest

from tests.engine.exit_engines import exit_engine
from tests.factories import tiny_tokenizer
from tide_core.engine.engine import Engine
from tide_core.errors import EngineError, RequestError
from tide_core.request import FinishReason, Grammar, SamplingParams
from tide_core.sampling import grammar as grammar_module
from tide_core.sampling.grammar import MAX_MASKS, GrammarMatcher, Grammars

pytestmark = pytest.mark.unit

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))
EOS = 1


@functools.cache
def grammars() -> Grammars:
    return Grammars(tiny_tokenizer(), len(tiny_tokenizer()), [EOS])


def ids_of(text: str) -> list[int]:
    return list(tiny_tokenizer().encode(text, add_special_tokens=False))


def texts_after(matcher: GrammarMatcher, ids: list[int]) -> set[str]:
    return {tiny_tokenizer().decode([int(one)]) for one in np.flatnonzero(matcher.allowed(ids))}


# The masks.


def test_what_may_follow_depends_on_the_tokens_alone_and_not_on_what_was_asked_before() -> None:
    matcher, whole = grammars().matcher(SCHEMA), ids_of('{"name": "Ada", "age": 36}')
    forwards = [matcher.allowed(whole[:n]).copy() for n in range(len(whole) + 1)]
    for n in (len(whole), 3, 0, 7, 2, len(whole) - 1, 5):
        assert (matcher.allowed(whole[:n]) == forwards[n]).all()
    other = ids_of('{"name": "Bo')
    assert (matcher.allowed(other) == grammars().matcher(SCHEMA).allowed(other)).all()


def test_masks_of_a_long_answer_are_not_kept() -> None:
    matcher = grammars().matcher(Grammar("regex", "a*"))
    a = ids_of("a")
    for num in range(200):
        matcher.allowed(a * num)
    assert len(matcher._masks) == MAX_MASKS
    assert (matcher.allowed(a * 3) == grammars().matcher(Grammar("regex", "a*")).allowed(a * 3)).all()


def test_only_the_end_may_follow_a_complete_text_and_the_end_itself() -> None:
    matcher = grammars().matcher(Grammar("regex", "ab?"))
    assert not matcher.must_end([])
    assert EOS in np.flatnonzero(matcher.allowed(ids_of("a")))
    assert not matcher.must_end(ids_of("a"))
    assert matcher.must_end(ids_of("ab"))
    assert matcher.must_end([*ids_of("ab"), EOS])
    assert matcher.must_end([*ids_of("ab"), EOS, EOS])
    assert not matcher.must_end(ids_of("a")), "what came after the end is rolled back"


def test_a_written_mask_has_the_bits_of_what_is_allowed_also_after_the_end_and_after_going_back() -> None:
    matcher, whole = grammars().matcher(Grammar("regex", "ab?")), ids_of("ab")
    words = np.zeros((2, -(-len(tiny_tokenizer()) // 32)), dtype=np.int32)
    for ids in (whole[:1], whole, [*whole, EOS], whole[:1], []):
        matcher.write(ids, words[1])
        bits = np.unpackbits(words[1].view(np.uint8), count=len(tiny_tokenizer()), bitorder="little")
        assert bits.astype(bool).tolist() == matcher.allowed(ids).tolist()
    assert not words[0].any(), "nothing is written elsewhere"


def test_an_output_that_grows_is_followed_whatever_its_drafts_were() -> None:
    """The same list each time, of which no token is looked at twice; other lists in between change nothing."""
    matcher, whole = grammars().matcher(SCHEMA), ids_of('{"name": "Ada", "age": 36}')
    other, output_ids = ids_of('{"name": "Bo'), list[int]()
    words, expected = np.zeros((2, -(-len(tiny_tokenizer()) // 32)), dtype=np.int32)
    for num, token_id in enumerate(whole):
        for drafts in ((), whole[num : num + 3], other[num:] if output_ids == other[:num] else ()):
            matcher.write(output_ids, words, drafts)
            grammars().matcher(SCHEMA).write([*output_ids, *drafts], expected)
            assert (words == expected).all()
        if num % 4 == 0:
            matcher.allowed(other[: num % 5])
        assert matcher.num_allowed(output_ids, [token_id]) == 1
        output_ids.append(token_id)
    read: list[int] = []

    class Counted(list[int]):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            read.append(len(found) if isinstance(key, slice) else 1)
            return found

    counted = Counted(whole)
    matcher.num_allowed(counted, [])
    assert read == [len(whole)]
    matcher.num_allowed(counted, [])
    assert read == [len(whole), 0]


def test_a_token_that_no_grammar_allows_is_an_error_of_its_request() -> None:
    with pytest.raises(Exception, match="the grammar cannot be followed"):
        grammars().matcher(Grammar("regex", "a+")).allowed(ids_of("b"))


@pytest.mark.parametrize("asked", ["allowed", "num_allowed", "write"])
def test_an_ambiguous_grammar_that_takes_ever_longer_is_an_error_of_its_request(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_FOLLOWED_S", 0.002)  # else a limit of the parser ends it, seconds later
    matcher = grammars().matcher(Grammar("lark", 'start: s\ns: "a" | s s | s s s'))
    [token], words = ids_of("a"), np.zeros(-(-len(tiny_tokenizer()) // 32), np.int32)
    ask = {
        "allowed": matcher.allowed,
        "num_allowed": lambda ids: matcher.num_allowed(ids, [token]),
        "write": lambda ids: matcher.write(ids, words),
    }[asked]

    def grow() -> None:
        for num in range(400):
            ask([token] * num)

    with pytest.raises(EngineError, match="too ambiguous"):
        grow()


def test_two_requests_with_one_grammar_do_not_meet() -> None:
    one, two = (grammars().matcher(SCHEMA) for _ in range(2))
    one.allowed(ids_of('{"name": "A'))
    assert texts_after(two, []) == {"{"}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", '{"type": "objekt"}'), "Invalid type: objekt"),
        (Grammar("json_schema", "{"), "compiled"),
        (Grammar("regex", "a("), "unclosed|invalid regex"),
        (Grammar("lark", "start: nothing"), "nothing|compiled"),
        (Grammar("choice", "[]"), "compiled"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        grammars().matcher(grammar)
    assert caught.value.field == "grammar"


# Answers.

CASES: list[tuple[Grammar, Any]] = [
    (SCHEMA, lambda text: set(json.loads(text)) == {"name", "age"}),
    (Grammar("regex", r"[a-f]{3}-[0-9]{2,4}"), lambda text: re.fullmatch(r"[a-f]{3}-[0-9]{2,4}", text)),
    (Grammar("choice", '["red", "dark green", "blue"]'), lambda text: text in ("red", "dark green", "blue")),
    (Grammar("lark", 'start: "x" ("," "y")+ "."'), lambda text: re.fullmatch(r"x(,y)+\.", text)),
    (
        Grammar("grammar", 'root ::= "yes" | "no" ", " [a-c]+ "!"'),
        lambda t: t == "yes" or re.fullmatch(r"no, [a-c]+!", t),
    ),
]


@pytest.fixture(scope="module")
def engine() -> Any:
    with exit_engine(max_rows=8) as engine:
        yield engine


def params(mode: str, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=120, mode=mode, **({"epsilon": 0.1} if mode == "bounded" else {}), **more)


@pytest.mark.parametrize("mode", ["full", "verified", "bounded", "fast"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_that_ends_follows_its_grammar_in_every_mode(
    engine: Engine, mode: str, temperature: float
) -> None:
    # So that a random model comes to an end.
    bias = {0: 100.0, **dict.fromkeys(ids_of(".!"), 20.0), **dict.fromkeys(ids_of("\n\t \r"), -100.0)}
    asked = [params(mode, grammar=one, temperature=temperature, seed=3, logit_bias=bias) for one, _ in CASES]
    answers = engine.generate(["hello"] * len(asked), asked)
    for answer, (grammar, holds) in zip(answers, CASES, strict=True):
        assert answer.error is None
        assert answer.finish_reason is FinishReason.STOP, (grammar.kind, answer.text)
        assert holds(answer.text), (grammar.kind, answer.text)


def test_greedy_verified_answers_are_those_of_full_depth_and_drafts_are_accepted(engine: Engine) -> None:
    texts = ["hello", "a b", "zzz", "name and age"]
    grammar = Grammar("regex", "[a-z ,.]{60,}")
    full = engine.generate(texts, params("full", grammar=grammar, ignore_eos=True))
    verified = engine.generate(texts, params("verified", grammar=grammar, ignore_eos=True))
    assert [answer.text for answer in verified] == [answer.text for answer in full]
    assert all(re.fullmatch("[a-z ,.]*", answer.text) for answer in full)
    accepted = sum(answer.usage.num_accepted for answer in verified if answer.usage is not None)
    assert accepted > 0, "exits go on under a grammar"


def test_batch_mates_without_a_grammar_are_untouched(engine: Engine) -> None:
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = engine.generate("hello", free)[0].text
    mixed = engine.generate(["hello"] * 3, [free, params("verified", grammar=SCHEMA), free])
    assert mixed[0].text == mixed[2].text == alone


def test_a_complete_text_ends_even_if_more_tokens_were_asked_for(engine: Engine) -> None:
    asked = SamplingParams(max_tokens=40, min_tokens=30, grammar=Grammar("choice", '["red"]'))
    (answer,) = engine.generate("hello", asked)
    assert (answer.text, answer.finish_reason) == ("red", FinishReason.STOP)
