"""`tide client` against a scripted server: what is asked, and what is shown of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client import scripted
from tests.client.scripted import FINAL, TEXT, TOKENS, GrpcServer, Script, chunk, fails
from tide.v1 import tide_pb2 as pb

Tide = Callable[..., tuple[int, str, str]]
Stdin = Callable[..., None]


def test_every_option_reaches_the_server(
    server: GrpcServer, script: Script, tide: Tide, tmp_path: Path, stdin: Stdin
) -> None:
    stdin(b"Say\n")
    key_file = tmp_path / "key"
    key_file.write_text("s3cret\n")
    options = (
        "--plain --max-tokens 7 --temperature 0.5 --seed 3 --mode bounded --epsilon 0.02 --margin 0.3 --application big"
    )
    more = ("--timeout", "9", "--api-key-file", str(key_file))
    assert tide("client", "-", "--address", server.address, *options.split(), *more)[:2] == (0, TEXT)
    [request] = script.requests
    assert (request.prompt, request.sampling_params.max_tokens, request.sampling_params.seed) == ("Say", 7, 3)
    assert (request.sampling_params.temperature, request.exits.epsilon, request.exits.mode) == (0.5, 0.02, 3)
    assert request.exits.margin == 0.3
    assert request.timeout_s == 9
    for metadata in script.metadata:
        assert (metadata["authorization"], metadata["application"]) == ("Bearer s3cret", "big")


def test_json_is_one_object_a_token_and_one_for_the_end(server: GrpcServer, tide: Tide) -> None:
    code, out, err = tide("client", "Say", "--address", server.address, "--json")
    *tokens, final = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert tokens[1] == {
        "type": "token",
        "index": 1,
        "id": 6,
        "text": " cat",
        "exit_layer": 1,
        "score": 0.75,
        "audit": "agreed",
        "mode": "bounded",
        "choice": 0,
        "gap": None,
    }
    assert [token["index"] for token in tokens] == [0, 1, 2, 3]
    assert (final["type"], final["text"], final["finish_reason"]) == ("final", TEXT, "stop")
    assert (final["exits"]["tokens_per_layer"], final["usage"]["completion_tokens"]) == ({"1": 2, "4": 2}, 4)


def two_choices(script: Script, context: Any) -> Any:
    for sequence, choice in enumerate((0, 1, 1, 0)):
        part = chunk(sequence, TOKENS[sequence], final=FINAL if sequence > 1 else None)
        part.choice = choice
        yield part


def test_choices_are_shown_one_after_another(server: GrpcServer, script: Script, tide: Tide) -> None:
    script.acts.extend([two_choices, two_choices])
    code, out, err = tide("client", "Say", "--address", server.address, "--n", "2")
    assert (code, out) == (0, "--- choice 0\nThe.\n--- choice 1\n cat sat\n")
    assert err.count("tide: ") == 2
    code, out, err = tide("client", "Say", "--address", server.address, "-n", "2", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["type"], line["choice"], line.get("index")) for line in lines] == [
        *(("token", 0, 0), ("token", 1, 0), ("token", 1, 1), ("token", 0, 1)),
        *(("final", 0, None), ("final", 1, None)),
    ]
    assert [request.n for request in script.requests] == [2, 2]


def test_tools_come_from_a_file(server: GrpcServer, script: Script, tide: Tide, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"type": "function", "function": {"name": "weather"}}]))
    asked = ["client", "Rome?", "--address", server.address, "--json", "--tools", str(file)]
    for choice in ("required", "weather"):
        code, out, err = tide(*asked, "--tool-choice", choice)
        assert (code, err) == (0, "")
        assert json.loads(out.splitlines()[-1])["tool_calls"] == []
    first, second = script.requests
    assert [tool.name for tool in first.chat.tools] == ["weather"]
    assert (first.tool_choice.mode, second.tool_choice.name) == (pb.TOOL_MODE_REQUIRED, "weather")


def test_a_bench_prints_times_and_no_text(server: GrpcServer, script: Script, tide: Tide) -> None:
    code, out, err = tide("client", "Say", "--address", server.address, "--bench", "3", "--json")
    assert (code, err) == (0, "")
    times = json.loads(out)
    assert (times["type"], times["streams"], times["tokens"], len(script.requests)) == ("bench", 3, 12, 3)
    assert times["tokens_per_s"] > 0


def test_an_answer_that_breaks_is_one_line_and_exit_code_1(server: GrpcServer, script: Script, tide: Tide) -> None:
    script.acts.append(scripted.skips)
    code, out, err = tide("client", "Say", "--address", server.address)
    assert (code, out) == (1, "The")
    assert err == f"tide: error: {server.address}: chunk 2 came where 1 was next\n"


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "UNAUTHENTICATED"])
def test_what_the_server_refuses_is_exit_code_2(server: GrpcServer, script: Script, tide: Tide, status: str) -> None:
    script.acts.append(fails(status))
    code, out, err = tide("client", "Say", "--address", server.address)
    assert (code, out) == (2, "")
    assert err == f"tide: error: {server.address}: {status}: scripted {status}\n"
