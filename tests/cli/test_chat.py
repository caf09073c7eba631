"""The chat on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cli.fake_engine import outputs
from tide_core.errors import RequestError

Tide = Callable[..., tuple[int, str, str]]
UseEngine = Callable[..., Any]
Stdin = Callable[..., None]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_each_turn_sees_the_whole_conversation(tide: Tide, use_engine: UseEngine, stdin: Stdin) -> None:
    engine = use_engine([outputs(["Hi", "!"]), outputs(["You", " said hi"])])
    stdin(b"hello\n\nwhat did I say?\n", terminal=True)
    code, out, err = tide("generate", "--chat")
    assert (code, out) == (0, "Hi!You said hi")
    assert engine.prompts == [[user("hello")], [user("hello"), assistant("Hi!"), user("what did I say?")]]
    assert "/exit" in err


def test_exit_ends_and_clear_forgets(tide: Tide, use_engine: UseEngine, stdin: Stdin) -> None:
    engine = use_engine()
    stdin(b"one\n/clear\ntwo\n/exit\nthree\n", terminal=True)
    assert tide("generate", "--chat")[0] == 0
    assert engine.prompts == [[user("one")], [user("two")]]
    assert engine.closed


def test_a_refused_message_is_told_and_forgotten(tide: Tide, use_engine: UseEngine, stdin: Stdin) -> None:
    engine = use_engine()
    engine.refused[str([user("long")])] = RequestError("prompt", "9 tokens", "fewer than 8 tokens")
    stdin(b"long\nshort\n", terminal=True)
    code, out, err = tide("generate", "--chat")
    assert (code, out) == (0, "Hello")
    assert "tide: error: prompt: got '9 tokens'" in err
    assert engine.prompts == [[user("short")]]
