"""The quick start: what it leaves out, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.runners import HANG_S
from tests.evaluation.on_disk import save_model
from tests.factories import make_config
from tide_core.cli import runs
from tide_core.errors import ModelError
from tide_core.models.quick_start import quick_start

OPEN = """
import sys
from tide_core.cli import runs
from tide_core.config import EngineConfig
from tide_core.request import SamplingParams

settings = {"device": "cpu", "kv_memory_gib": 0.01, "artefact": "none", "suffix_drafts": False}
with runs.open_engine(EngineConfig(model=sys.argv[1], **settings)) as engine:
    [answer] = engine.generate([[2, 3, 4]], SamplingParams(max_tokens=2, ignore_eos=True))
print(len(answer.tokens), *(name in sys.modules for name in ("torch._dynamo", "torch.distributed.tensor")))

import gc, torch
print(gc.isenabled(), torch.distributed.is_available(), "_dynamo" in vars(torch))
print(torch._dynamo.config.__name__, torch.compiler.disable(abs) is abs)
"""

MARKS = """
import sys, torch
from tide_core.models.quick_start import quick_start

def plain():
    return 1

with quick_start():
    assert torch.compiler.disable(plain) is plain
    assert torch.compiler.disable(recursive=False)(plain) is plain
    assert "torch._dynamo.config" not in sys.modules
    print(torch._dynamo.config.__name__, torch.compiler.disable(plain) is plain)
"""


def output_of(code: str, *args: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_an_engine_is_opened_without_the_compiler_which_works_as_ever_afterwards(tmp_path: Path) -> None:
    answered, left, after = output_of(OPEN, str(save_model(tmp_path / "model")))
    assert answered == "2 False False"
    assert left == "True True False"
    assert after == "torch._dynamo.config False"


def test_whoever_needs_more_of_the_compiler_than_its_marks_gets_it() -> None:
    assert output_of(MARKS) == ["torch._dynamo.config False"]


def test_files_are_looked_for_while_torch_is_imported_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def find(model: str, **form: bool) -> None:
        begun.set()
        raise ModelError("model", model, "enough is known")

    @contextlib.contextmanager
    def start() -> Iterator[None]:
        assert begun.wait(HANG_S), "Torch is imported from here on"
        yield

    monkeypatch.setattr(runs, "find_here", find)
    monkeypatch.setattr(runs, "quick_start", start)
    with pytest.raises(ModelError, match="enough is known"):
        runs.open_engine(make_config())


def test_a_model_that_is_not_there_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="an existing folder"):
        runs.open_engine(make_config(model=str(tmp_path / "nothing")))


def test_two_threads_leave_everything_as_it_was() -> None:
    """If both were in it at once, the second would leave what the first had put there."""
    known, entered, left = torch.distributed.is_available, threading.Event(), threading.Event()

    def second() -> None:
        with quick_start():
            entered.set()
            assert left.wait(HANG_S)

    thread = threading.Thread(target=second)
    with quick_start():
        thread.start()
        assert not entered.wait(0.5)
    left.set()
    thread.join(HANG_S)
    assert entered.is_set()
    assert torch.distributed.is_available is known


def test_a_collector_that_rests_goes_on_resting() -> None:
    gc.disable()
    try:
        with quick_start(), quick_start():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
