"""Linears on a software model of a GPU's lanes: E4M3 weights give the bits of the matrix that they stand for.

The sources are the real ones; `lane_model/` has copies, barriers, matrix loads, products and the copy engine in place
of the instructions, and runs the CTAs of a cluster together. Sums within a product are the model's own, so bits are
compared on the model alone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).parent / "lane_model"
TILES = ("1", "2", "1short", "2short")
"""Tiles of 8 rows of x: weight tiles, and whether all of x is asked for at once."""
STAGED = ("1x1", "2x2", "3x1", "4x1", "3x4", "2x8")
"""Through shared memory: weight tiles x tiles of 8 rows; stages of 4x1 and 2x8 have 32 columns, the others 64."""
WIDE = ("wide 32", "wide 64", "wide 128")
OF_HALF_WIDTH = ("3x64/1", "3x128/1", "1x32/2", "2x32/2", "1x64/2", "2x64/2", "2x64/3", "2x128/3")
"""Groups of four warps x rows of x / CTAs of a cluster that split the slices."""
THIN = ("thin 1x2x8", "thin 1x2x16", "thin 2x1x32", "thin 1x4x32", "thin 1x2x64")
"""Groups of four warps for the rows of the weight x groups that share the slices x rows of x."""
ROWS_SCALED, ALL_COLUMNS = 1, 31


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, nvcc = shutil.which("c++"), shutil.which("nvcc")
    folders = [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    include = next((f for f in (*folders, Path("/usr/local/cuda/include")) if (f / "cuda_bf16.h").exists()), None)
    if compiler is None or include is None:
        pytest.skip("no C++ compiler or no CUDA headers")
    program = tmp_path_factory.mktemp("lane_model") / "check"
    command = [compiler, "-std=c++17", "-O1", "-w", "-include", str(MODEL / "lanes.h"), f"-I{MODEL}"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{include}"]
    subprocess.run([*command, str(MODEL / "check.cpp"), "-o", str(program)], check=True)
    return program


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", [*TILES, *STAGED, *WIDE, *THIN])
@pytest.mark.parametrize(
    ("rows", "columns", "outputs", "block_rows", "shift", "gated", "normed", "dealt"),
    [
        (3, 80, 21, ROWS_SCALED, ALL_COLUMNS, False, False, True),
        (9, 592, 56, 128, 7, True, False, True),
        (17, 1168, 37, 100, 6, False, True, False),
        (70, 528, 24, ROWS_SCALED, ALL_COLUMNS, True, True, True),
        (20, 1040, 136, 128, 7, False, False, False),
        (10, 1296, 130, ROWS_SCALED, ALL_COLUMNS, False, False, True),
    ],
)
def test_e4m3_weights_give_the_bits_of_their_matrix(
    check: Path,
    kernel: str,
    rows: int,
    columns: int,
    outputs: int,
    block_rows: int,
    shift: int,
    gated: bool,
    normed: bool,
    dealt: bool,
) -> None:
    """Which are near those in double precision."""
    normed = normed and kernel not in (*WIDE, *THIN)  # never chosen with a norm
    shift = max(shift, 7) if kernel in THIN else shift  # nor those with scales of 64 columns
    assert_bits(check, kernel, rows, columns, outputs, block_rows, shift, int(gated), int(normed), int(dealt))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernel", OF_HALF_WIDTH)
@pytest.mark.parametrize(("rows", "columns", "outputs", "gated"), [(140, 592, 104, True), (257, 1168, 21, False)])
def test_tiles_of_bfloat16_alone_give_the_bits_of_the_smallest(
    check: Path, kernel: str, rows: int, columns: int, outputs: int, gated: bool
) -> None:
    """The smallest has the weight in E4M3."""
    assert_bits(check, kernel, rows, columns, outputs, ROWS_SCALED, ALL_COLUMNS, int(gated), 0, 1)


def assert_bits(check: Path, kernel: str, *numbers: int) -> None:
    words = [kernel, *map(str, numbers)]
    done = subprocess.run([str(check), *words], capture_output=True, text=True, timeout=500, check=True)
    differ, off = done.stdout.split()
    assert int(differ) == 0
    assert float(off) < 0.02
