"""Every kernel test starts from the same seed and leaves the thread count as it found it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

import pytest
import torch

_NATIVE = "tide_core.kernels._native"


@pytest.fixture(autouse=True)
def seed_and_restore_threads() -> Iterator[None]:
    torch.manual_seed(0)
    native = importlib.import_module(_NATIVE) if importlib.util.find_spec(_NATIVE) else None
    before = native.num_threads() if native else 0
    yield
    if native:
        native.set_num_threads(before)


@pytest.fixture(params=["baseline", "avx2", "avx512", "vnni", "amx", "dotprod"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each one that this machine has, while the test runs."""
    native, name = importlib.import_module(_NATIVE), str(request.param)
    if name not in native.instruction_sets():
        pytest.skip(f"this machine, its system or the compiler of the module has no {name}")
    before = native.instruction_set()
    native.set_instruction_set(name)
    yield name
    native.set_instruction_set(before)
