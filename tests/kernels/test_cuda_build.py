"""The CUDA module builds where there is a compiler, and stands alone: it loads without a GPU, a driver or Torch's CUDA.

The build is that of one architecture and is kept in build/, so that only the first run takes its time; a fifth of it,
as nobody will run the code: nothing is optimised that need not be, and a compiler reads several sources at once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "cuda-test"
NVCC = shutil.which(os.environ.get("CUDACXX", "nvcc"))

# Every op through its wrapper and the module's own conversion of arguments, on tensors of the CPU: without a device the
# launch fails, and the error names the op.
CALL_EVERY_OP = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("tide_core.kernels._cuda", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print("devices", module.device_count(), "architectures", module.architectures())
if module.device_count() == 0:
    from tests.kernels.cycle_arguments import cycle_arguments
    from tests.kernels.test_cuda_checks import ARGUMENTS
    from tests.kernels.test_cuda_fp8 import FP8_OPS
    from tests.kernels.test_row_op_checks import ROW_OPS
    from tide_core.kernels.cuda import adjust, attention, branches, cycle, draw, exits, fp8, joined, ops
    for wrappers in (adjust, attention, branches, cycle, draw, exits, fp8, joined, ops):
        wrappers.device_of = lambda tensor: tensor.device
        wrappers.module = lambda: module
        wrappers.launch = lambda device, op, *arguments, counters=None: getattr(module, op)(*arguments, 0)
    def of_a_cycle(run, op):
        return op, lambda: run(*cycle_arguments("cpu")[op])
    def copy_slots(pools, block_size, *slots):
        branches.slot_copier(pools, block_size)(*slots)
    calls = [(op, lambda op=op: getattr(ops, op)(**ARGUMENTS[op]())) for op in ARGUMENTS]
    calls += [of_a_cycle(getattr(cycle, op), op) for op in ("plan_cycle", "pending_tokens")]
    calls += [of_a_cycle(branches.nth_best, "nth_best"), of_a_cycle(copy_slots, "copy_slots")]
    calls += [of_a_cycle(draw.draw, "draw"), of_a_cycle(draw.verify_drawn, "verify_drawn")]
    more = {**ROW_OPS, **FP8_OPS}
    calls += [(op, lambda run=run, arguments=arguments: run(**arguments())) for op, (run, arguments) in more.items()]
    for op, call in calls:
        try:
            call()
        except RuntimeError as error:
            print(op, "->", error)
    print(" ".join(sorted({op for op, _ in calls})))
"""


def tool(name: str) -> str:
    own = Path(sys.executable).parent / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture(scope="module")
def built() -> Path:
    if NVCC is None:
        pytest.skip("no CUDA compiler")
    options = subprocess.run([NVCC, "--help"], capture_output=True, text=True).stdout
    quick = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CUDA_FLAGS_DEBUG=", "-DCMAKE_CXX_FLAGS_DEBUG="]
    if "--Ofast-compile" in options:
        quick.append("-DCMAKE_CUDA_FLAGS=--Ofast-compile=max")
    configure = [
        *(tool("cmake"), "-S", str(ROOT / "csrc"), "-B", str(BUILD), "-G", "Ninja"),
        *quick,
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        *("-DTIDE_CUDA=ON", "-DTIDE_CUDA_ARCHS=90"),
        *("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=16", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"),
    ]
    for command in (configure, [tool("cmake"), "--build", str(BUILD), "-j2", "--target", "_cuda"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    suffix = next(suffix for suffix in EXTENSION_SUFFIXES if (BUILD / "cuda" / f"_cuda{suffix}").exists())
    return BUILD / "cuda" / f"_cuda{suffix}"


def binaries(module: Path) -> Iterator[tuple[str, int]]:
    """The kind and architecture of each piece of device code in a file, as `cuobjdump -lelf -lptx` lists them."""
    data, container = module.read_bytes(), struct.pack("<I", 0xBA55ED50)
    at = data.find(container)
    while at >= 0:
        header_size, size = struct.unpack_from("<HQ", data, at + 6)
        at, end = at + header_size, at + header_size + size
        while at < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, at)
            yield {1: "ptx", 2: "cubin"}.get(kind, str(kind)), struct.unpack_from("<I", data, at + 28)[0]
            at += entry_header + entry_size
        at = data.find(container, end)


def compiled() -> list[list[Path]]:
    """The sources of device code in each file that the compiler was given."""
    found = []
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        path = Path(entry["file"])
        if path.suffix == ".cu":
            names = re.findall(r'#include "(.+\.cu)"', path.read_text()) if path.is_relative_to(BUILD) else [path]
            found.append([Path(name) for name in names])
    return found


@pytest.mark.timeout(1800)
def test_every_source_becomes_code_for_the_architecture_that_was_asked_for(built: Path) -> None:
    sources = [path for path in (ROOT / "csrc" / "cuda").glob("*/*.cu") if path.parent.name != "bench"]
    sources = [path for path in sources if path.name != "without_sm90a.cu"]
    together = compiled()
    assert sorted(path for paths in together for path in paths) == sorted(sources)
    only_90a = [["sm90a" in path.name for path in paths] for paths in together]  # without PTX
    assert all(len(set(of_one)) == 1 for of_one in only_90a)
    everywhere = sum(not of_one[0] for of_one in only_90a)
    assert 0 < everywhere < len(together)
    assert sorted(binaries(built)) == sorted([("cubin", 90)] * len(together) + [("ptx", 90)] * everywhere)


@pytest.mark.timeout(1800)
def test_the_module_loads_without_a_gpu_and_takes_what_every_wrapper_passes(built: Path) -> None:
    script = [sys.executable, "-c", CALL_EVERY_OP, str(built)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, *calls = done.stdout.splitlines()
    if not first.startswith("devices 0"):
        pytest.skip("there is a GPU, where tests/gpu calls the ops")
    asked = calls.pop().split()
    assert first == "devices 0 architectures 90"
    named = [re.match(r"(\w+) -> (\w+): .*CUDA", line) for line in calls]
    assert all(named), calls
    kernels = {"rotary": "rotary_write", "write_kv": "rotary_write"}
    assert all(match[2] == kernels.get(match[1], match[1]) for match in named if match)
    assert sorted(match[1] for match in named if match) == asked
    bindings = (ROOT / "csrc" / "cuda" / "bindings.cpp").read_text().split("m.def(")[1:]
    launching = {re.findall(r'"(\w+)"', one)[0] for one in bindings if "no_gil" in one}
    assert launching == {kernels.get(op, op) for op in asked}, "every op, and no other"


@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
def test_the_module_brings_its_own_runtime_and_shows_none_of_it(built: Path) -> None:
    dump = subprocess.run(["readelf", "-d", "--dyn-syms", "-W", built], capture_output=True, text=True, check=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dump.stdout)
    assert needed
    assert not [library for library in needed if re.match(r"lib(cuda|torch|c10|python|gomp)", library)]
    assert not re.findall(r" (?:GLOBAL|WEAK) +DEFAULT +\d+ (cuda\w+)", dump.stdout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"TIDE_CUDA": "MAYBE"}, "TIDE_CUDA: got 'MAYBE', expected AUTO, ON or OFF"),
        ({"TIDE_CUDA": "ON", "TIDE_CUDA_ARCHS": "9.0"}, "TIDE_CUDA_ARCHS: got '9.0', expected numbers such as 90;100"),
        ({"TIDE_CUDA": "OFF"}, "CUDA module: left out (TIDE_CUDA is OFF)"),
    ],
)
def test_a_setting_may_come_from_the_environment_and_a_wrong_one_is_named(
    tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    configure = [
        *(tool("cmake"), "-S", str(ROOT / "csrc"), "-B", str(tmp_path), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    done = subprocess.run(configure, capture_output=True, text=True, env={**os.environ, **settings})
    assert (done.returncode == 0) == (settings["TIDE_CUDA"] == "OFF")
    assert message in " ".join((done.stdout + done.stderr).split())
