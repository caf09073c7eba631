"""The stream over the OpenAI API, against a scripted HTTP server."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.client.scripted import NUM_LAYERS, PATIENCE_S, TEXT
from tests.client.scripted_http import DONE, ERROR, TOKENS, WHOLE, HttpServer, event
from tide_client import BadValueError, BrokenStreamError, StatusError, TideClientError
from tide_client.http import HttpClient, HttpStream

CHAT = [{"role": "user", "content": "Hi"}]


def failure_of(stream: HttpStream) -> tuple[str, TideClientError]:
    """The text that came, and then the error."""
    texts = []
    try:
        for token in stream:
            texts.append(token.text)
    except TideClientError as error:
        return "".join(texts), error
    raise AssertionError("the stream was whole")


def test_a_whole_stream_is_its_tokens_in_order_and_then_the_answer(http_server: HttpServer) -> None:
    with HttpClient(http_server.url) as client, client.stream("Say", max_tokens=4) as stream:
        tokens = list(stream)
        assert [token.text for token in tokens] == ["The", " cat", " sat", "."]
        assert [(token.id, token.exit_layer, token.score, token.audit) for token in tokens][1] == (6, 1, 0.75, "agreed")
        answer = stream.answer
        assert (answer.text, answer.finish_reason, answer.model, answer.request_id) == (
            TEXT,
            "stop",
            "scripted",
            "cmpl-1",
        )
        assert (answer.usage.completion_tokens, answer.usage.first_token_s) == (4, 1.0)
        assert answer.exits.tokens_per_layer == {1: 2, 4: 2}
        assert list(stream) == []


def test_text_and_chat_go_to_their_routes_greedy_unless_said(http_server: HttpServer) -> None:
    client = HttpClient(f"{http_server.url}/prefix/v1/", api_key="s3cret", timeout_s=9)
    list(client.stream("Say", max_tokens=4, mode="bounded", epsilon=0.02, margin=0.3))
    list(client.stream(CHAT, temperature=0.5, seed=3))
    assert http_server.paths == ["/prefix/v1/completions", "/prefix/v1/chat/completions"]
    assert http_server.keys == ["Bearer s3cret"] * 2
    text, chat = http_server.bodies
    assert (text["prompt"], text["max_tokens"], text["temperature"]) == ("Say", 4, 0.0)
    assert text["tide"] == {"mode": "bounded", "epsilon": 0.02, "margin": 0.3, "tokens": True, "timeout_s": 9}
    assert (chat["messages"], chat["temperature"], chat["seed"]) == (CHAT, 0.5, 3)


def test_the_number_of_layers_is_asked_of_the_server(http_server: HttpServer) -> None:
    assert HttpClient(http_server.url, api_key="k").num_layers() == NUM_LAYERS
    assert http_server.keys == ["Bearer k"]
    http_server.models = b'{"data": [{"id": "another server"}]}'
    with pytest.raises(TideClientError, match="not from TIDE Serve"):
        HttpClient(http_server.url).num_layers()


@pytest.mark.parametrize(
    ("pieces", "text", "kind", "said"),
    [
        (WHOLE[:3], "The cat sat", BrokenStreamError, "ended after 3 tokens without a final message"),
        ((*WHOLE[:1], ERROR), "The", StatusError, "ERROR after 1 token: scripted failure"),
        ((WHOLE[0], DONE), "The", BrokenStreamError, "not from TIDE Serve"),
        ((WHOLE[0], b"data: {broken\n\n"), "The", BrokenStreamError, "not from TIDE Serve"),
        ((b'data: {"choices": 3}\n\n',), "", BrokenStreamError, "not from TIDE Serve"),
        ((b"<html>hello</html>",), "", BrokenStreamError, "ended after 0 tokens"),
    ],
)
def test_a_stream_that_is_not_whole_is_told_so(
    http_server: HttpServer, pieces: tuple[bytes, ...], text: str, kind: type[Exception], said: str
) -> None:
    http_server.pieces = pieces
    stream = HttpClient(http_server.url).stream("Say")
    seen, error = failure_of(stream)
    assert (seen, type(error)) == (text, kind)
    assert said in str(error)
    assert failure_of(stream) == ("", error)


def test_a_connection_that_breaks_is_a_broken_stream(http_server: HttpServer) -> None:
    http_server.pieces, http_server.cuts = WHOLE[:1], True
    seen, error = failure_of(HttpClient(http_server.url).stream("Say"))
    assert (seen, type(error)) == ("The", BrokenStreamError)


@pytest.mark.parametrize(
    ("body", "said"),
    [(b'{"error": {"message": "max_tokens: got 0"}}', "max_tokens: got 0"), (b"<b>no</b>", "<b>no</b>"), (b"", "Bad")],
)
def test_a_refusal_is_told_in_the_words_of_the_server(http_server: HttpServer, body: bytes, said: str) -> None:
    http_server.refuses = (400, body)
    _, error = failure_of(HttpClient(http_server.url).stream("Say"))
    assert isinstance(error, StatusError)
    assert error.code == "HTTP 400"
    assert said in error.details


def test_a_server_that_is_not_there_is_unavailable(http_server: HttpServer) -> None:
    url = http_server.url
    http_server.__exit__()
    _, error = failure_of(HttpClient(url).stream("Say"))
    assert str(error) == "UNAVAILABLE: Connection refused"


def test_the_deadline_holds_for_the_whole_stream(http_server: HttpServer) -> None:
    http_server.pieces, http_server.hangs = WHOLE[:1], True
    seen, error = failure_of(HttpClient(http_server.url).stream("Say", timeout_s=10.0))
    assert (seen, str(error)) == ("The", "DEADLINE_EXCEEDED after 1 token: nothing came within 10 s")


def test_leaving_the_with_of_a_stream_ends_it_on_the_server(http_server: HttpServer) -> None:
    http_server.pieces, http_server.hangs = WHOLE[:1], True
    with HttpClient(http_server.url).stream("Say") as stream:
        assert next(stream).text == "The"
    assert http_server.gone.get(timeout=PATIENCE_S) == "gone"
    assert list(stream) == []


def test_another_thread_may_close_a_stream_that_waits(http_server: HttpServer) -> None:
    http_server.pieces, http_server.hangs = WHOLE[:1], True
    stream = HttpClient(http_server.url).stream("Say")
    assert next(stream).text == "The"
    threading.Timer(0.2, stream.close).start()
    assert list(stream) == []


def test_a_long_event_is_one_event(http_server: HttpServer) -> None:
    http_server.pieces = (event(*TOKENS * 1000), *WHOLE[1:])
    stream = HttpClient(http_server.url).stream("Say")
    assert len(list(stream)) == 4003


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://here",
        "http://",
        "http://here:port",
        "file:///etc/hosts",
        "",
        "http://[::1",
        "http://a/b c",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadValueError, match="expected one such as http://"):
        HttpClient(url)


@pytest.mark.parametrize("options", [{"logprobs": 1}, {"request_id": "r"}, {"temperature": float("nan")}])
def test_what_cannot_be_asked_over_http_is_refused(options: Any) -> None:
    with pytest.raises(BadValueError):
        HttpClient("http://127.0.0.1:1").stream("Say", **options)
