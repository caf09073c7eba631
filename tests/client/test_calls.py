"""Calls that answer once, what travels with every call, and values that are refused before anything is sent."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.client import scripted
from tests.client.scripted import TEXT, GrpcServer, Script, fails, hangs
from tide.v1 import tide_pb2 as pb
from tide_client import BadValueError, BrokenStreamError, StatusError, TideClient
from tide_client.requests import Options, request_of

Call = Callable[..., Any]
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def test_generate_answers_whole(server: GrpcServer, call: Call) -> None:
    answer = call(server.address, "generate", "Say", max_tokens=4)
    assert (answer.text, len(answer.tokens), answer.finish_reason) == (TEXT, 4, "stop")


def test_generate_is_asked_again_where_nobody_was_there(server: GrpcServer, script: Script, call: Call) -> None:
    script.acts.extend([fails("UNAVAILABLE"), fails("CANCELLED")])
    assert call(server.address, "generate", "Say").text == TEXT
    assert len(script.requests) == 3


@pytest.mark.parametrize(("said", "heard"), [("7", 7.0), (None, None), ("soon", None), ("Wed, 21 Oct 2026", None)])
def test_an_error_tells_when_to_ask_again(
    server: GrpcServer, script: Script, call: Call, said: str | None, heard: float | None
) -> None:
    script.acts.append(fails("RESOURCE_EXHAUSTED", retry_after=said))
    with pytest.raises(StatusError, match="RESOURCE_EXHAUSTED") as caught:
        call(server.address, "generate", "Say")
    assert caught.value.retry_after_s == heard
    assert len(script.requests) == 1


def test_a_call_waits_as_long_as_the_server_asks_before_it_is_made_again(
    server: GrpcServer, script: Script, call: Call
) -> None:
    script.acts.append(fails("UNAVAILABLE", retry_after="1"))
    started = time.monotonic()
    assert call(server.address, "generate", "Say").text == TEXT
    assert time.monotonic() - started >= 1.0


def test_an_answer_without_its_last_word_is_broken(server: GrpcServer, script: Script, call: Call) -> None:
    script.acts.append(scripted.ends_without_the_last_word)
    with pytest.raises(BrokenStreamError, match="2 tokens and no final message"):
        call(server.address, "generate", "Say")


def test_generate_that_hangs_ends_at_its_deadline(server: GrpcServer, script: Script, call: Call) -> None:
    script.acts.append(hangs())
    with pytest.raises(StatusError, match="DEADLINE_EXCEEDED"):
        call(server.address, "generate", "Say", timeout_s=0.3)


def test_the_other_calls_give_plain_records(server: GrpcServer, call: Call) -> None:
    info = call(server.address, "model_info")
    assert (info.num_layers, info.checkpoint_layers, info.modes) == (4, (1,), ("full", "bounded"))
    assert (info.default_mode, info.artefact_digest) == ("verified", None)
    stats = call(server.address, "exit_stats")
    assert (stats.total_tokens, stats.tokens_per_layer) == (9, {1: 7, 4: 2})
    assert (stats.audits[0].contract, stats.audits[0].epsilon, stats.audits[0].answers) == ("fast(0.05)", 0.05, 10)
    assert call(server.address, "abort", "r-1") is True
    assert call(server.address, "abort", "r-2") is False
    assert call(server.address, "tokenize", "ab") == [97, 98]
    assert call(server.address, "tokenize", CHAT[1:]) == [72, 105]
    assert call(server.address, "detokenize", [72, 105]) == "Hi"


def test_key_and_application_travel_with_every_call(server: GrpcServer, script: Script) -> None:
    with TideClient(server.address, api_key="s3cret", application="big") as client:
        client.model_info()
        client.generate("Say")
        assert len(list(client.stream("Say"))) == 4
    for metadata in script.metadata:
        assert (metadata["authorization"], metadata["application"]) == ("Bearer s3cret", "big")
    assert len(script.metadata) == 3


def test_every_option_reaches_the_schema() -> None:
    options: Options = {
        "max_tokens": 7,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {3: 1.0},
        "seed": 9,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "logprobs": 2,
        "json_schema": '{"type": "object"}',
        "regex": "a+",
        "choices": ["a", "b"],
        "grammar": 'root ::= "a"',
    }
    request = request_of(
        "Say", {**options, "mode": "bounded", "epsilon": 0.02, "margin": 0.3, "min_layers": 2, "request_id": "r"}, 5.0
    )
    assert request.sampling_params == pb.SamplingParams(**options)  # type: ignore[arg-type]
    assert request.exits == pb.ExitParams(mode=pb.MODE_BOUNDED, epsilon=0.02, margin=0.3, min_layers=2)
    assert (request.request_id, request.timeout_s, request.prompt) == ("r", 5.0, "Say")
    assert set(options) == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


def test_a_schema_may_be_an_object() -> None:
    request = request_of("Say", {"json_schema": {"type": "object"}}, 5.0)
    assert request.sampling_params.json_schema == '{"type": "object"}'


def test_what_is_not_given_is_left_to_the_server() -> None:
    request = request_of("Say", {"seed": None, "mode": None}, 5.0)  # type: ignore[typeddict-item]
    assert request == pb.GenerateRequest(prompt="Say", timeout_s=5.0)


def test_a_prompt_is_text_ids_or_a_chat() -> None:
    assert request_of("", {}, 1.0).HasField("prompt")
    assert list(request_of([1, 2], {}, 1.0).prompt_ids.ids) == [1, 2]
    assert request_of([], {}, 1.0).HasField("prompt_ids")
    assert [message.content for message in request_of(CHAT, {}, 1.0).chat.messages] == ["Be kind.", "Hi"]


def test_content_may_be_openais_parts_of_text() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    turns: Any = [{"role": "user", "content": parts}, {"role": "user", "content": []}]
    assert [message.content for message in request_of(turns, {}, 1.0).chat.messages] == ["Hi there", ""]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([{"role": "user", "content": [IMAGE]}], {}, r"message 0, content\[0\] is 'image_url', expected text"),
        ([{"role": "user", "content": ["Hi"]}], {}, r"message 0, content\[0\] is 'str', expected text"),
        ([{"role": "user", "content": 5}], {}, r"message 0, content\[0\] is 'int', expected text"),
        ("Say", {"mode": "quick"}, "mode is 'quick', expected full, verified, bounded, fast"),
        ("Say", {"max_tokens": 2**40}, "max_tokens is 1099511627776"),
        ("Say", {"timeout_s": 0}, "timeout_s is 0, expected seconds above 0"),
        ("Say", {"timeout_s": float("nan")}, "timeout_s is nan"),
        ("Say", {"timeout_s": float("inf")}, "timeout_s is inf"),
        ([{"role": "user", "content": "Hi", "name": "x"}], {}, "message 0 has content, name, role"),
    ],
)
def test_a_value_that_cannot_be_sent_is_refused_by_name(
    server: GrpcServer, script: Script, call: Call, prompt: Any, options: Any, said: str
) -> None:
    with pytest.raises(BadValueError, match=said.replace("(", r"\(")):
        call(server.address, "generate", prompt, **options)
    assert script.requests == []


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("Say", {"max_token": 1}, "max_token is not an option of a generation"),
        ("Say", {"max_tokens": "7"}, "max_tokens is '7'"),
        ("Say", {"stop": "ab"}, "stop is one string"),
        (b"Say", {}, "prompt is bytes"),
    ],
)
def test_a_value_of_the_wrong_kind_is_a_type_error(server: GrpcServer, prompt: Any, options: Any, said: str) -> None:
    with TideClient(server.address) as client, pytest.raises(TypeError, match=said):
        client.stream(prompt, **options)


@pytest.mark.parametrize("key", ["", "two words", "line\nend", "clé"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(BadValueError, match="api_key is not shown here") as refused:
        TideClient("127.0.0.1:1", api_key=key)
    assert not key or key not in str(refused.value)


@pytest.mark.parametrize("settings", [{"retries": -1}, {"timeout_s": 0.0}, {"application": "a b"}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadValueError, match=next(iter(settings))):
        TideClient("127.0.0.1:1", **settings)


def test_a_name_that_only_a_newer_server_knows_is_told_by_its_number(server: GrpcServer, script: Script) -> None:
    newer = pb.Token(id=1, text="x", exit_layer=1, audit=99, mode=98)
    script.acts.append(lambda script, context: iter([scripted.chunk(0, newer, final=scripted.FINAL)]))
    with TideClient(server.address) as client:
        [token] = client.stream("Say")
    assert (token.audit, token.mode) == ("unknown (99)", "unknown (98)")


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(StatusError("UNAVAILABLE", "gone", 1, 2.0)))
    assert (error.code, error.num_tokens, error.retry_after_s) == ("UNAVAILABLE", 1, 2.0)
    assert str(error) == "UNAVAILABLE after 1 token: gone"
