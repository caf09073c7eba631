from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tide_core import kernels
from tide_core.errors import ConfigError
from tide_core.kernels import select, select_kernels
from tide_core.kernels.reference import ops as reference

needs_native = pytest.mark.skipif(
    importlib.util.find_spec("tide_core.kernels._native") is None, reason="the native module is not built"
)


@pytest.fixture(autouse=True)
def forget_what_was_logged() -> Iterator[None]:
    select._log_once.cache_clear()
    select._import_error.cache_clear()
    yield
    select._log_once.cache_clear()
    select._import_error.cache_clear()


@pytest.fixture
def never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tide_core.kernels._native", None)


@needs_native
@pytest.mark.parametrize("choice", ["auto", "native"])
def test_native_is_taken_on_the_cpu(choice: str) -> None:
    chosen = select_kernels(choice, "cpu")
    assert chosen.name == "native"
    assert chosen.linear.__module__ == "tide_core.kernels.cpu.ops"


def test_reference_is_taken_when_asked_for() -> None:
    chosen = select_kernels("reference", torch.device("cpu"))
    assert (chosen.name, chosen.linear, chosen.rms_norm) == ("reference", reference.linear, reference.rms_norm)
    assert (chosen.write_kv, chosen.paged_attention) == (reference.write_kv, reference.paged_attention)


def test_auto_falls_back_to_the_reference_off_the_cpu() -> None:
    assert select_kernels("auto", "cuda:0").name == "reference"


def test_native_off_the_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kernels: got 'native'.*(CUDA module cannot be imported|no CUDA device)"):
        select_kernels("native", torch.device("cuda", 0))


@pytest.mark.usefixtures("never_built")
def test_native_that_was_never_built_is_refused_and_auto_falls_back() -> None:
    with pytest.raises(ConfigError, match="cannot be imported"):
        select_kernels("native", "cpu")
    assert select_kernels("auto", "cpu").name == "reference"
    kernels.set_num_threads(2)


def test_the_package_imports_without_the_native_module() -> None:
    script = (
        "import sys; sys.modules['tide_core.kernels._native'] = None; "
        "from tide_core.kernels import select_kernels; print(select_kernels('auto', 'cpu').name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "reference\n"


def test_an_unknown_choice_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="kernels: got 'fast', expected one of auto, native, reference"):
        select_kernels("fast", "cpu")


def test_the_log_says_once_what_was_taken_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tide"):
        for _ in range(3):
            select_kernels("auto", "meta")
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: reference, because the native kernels run on the cpu, not on meta"
    ]


@needs_native
def test_set_num_threads_reaches_the_native_module() -> None:
    from tide_core.kernels import _native

    kernels.set_num_threads(3)
    assert _native.num_threads() == 3
