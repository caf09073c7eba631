"""A file of prompts: read line by line, answered as one batch, refused by line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fake_engine import FakeEngine, outputs
from tests.factories import make_engine
from tide_core.cli.prompts import read_file
from tide_core.errors import RequestError
from tide_core.request import RequestOutput, SamplingParams

Tide = Callable[..., tuple[int, str, str]]
UseEngine = Callable[..., Any]


def write(tmp_path: Path, raw: str | bytes, name: str = "prompts.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return path


def test_text_lines_are_prompts_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    items = read_file(write(tmp_path, "\ufeffone \r\n\n   \n two"))
    assert [item.prompt for item in items] == ["one ", " two"]
    assert [item.where.rsplit(" ", 1)[1] for item in items] == ["1", "4"]


def test_json_lines_hold_a_prompt_or_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = write(tmp_path, f'{{"prompt": "a\\nb"}}\n\n{json.dumps({"messages": messages})}\n', "p.jsonl")
    assert [item.prompt for item in read_file(path)] == ["a\nb", messages]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        "{}",
        '{"promt": "x"}',
        '{"prompt": "x", "messages": []}',
        '{"prompt": "x", "max_tokens": 4}',
        '{"prompt": 3}',
        '{"prompt": " "}',
        '{"prompt": null}',
        '{"messages": []}',
        '{"messages": "hi"}',
        '{"messages": [1, 2, 3]}',
        "[" * 100_000,
        "1" * 5_000,
        b'{"prompt": "\xff"}',
    ],
    ids=lambda line: str(line)[:24],
)
def test_a_bad_line_names_its_file_and_number(tide: Tide, use_engine: UseEngine, tmp_path: Path, line: Any) -> None:
    engine = use_engine()
    raw = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, b'{"prompt": "fine"}\n\n' + raw + b"\n", "p.jsonl")
    code, out, err = tide("generate", "--file", str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"tide: error: {path} line 3")
    assert engine.settings is None


def test_a_prompt_the_engine_refuses_names_its_line_before_any_is_run(
    tide: Tide, use_engine: UseEngine, tmp_path: Path
) -> None:
    engine = use_engine()
    engine.refused["long"] = RequestError("prompt", "9 tokens", "fewer than 8 tokens")
    path = write(tmp_path, "fine\nlong\n")
    code, out, err = tide("generate", "--file", str(path))
    assert (code, out) == (2, "")
    assert err == f"tide: error: {path} line 2: prompt: got '9 tokens', expected fewer than 8 tokens\n"
    assert engine.prompts == []


@pytest.mark.parametrize(
    "make", [lambda p: p / "none", lambda p: p, lambda p: write(p, "\n \n")], ids=["missing", "folder", "empty"]
)
def test_a_missing_or_empty_file_or_a_folder_is_refused(
    tide: Tide, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    code, _, err = tide("generate", "--file", str(make(tmp_path)))
    assert code == 2
    assert err.startswith("tide: error: --file: got ")


class UnevenEngine(FakeEngine):
    """Ends the answers in the reverse order of the prompts, and knows how many were open at once."""

    max_open = 0
    num_open = 0

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__(outputs)
        self._ended = [asyncio.Event() for _ in range(3)]

    async def stream(self, prompt: Any, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        first, *others = outputs([f"{prompt}-", "end"])
        yield first
        for next_one in self._ended[int(prompt) + 1 :][:1]:
            await next_one.wait()
        for output in others:
            yield output
        self.num_open -= 1
        self._ended[int(prompt)].set()


def test_answers_are_printed_in_the_order_of_the_prompts(tide: Tide, use_engine: UseEngine, tmp_path: Path) -> None:
    engine = use_engine(UnevenEngine([]))
    path = write(tmp_path, "0\n1\n2\n")
    code, out, err = tide("generate", "--file", str(path))
    assert (code, err) == (0, "")
    assert out == "=== 1 ===\n0-end\n=== 2 ===\n1-end\n=== 3 ===\n2-end\n"
    assert engine.max_open == 3, "the prompts were not run together"


def test_json_lines_come_as_they_come_with_the_number_of_their_request(
    tide: Tide, use_engine: UseEngine, tmp_path: Path
) -> None:
    use_engine(UnevenEngine([]))
    _, out, _ = tide("generate", "--json", "--file", str(write(tmp_path, "0\n1\n2\n")))
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["request"] for line in lines if line["type"] == "final"] == [2, 1, 0]
    assert {line["request"]: line["text"] for line in lines if line["type"] == "final"} == {
        0: "0-end",
        1: "1-end",
        2: "2-end",
    }


def test_a_file_longer_than_the_queue_is_answered_whole(tide: Tide, use_engine: UseEngine, tmp_path: Path) -> None:
    use_engine(make_engine(max_rows=2, max_queued=3))
    path = write(tmp_path, "".join(f"cat {number}\n" for number in range(12)))
    code, out, err = tide("generate", "--json", "--max-tokens", "2", "--file", str(path))
    assert (code, err) == (0, "")
    assert out.count('"final"') == 12
