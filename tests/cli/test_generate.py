"""`tide generate` on a fake engine: what goes to standard output, and what each end means to the shell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fake_engine import outputs
from tests.factories import make_engine
from tide_core.errors import EngineDeadError, EngineError, ModelError, RequestError
from tide_core.request import FinishReason, RequestOutput, TokenOutput

Tide = Callable[..., tuple[int, str, str]]
UseEngine = Callable[..., Any]
Stdin = Callable[..., None]


def lines_of(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_standard_output_is_the_text_and_nothing_else(tide: Tide, use_engine: UseEngine) -> None:
    engine = use_engine()
    assert tide("generate", "Say") == (0, "Hello", "")
    assert engine.prompts == ["Say"]
    assert engine.closed


def test_text_is_flushed_piece_by_piece(use_engine: UseEngine, tide: Tide, monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine()
    calls: list[str] = []
    write, flush = sys.stdout.write, sys.stdout.flush
    monkeypatch.setattr(sys.stdout, "write", lambda text: calls.append(text) or write(text))
    monkeypatch.setattr(sys.stdout, "flush", lambda: calls.append("flush") or flush())
    tide("generate", "Say")
    assert calls[calls.index("Hel") + 1] == "flush"
    assert calls[calls.index("lo") + 1] == "flush"


def test_every_option_reaches_the_engine(tide: Tide, use_engine: UseEngine) -> None:
    engine = use_engine()
    options = (
        "--model some/where --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --stop a "
        "--stop b --mode full --logprobs 2 --ignore-eos --json --dtype bfloat16 --device cpu --threads 2 "
        "--max-rows 700 --min-layers 3 --artefact some/exits --drafts 5"
    )
    assert tide("generate", "Say", *options.split())[0] == 0
    params, settings = engine.params[0], engine.settings
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (7, 0.5, 0.9, 5, 0.1)
    assert (params.seed, params.stop, params.mode, params.logprobs, params.ignore_eos) == (
        3,
        ("a", "b"),
        "full",
        2,
        True,
    )
    assert (settings.model, settings.dtype, settings.device, settings.num_threads) == (
        "some/where",
        "bfloat16",
        "cpu",
        2,
    )
    assert (settings.max_rows, settings.artefact, settings.drafts) == (700, "some/exits", 5)
    assert params.min_layers == 3
    assert tide("generate", "Say", "--mode", "bounded", "--epsilon", "0.05", "--margin", "0.5")[0] == 0
    assert tide("generate", "Say", "--mode", "fast", "--threshold", "0.7")[0] == 0
    assert [(p.mode, p.epsilon, p.margin, p.threshold) for p in engine.params[1:]] == [
        ("bounded", 0.05, 0.5, None),
        ("fast", None, None, 0.7),
    ]


@pytest.mark.parametrize(
    ("options", "artefact"),
    [("", "auto"), ("--mode verified", "auto"), ("--mode full", "none"), ("--mode full --artefact x", "x")],
)
def test_mode_full_loads_no_exits_unless_they_are_named(
    tide: Tide, use_engine: UseEngine, options: str, artefact: str
) -> None:
    engine = use_engine()
    assert tide("generate", "Say", *options.split())[0] == 0
    assert engine.settings.artefact == artefact


def test_json_lines_hold_each_token_and_a_final_object(tide: Tide, use_engine: UseEngine) -> None:
    use_engine()
    code, out, err = tide("generate", "Say", "--json")
    *tokens, final = lines_of(out)
    assert (code, err) == (0, "")
    about = {"exit_layer": 4, "score": None, "audit": "verified", "gap": None, "mode": "full"}
    assert tokens == [
        {"type": "token", "request": 0, "index": 0, "id": 100, "text": "Hel", **about},
        {"type": "token", "request": 0, "index": 1, "id": 101, "text": "lo", **about},
    ]
    assert final == {
        "type": "final",
        "request": 0,
        "text": "Hello",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "output_tokens": 2, "cached_tokens": 1},
        "exits": {
            "by_layer": {"1": 1, "4": 1},
            "layers_run": 7,
            "layers_per_token": 3.5,
            "deep_passes": 1,
            "tokens_per_deep_pass": 2.0,
            "drafts": 3,
            "accepted": 1,
            "differing": 0,
            "acceptance": 0.3333,
        },
        "timings": {"queue_s": 0.1, "first_token_s": 0.2, "total_s": 0.5, "tokens_per_s": 4.0},
        "model": "fake",
        "mode": "full",
        "kernels": "none",
    }


def test_json_lines_stay_valid_for_any_text_and_any_number(tide: Tide, use_engine: UseEngine) -> None:
    text = 'a"\\\u2028\x00é😀\n'
    token = TokenOutput(5, text, 4, logprob=float("-inf"), top_logprobs=((5, -0.5), (6, float("-inf"))))
    use_engine([[RequestOutput("r", (token,), FinishReason.STOP, None)]])
    _, out, _ = tide("generate", "Say", "--json", "--logprobs", "2")
    first, final = lines_of(out)
    assert first["text"] == final["text"] == text
    assert first["logprob"] is None
    assert first["top_logprobs"] == [{"id": 5, "logprob": -0.5}, {"id": 6, "logprob": None}]
    assert final["usage"] is None


def test_dash_reads_standard_input_without_its_last_line_end(tide: Tide, use_engine: UseEngine, stdin: Stdin) -> None:
    engine = use_engine()
    stdin("two\nlinés\r\n".encode())
    assert tide("generate", "-")[0] == 0
    assert engine.prompts == ["two\nlinés"]


def test_chat_sends_one_user_message_from_the_argument_or_standard_input(
    tide: Tide, use_engine: UseEngine, stdin: Stdin
) -> None:
    engine = use_engine()
    stdin(b"from stdin\n")
    assert tide("generate", "--chat", "from argument") == (0, "Hello", "")
    assert tide("generate", "--chat") == (0, "Hello", "")
    assert engine.prompts == [[{"role": "user", "content": text}] for text in ("from argument", "from stdin")]


@pytest.mark.parametrize(
    "args", [(), ("Say", "--file", "x"), ("--chat", "--file", "x"), ("Say", "--chat", "--file", "x")], ids=str
)
def test_none_or_two_prompt_sources_are_refused(tide: Tide, use_engine: UseEngine, args: tuple[str, ...]) -> None:
    engine = use_engine()
    code, out, err = tide("generate", *args)
    assert (code, out) == (2, "")
    assert err.startswith("tide: error: prompt source: got ")
    assert engine.settings is None, "the model was loaded for nothing"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "nan"),
        ("--max-tokens", "0"),
        ("--top-p", "0"),
        ("--mode", "quick"),
        ("--logprobs", "1"),
        ("--epsilon", "0.1"),
        ("--margin", "0.1"),
        ("--threshold", "3"),
        ("--drafts", "99"),
    ],
)
def test_a_bad_value_is_one_line_and_code_2_before_the_model_is_loaded(
    tide: Tide, use_engine: UseEngine, option: str, value: str
) -> None:
    engine = use_engine()
    code, out, err = tide("generate", "Say", option, value)
    assert (code, out) == (2, "")
    assert err.startswith("tide: error: ")
    assert option.removeprefix("--").replace("-", "_") in err.replace("-", "_")
    assert err.count("\n") == 1
    assert engine.settings is None


@pytest.mark.parametrize("args", [("generate", "--nope"), ("generate", "x", "--seed", "a"), ("nope",), ()], ids=str)
def test_bad_usage_is_code_2_without_a_traceback(tide: Tide, args: tuple[str, ...]) -> None:
    code, _, err = tide(*args)
    assert code == 2
    assert "Traceback" not in err


def test_a_blank_prompt_is_refused(tide: Tide, use_engine: UseEngine, stdin: Stdin) -> None:
    use_engine()
    stdin(b"\n")
    assert tide("generate", "")[0] == 2
    assert tide("generate", "-")[0] == 2


def test_standard_input_that_is_not_utf8_is_refused(tide: Tide, use_engine: UseEngine, stdin: Stdin) -> None:
    use_engine()
    stdin(b"ab\xff")
    code, _, err = tide("generate", "-")
    assert code == 2
    assert "standard input" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("max_tokens", 9, "less"), 2),
        (ModelError("model", "x", "a model"), 2),
        (EngineDeadError("the engine\nloop died"), 1),
        (OSError(28, "No space left on device"), 1),
        (ValueError("a bug"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_exit_code_and_closes_the_engine(
    tide: Tide, use_engine: UseEngine, error: BaseException, code: int
) -> None:
    engine = use_engine([[*outputs(["Hel", "lo"])[:1], error]])
    got, out, err = tide("generate", "Say")
    assert (got, out) == (code, "Hel")
    assert "Traceback" not in err
    assert err.count("\n") == (0 if code > 128 else 1)
    assert engine.closed
    assert engine.num_aborted == 1


def test_an_answer_that_ends_in_an_error_is_code_1(tide: Tide, use_engine: UseEngine) -> None:
    failed = RequestOutput("r", (), FinishReason.ERROR, None, EngineError("numbers ran out"))
    use_engine([[failed]])
    code, out, err = tide("generate", "Say", "--json")
    assert code == 1
    assert lines_of(out)[0]["finish_reason"] == "error"
    assert lines_of(out)[0]["error"] == "numbers ran out"
    assert err == "tide: error: answer 1: numbers ran out\n"


def test_prompt_text_is_never_logged(tide: Tide, use_engine: UseEngine, tmp_path: Path) -> None:
    use_engine(make_engine())
    code, out, err = tide("generate", "the secret cat", "--max-tokens", "2", "-v")
    assert code == 0
    assert "secret" not in out + err


def test_the_tiny_engine_gives_one_text_by_every_way(tide: Tide, use_engine: UseEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "the cat sat"}\n')
    args = ("--max-tokens", "9", "--temperature", "1", "--seed", "5")
    texts = []
    for source in (("the cat sat",), ("the cat sat", "--json"), ("--file", str(file), "--json")):
        use_engine(make_engine())
        code, out, err = tide("generate", *source, *args)
        assert (code, err) == (0, "")
        if "--json" in source:
            *tokens, final = lines_of(out)
            assert "".join(token["text"] for token in tokens) == final["text"]
            assert len(tokens) == final["usage"]["output_tokens"] == 9
            out = final["text"]
        texts.append(out)
    assert texts[0]
    assert texts[0] == texts[1] == texts[2]
