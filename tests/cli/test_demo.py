"""The real command on the demo model, as a user starts it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tide_core.engine.assemble import DEMO_ARTEFACT

pytestmark = pytest.mark.demo
COMMAND = [sys.executable, "-m", "tide_core.cli", "generate", "--model", "demo"]
PROMPT = "The capital of France is"
Start = Callable[[list[str]], subprocess.Popen[str]]


def test_json_lines_at_full_depth_have_every_token_with_the_last_layer() -> None:
    full = [*COMMAND, PROMPT, "--max-tokens", "8", "--mode", "full", "--json"]
    lines = subprocess.run(full, capture_output=True, text=True)
    assert (lines.returncode, lines.stderr) == (0, "")
    *tokens, final = (json.loads(line) for line in lines.stdout.splitlines())
    assert "Paris" in final["text"]
    assert "".join(token["text"] for token in tokens) == final["text"]
    assert {token["exit_layer"] for token in tokens} == {30}
    assert final["usage"]["output_tokens"] == len(tokens) == 8


@pytest.mark.skipif(not DEMO_ARTEFACT.is_dir(), reason="no artefact for the demo model")
def test_exits_are_shown_and_the_text_is_that_of_full_depth() -> None:
    words = ["--max-tokens", "32", "--show-exits", "--drafts", "4"]  # a busy machine may measure that none pays
    done = subprocess.run([*COMMAND, PROMPT, *words], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Paris" in done.stdout
    assert len(set(re.findall(r"\[(\d+)\]", done.stdout))) > 1
    assert re.search(r"verified [\d.]+ tok/s, full depth [\d.]+ tok/s: [\d.]+x, output identical", done.stderr)


def test_ctrl_c_midway_is_130_without_a_traceback(start: Start) -> None:
    process = start([*COMMAND, PROMPT, "--max-tokens", "4000", "--ignore-eos"])
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "")
