from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cli.fake_engine import FakeEngine, outputs
from tide_core.cli import main, runs
from tide_core.config import EngineConfig


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """The command sets logging up for its process; a test is not its process."""
    root, tide = logging.getLogger(), logging.getLogger("tide")
    before = root.handlers[:], root.level, tide.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    tide.setLevel(before[2])


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let the command open an engine of ours: one given, or a fake that answers from a script."""

    def use(script: Any = None) -> Any:
        script = [outputs(["Hel", "lo"])] if script is None else script
        engine = FakeEngine(script) if isinstance(script, list) else script

        def open_engine(config: EngineConfig) -> Any:
            engine.settings = config
            return engine

        monkeypatch.setattr(runs, "open_engine", open_engine)
        return engine

    return use


@pytest.fixture
def tide(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `tide …` here; its exit code, standard output and standard error."""

    def run(*args: str) -> tuple[int, str, str]:
        code = main(args)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Start a process with Ctrl-C as on a terminal; it does not outlive its test."""
    started: list[subprocess.Popen[str]] = []

    def run(command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A test run in the background has Ctrl-C turned off, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def give(raw: bytes, *, terminal: bool = False) -> None:
        stream = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8")
        monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
        monkeypatch.setattr(sys, "stdin", stream)

    return give
