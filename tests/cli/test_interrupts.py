"""Ctrl-C and a closed pipe in a process of its own, without the weight of a model."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

SCRIPT = """
import contextlib, time
from tests.cli.fake_engine import FakeEngine, outputs
from tide_core.cli import main, runs

class Slow(FakeEngine):
    def stream_blocking(self, prompt, params):
        yield outputs(["Hel", "lo"])[0]
        while ENDLESS:
            yield outputs(["Hel", "lo"])[0]
        time.sleep(60)

    def __exit__(self, *exc_info):
        print("closing", flush=True)
        while not CLOSES:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(60)

runs.open_engine = lambda config: Slow([])
raise SystemExit(main(["generate", "Say"]))
"""


Start = Callable[[list[str]], subprocess.Popen[str]]


def command(*, closes: bool, endless: bool = False) -> list[str]:
    script = SCRIPT.replace("CLOSES", str(closes)).replace("ENDLESS", str(endless))
    return [sys.executable, "-c", script]


def interrupt_after(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert process.stdout.read(len(text)) == text
    process.send_signal(signal.SIGINT)


def test_the_first_ctrl_c_closes_the_engine_and_ends_with_130(start: Start) -> None:
    process = start(command(closes=True))
    interrupt_after(process, "Hel")
    assert process.communicate(timeout=120) == ("closing\n", "")
    assert process.returncode == 130


def test_a_second_ctrl_c_ends_at_once_even_if_closing_hangs(start: Start) -> None:
    process = start(command(closes=False))
    interrupt_after(process, "Hel")
    interrupt_after(process, "closing\n")
    assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 130


def test_a_closed_pipe_ends_it_quietly_with_141(start: Start) -> None:
    process = start(command(closes=True, endless=True))
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(3) == "Hel"
    process.stdout.close()
    assert (process.wait(timeout=120), process.stderr.read()) == (141, "")
    process.stdout = None  # it is closed: there is nothing more to read
