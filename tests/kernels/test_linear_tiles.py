"""The bfloat16 linear of the tile unit (AMX), on a software model of the unit: it runs where no such processor is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).parent / "tile_model"
SOURCES = ("cpu/kernels/linear_tiles.cpp", "cpu/ops/linear_tiles.cpp", "cpu/ops/thread_pool.cpp")


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("tile_model") / "check"
    # The model's folder first: its cpu/kernels/tile_ops.h hides the real one.
    options = ("-std=gnu++17", "-O1", "-Wno-psabi", "-ffp-contract=off", "-pthread", "-DTIDE_ISA=model")
    command = [compiler, *options, f"-I{MODEL}", f"-I{ROOT / 'csrc'}", str(MODEL / "check.cpp")]
    command += [str(ROOT / "csrc" / source) for source in SOURCES]
    with_sanitizer = [*command, "-fsanitize=address", "-o", str(program)]
    if subprocess.run(with_sanitizer, capture_output=True, check=False).returncode:  # not every compiler has it
        subprocess.run([*command, "-o", str(program)], check=True)
    return program


def disagreement(check: Path, numbers: str, *sizes: int) -> str:
    # The pool's threads are never joined; looking for leaks takes seconds.
    quick = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [str(check), numbers, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=quick)
    return "" if done.returncode == 0 else done.stdout + done.stderr


SHAPES = [(32, 16), (1, 1), (33, 17), (576, 96), (0, 7), (515, 81), (64, 200)]
NUMBERS = ["ordinary", "cancelling", "tiny"]


# Every number of rows with a third of the shapes, each time others.
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [
        (rows, *shape)
        for number, rows in enumerate((1, 2, 5, 15, 16, 17, 32, 33, 50))
        for place, shape in enumerate(SHAPES)
        if (number + place) % 3 == 0
    ],
)
def test_every_output_is_summed_in_one_order_whatever_the_rows(
    check: Path, rows: int, in_features: int, out_features: int
) -> None:
    numbers = NUMBERS[(rows + out_features) % 3]
    assert not disagreement(check, numbers, 1, rows, in_features, out_features, rows % 2)


@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize(("in_features", "out_features"), [(4096, 50), (700, 150), (14336, 33)])
def test_strips_of_long_rows_change_no_order(check: Path, rows: int, in_features: int, out_features: int) -> None:
    assert not disagreement(check, "cancelling", 1, rows, in_features, out_features, 0)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 20, 70, 300])
def test_the_number_of_threads_changes_no_order(check: Path, threads: int, rows: int) -> None:
    assert not disagreement(check, "cancelling", threads, rows, 320, 600, 1)
