"""Ctrl-C in a process of its own, without the weight of a model."""

from __future__ import annotations

import signal
import subprocess
import sys

SCRIPT = """
import time
from tests.cli.fake_engine import FakeEngine, outputs
from tide_core.cli import main, runs

class Slow(FakeEngine):
    def stream_blocking(self, prompt, params):
        yield outputs(["Hel", "lo"])[0]
        time.sleep(60)

    def __exit__(self, *exc_info):
        print("closing", flush=True)
        time.sleep(CLOSE_S)

runs.open_engine = lambda config: Slow([])
raise SystemExit(main(["generate", "Say"]))
"""


def start(close_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("CLOSE_S", str(close_s))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def interrupt_after(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert process.stdout.read(len(text)) == text
    process.send_signal(signal.SIGINT)


def test_the_first_ctrl_c_closes_the_engine_and_ends_with_130() -> None:
    process = start(close_s=0)
    interrupt_after(process, "Hel")
    assert process.communicate(timeout=30) == ("closing\n", "")
    assert process.returncode == 130


def test_a_second_ctrl_c_ends_at_once() -> None:
    process = start(close_s=60)
    interrupt_after(process, "Hel")
    interrupt_after(process, "closing\n")
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130
