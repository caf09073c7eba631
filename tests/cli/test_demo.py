"""The real command on the demo model, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.demo
COMMAND = [sys.executable, "-m", "tide_core.cli", "generate", "--model", "demo"]
PROMPT = "The capital of France is"
Start = Callable[[list[str]], subprocess.Popen[str]]


def test_the_capital_of_france_is_paris_as_text_and_as_json_lines() -> None:
    text = subprocess.run([*COMMAND, PROMPT, "--max-tokens", "8"], capture_output=True, text=True)
    assert (text.returncode, text.stderr) == (0, "")
    assert "Paris" in text.stdout

    lines = subprocess.run([*COMMAND, PROMPT, "--max-tokens", "8", "--json"], capture_output=True, text=True)
    assert (lines.returncode, lines.stderr) == (0, "")
    *tokens, final = (json.loads(line) for line in lines.stdout.splitlines())
    assert "".join(token["text"] for token in tokens) == final["text"] == text.stdout
    assert {token["exit_layer"] for token in tokens} == {30}
    assert final["usage"]["output_tokens"] == len(tokens) == 8


def test_ctrl_c_midway_is_130_without_a_traceback(start: Start) -> None:
    process = start([*COMMAND, PROMPT, "--max-tokens", "4000", "--ignore-eos"])
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_a_closed_pipe_ends_it_quietly(start: Start) -> None:
    process = start([*COMMAND, PROMPT, "--max-tokens", "4000", "--ignore-eos"])
    assert process.stdout is not None
    assert process.stderr is not None
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    began = time.monotonic()
    assert process.wait(timeout=60) == 141
    assert time.monotonic() - began < 20
    assert process.stderr.read() == ""
