"""Build the native modules with the tools of this environment and put them beside their Python wrappers.

The CUDA module takes minutes, so it is built only where there is a GPU to run it, or where TIDE_CUDA in the environment
says so; docs/building.md names the settings.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

BUILD = "build/native"


def has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def main() -> None:
    tools = Path(sys.executable).parent
    cmake = str(tools / "cmake")
    configure = [
        *(cmake, "-S", "csrc", "-B", BUILD, "-G", "Ninja"),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DTIDE_CUDA={os.environ.get('TIDE_CUDA') or ('AUTO' if has_gpu() else 'OFF')}",
        f"-DTIDE_CUDA_ARCHS={os.environ.get('TIDE_CUDA_ARCHS', '')}",
    ]
    for command in (configure, [cmake, "--build", BUILD], [cmake, "--install", BUILD, "--prefix", "."]):
        subprocess.run(command, check=True)  # noqa: S603


if __name__ == "__main__":
    main()
