"""A pytest plugin: the CUDA module is the file that TIDE_TEST_CUDA_MODULE names, not the one of the package."""

from __future__ import annotations

import importlib.util
import os
import sys

_NAME = "tide_core.kernels._cuda"
_spec = importlib.util.spec_from_file_location(_NAME, os.environ["TIDE_TEST_CUDA_MODULE"])
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules[_NAME] = _module
