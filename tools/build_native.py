"""Build the native module with the tools of this environment and put it beside its Python wrapper."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pybind11

BUILD = "build/native"


def main() -> None:
    tools = Path(sys.executable).parent
    cmake = str(tools / "cmake")
    configure = [
        *(cmake, "-S", "csrc", "-B", BUILD, "-G", "Ninja"),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    for command in (configure, [cmake, "--build", BUILD], [cmake, "--install", BUILD, "--prefix", "."]):
        subprocess.run(command, check=True)  # noqa: S603


if __name__ == "__main__":
    main()
