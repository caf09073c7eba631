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
