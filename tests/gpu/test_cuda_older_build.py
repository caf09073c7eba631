"""A CUDA module that was built for an older architecture than the GPU has gives the right results on it.

The driver translates its PTX, in which the kernels of the newer architecture are empty: they must not be chosen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pybind11
import pytest
import torch

from tide_core.kernels import cuda_unsupported_reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(cuda_unsupported_reason() is not None, reason=str(cuda_unsupported_reason())),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler"),
]
ROOT = Path(__file__).parents[2]
TESTS = (
    "test_cuda_ops.py",
    "test_cuda_attention.py",
    "test_cuda_linear_rows.py",
    "test_cuda_fp8.py",
    "test_cuda_draw.py",
)
OLDER = {8: 75, 9: 80, 10: 90, 11: 90, 12: 90}


@pytest.fixture(scope="module")
def older() -> tuple[int, Path]:
    """The architecture of the step below this GPU's, and a module that was built for it alone."""
    arch = OLDER[torch.cuda.get_device_capability()[0]]
    build = ROOT / "build" / f"cuda-{arch}"
    configure = [
        *("cmake", "-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        *("-DTIDE_CUDA=ON", f"-DTIDE_CUDA_ARCHS={arch}"),
    ]
    for command in (configure, ["cmake", "--build", str(build), "--target", "_cuda"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return arch, next(path for suffix in EXTENSION_SUFFIXES if (path := build / "cuda" / f"_cuda{suffix}").exists())


def test_every_op_is_right_in_a_build_for_an_older_architecture(older: tuple[int, Path]) -> None:
    arch, module = older
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TIDE_TEST_CUDA_MODULE": str(module), "PYTHONPATH": os.pathsep.join(paths)}
    asked = "import torch, tests.gpu.older_build; from tide_core.kernels.select import loaded_architecture as loaded; "
    asked += "print(loaded(torch.device('cuda')))"
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    assert done.stdout.split() == [str(arch)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-p", "tests.gpu.older_build", *(str(ROOT / "tests" / "gpu" / name) for name in TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
