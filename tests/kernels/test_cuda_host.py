"""The host side of a CUDA launch, on a model of the runtime: which code runs, what overlaps, what is read early."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, product
from pathlib import Path

import pytest
import torch

from tests.gpu import test_cuda_linear_rows as half_width
from tests.gpu.test_cuda_fp8 import BY_BLOCK, BY_ROW, COUNTS, LINEARS
from tide_core.kernels.fp8 import FP8, PACKED
from tide_core.kernels.reference import cycle

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).parent / "host_model"
Words = Callable[[str], list[str]]
Answers = Callable[[str], list[bool]]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    """What is answered to the questions of a script, after the launches before them."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("host_model") / "check"
    command = [compiler, "-std=c++17", "-pthread", f"-I{MODEL}", f"-I{ROOT / 'csrc'}", str(MODEL / "check.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)

    def run(script: str) -> list[str]:
        done = subprocess.run([str(program), *script.split()], capture_output=True, text=True, timeout=300, check=True)
        return done.stdout.split()

    return run


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[str]]]:
    """The lines of a table of the host side, by word."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("host_model") / "tables"
    command = [compiler, "-std=c++17", f"-I{MODEL}", f"-I{ROOT / 'csrc'}", str(MODEL / "tables.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)

    def run(table: str) -> list[list[str]]:
        done = subprocess.run([str(program), *table.split()], capture_output=True, text=True, timeout=300, check=True)
        return [line.split() for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="module")
def answers(words: Words) -> Answers:
    """The same of questions with yes or no."""
    return lambda script: [word == "yes" for word in words(script)]


@pytest.mark.parametrize(
    ("code", "arch", "overlaps", "clustered"),
    [
        ("code 90 code90a 90", "90", True, True),
        ("code 100 code90a 0", "100", True, True),
        ("code 86 code90a 0", "86", False, False),
        ("code 80 code90a 0", "80", False, False),
        ("code 75 code90a 0", "75", False, False),
    ],
)
def test_what_a_launch_uses_depends_on_what_the_loaded_code_was_compiled_for(
    words: Words, code: str, arch: str, overlaps: bool, clustered: bool
) -> None:
    said = words(f"{code} capture 1 none 1 cluster 1 2 overlaps 1 clustered 1 arch 1")
    assert said == ["yes" if overlaps else "no", "yes" if clustered else "no", arch]


@pytest.mark.parametrize(
    ("code", "has"), [("code 90 code90a 90", True), ("code 90 code90a 0", False), ("code 80 code90a 80", False)]
)
def test_kernels_for_sm_90a_are_used_only_where_their_code_runs(answers: Answers, code: str, has: bool) -> None:
    assert answers(f"{code} sm90a 0") == [has]


def test_a_device_that_the_build_has_no_code_for_is_refused(words: Words) -> None:
    assert words("code 0 none 1 arch 1 device 1 code 90 arch 1") == ["refused", "refused", "90"]


def test_each_device_has_the_code_that_was_loaded_there(words: Words) -> None:
    assert words("code 90 arch 0 device 1 code 80 arch 0 device 0 arch 0") == ["90", "80", "90"]


def test_nothing_overlaps_where_foreign_launches_cannot_be_seen(answers: Answers) -> None:
    assert answers("writes 1 overlaps 1 may-read 1 7 none 1 overlaps 1") == [False, True, False]
    assert answers("capture 1 writes 1 none 1 overlaps 1 may-read 1 7 end 1 may-read 1 7") == [True, False, True]


@pytest.mark.parametrize(
    ("launches", "allowed"),
    [
        ("", False),
        ("publishes 1", True),
        ("publishes 1 none 1 none 1", True),
        ("publishes 1 writes 1", False),
        ("publishes 1 writes 1 none 1", False),
        ("publishes 1 writes 1 publishes 1", True),
        ("publishes 1 pool 1 7", False),
        ("publishes 1 pool 1 8", True),
        ("publishes 1 pool 1 7 publishes 1", True),
        ("pool 1 8", False),
        ("publishes 1 foreign 1", False),
        ("publishes 1 foreign 1 none 1", False),
        ("publishes 1 foreign 1 publishes 1", True),
        ("publishes 1 end 1 capture 1", False),
    ],
)
def test_pages_are_read_early_only_if_nobody_has_written_them_since_all_was_published(
    answers: Answers, launches: str, allowed: bool
) -> None:
    assert answers(f"capture 1 {launches} may-read 1 7") == [allowed]


def test_nothing_overlaps_with_the_kernel_before_it_that_wrote_weights(answers: Answers) -> None:
    script = "capture 1 none 1 weights 1 overlaps 1 none 1 overlaps 1 none 1 overlaps 1"
    assert answers(script) == [True, False, True]
    assert answers("capture 1 weights 1 foreign 1 none 1 overlaps 1") == [True], "that one waited for the end of both"
    assert answers("capture 1 publishes 1 weights 1 published 1 may-read 1 7") == [True, True]


def test_nothing_is_published_while_a_pool_has_new_tokens(answers: Answers) -> None:
    script = "capture 1 published 1 publishes 1 published 1 pool 1 7 published 1 none 1 published 1"
    assert answers(script) == [False, True, False, False]


@pytest.mark.parametrize(
    ("launches", "of_new_tokens", "of_others", "of_another_pool"),
    [
        ("", "none", "none", "none"),
        ("publishes 1", "all", "all", "all"),
        ("publishes 1 pool 1 7", "none", "none", "all"),
        ("new-tokens 1 7", "old", "none", "all"),
        ("writes 1 new-tokens 1 7", "old", "none", "all"),
        ("new-tokens 1 7 none 1", "none", "none", "all"),
        ("new-tokens 1 7 writes 1", "none", "none", "none"),
        ("new-tokens 1 7 foreign 1", "none", "none", "none"),
        ("new-tokens 1 7 publishes 1", "all", "all", "all"),
        ("new-tokens 1 7 new-tokens 1 8", "all", "all", "old"),
        ("capture 2 new-tokens 2 7", "none", "none", "none"),
    ],
)
def test_after_a_launch_that_wrote_new_tokens_older_pages_are_read_early_by_those_alone(
    words: Words, launches: str, of_new_tokens: str, of_others: str, of_another_pool: str
) -> None:
    asked = f"capture 1 {launches} early 1 7 1 early 1 7 0 early 1 8 1"
    assert words(asked) == [of_new_tokens, of_others, of_another_pool]


def test_streams_devices_and_threads_do_not_publish_for_each_other(answers: Answers) -> None:
    captured = "capture 0 capture 1 capture 2"
    assert answers(f"{captured} publishes 1 may-read 2 7") == [False]
    assert answers(f"{captured} publishes 0 device 1 may-read 0 7 device 0 may-read 0 7") == [False, True]
    assert answers(f"{captured} writes 0 device 1 publishes 0 device 0 may-read 0 7") == [False]
    assert answers(f"{captured} publishes 1 elsewhere 1 7 may-read 1 7") == [False, True]


@pytest.mark.parametrize("fp8", [0, 1])
@pytest.mark.parametrize("normed", [0, 1])
def test_every_tile_of_the_linear_that_is_built_is_chosen_and_no_other(
    tables: Callable[[str], list[list[str]]], normed: int, fp8: int
) -> None:
    built, chosen = tables(f"tiles 90 {227 * 1024} {normed} {fp8}")
    assert sorted(built) == sorted(chosen)
    for arch, shared in ((80, 163), (89, 99), (75, 64)):
        built, chosen = tables(f"tiles {arch} {shared * 1024} {normed} {fp8}")
        assert set(chosen) <= set(built)
        assert not [tile for tile in chosen if "/2" in tile], "clusters need 9.0"
    for arch, shared in ((100, 227), (120, 99)):
        built, chosen = tables(f"tiles {arch} {shared * 1024} {normed} {fp8}")
        assert set(chosen) <= set(built)


def test_every_tile_of_linear_thin_that_is_built_is_chosen_and_no_other(
    tables: Callable[[str], list[list[str]]],
) -> None:
    built, chosen = tables("thin")
    assert sorted(built) == sorted(chosen)


def test_the_gpu_tests_run_every_tile_of_8_bits_that_an_h200_gets(
    tables: Callable[[str], list[list[str]]],
) -> None:
    """In whole bytes and dealt out, with scales of rows and with those of blocks."""
    built = {f"thin {tile}" for tile in tables("thin")[0]} | {f"tiles {tiles}x1/1s" for tiles in (1, 2, 3)}
    every = [one for one in LINEARS.values() if not one.normed and one.block in (BY_ROW, BY_BLOCK)]
    ways = {
        size: tables(f"ways {size[0]} {size[1]} {int(size[2])}")
        for size in {(one.inner, one.out, one.gated) for one in every}
    }
    for dealt, block in product((False, True), (BY_ROW, BY_BLOCK)):
        run = {
            " ".join(ways[one.inner, one.out, one.gated][rows - 1])
            for one in every
            if (one.dealt, one.block) == (dealt, block)
            for rows in COUNTS
            if rows <= 256
        }
        assert built <= run


FASTEST = {
    (4096, 6144, 0): {1: "tiles 2x1/1s", 8: "tiles 2x1/1s", 32: "thin 1x2/1x32", 64: "thin 1x2/1x64"},
    (4096, 4096, 0): {1: "tiles 1x1/1s", 8: "tiles 1x1/1s", 32: "thin 1x1/4x32", 64: "thin 1x2/2x64"},
    (4096, 14336, 1): {8: "thin 1x2/1x8", 32: "thin 2x1/1x32", 128: "wide x128"},
    (14336, 4096, 0): {1: "tiles 1x1/1s", 8: "thin 1x2/2x8", 32: "thin 1x1/4x32", 64: "thin 1x2/2x64"},
    (8192, 10240, 0): {1: "tiles 3x1/1s", 32: "thin 2x1/1x32", 128: "wide x128"},
    (8192, 8192, 0): {1: "tiles 2x1/1s", 32: "thin 1x2/1x32", 128: "thin 1x2/1x64"},
    (8192, 28672, 1): {32: "thin 1x2/1x32", 64: "thin 1x2/1x64", 128: "wide x128"},
    (28672, 8192, 0): {8: "thin 1x2/2x8", 32: "thin 1x2/1x32"},
}
"""Inputs, outputs and whether gated, of an 8B and a 70B: what was fastest on an H200 at so many rows."""


@pytest.mark.parametrize("shape", FASTEST)
def test_linears_of_8_bits_run_in_what_was_fastest(
    tables: Callable[[str], list[list[str]]], shape: tuple[int, int, int]
) -> None:
    """And in no other kernel at numbers of rows between, but for the number of rows that a tile has."""
    ways = [" ".join(way) for way in tables("ways " + " ".join(map(str, shape)))]
    assert len(ways) == 256
    for rows, way in FASTEST[shape].items():
        assert ways[rows - 1] == way
    for rows, way in enumerate(ways, 1):
        tokens = int(way.rpartition("x")[2]) if way.split()[0] != "tiles" else 8
        assert tokens >= min(rows, 64)
        assert tokens < 2 * max(rows, 5 if tokens < 64 else 33) or way.startswith("wide")
    assert all(way.startswith("wide") for way in ways[128:])


def test_every_tile_for_many_rows_that_is_built_is_chosen_and_no_other(
    tables: Callable[[str], list[list[str]]],
) -> None:
    built, chosen, built_of_8_bits, chosen_of_8_bits = tables("wide")
    assert sorted(built) == sorted(chosen)
    assert set(chosen_of_8_bits) <= set(built_of_8_bits) < set(built)


def test_the_gpu_tests_run_every_tile_for_many_rows_that_an_h200_gets(
    tables: Callable[[str], list[list[str]]],
) -> None:
    run = set()
    for out, inner, options in half_width.SHAPES.values():
        ways = tables(f"half {inner} {out} {int(options.get('gated', False))}")
        run |= {" ".join(ways[rows - 1]) for rows in half_width.COUNTS}
    assert {f"wide {tile}" for tile in tables("wide")[0]} <= run
    for (out, inner, rows), tile in half_width.THREES.items():
        assert tables(f"half {inner} {out} 0")[rows - 1] == ["wide", tile]


TIMED_TILES = ("1x64/2", "2x64/1", "2x64/2", "2x64/3", "3x64/1", "2x128/1", "2x128/3", "3x128/1")
TIMED = {
    (4608, 7680, 0): {
        64: (25.45, 22.93, 21.81, 27.99, 28.23),
        128: (46.97, 24.72, 34.53, 44.34, 28.55, 30.2, 35.78, 42.04),
        256: (87.75, 42.48, 59.65, 76.0, 53.32, 32.14, 59.36, 42.17),
    },
    (4608, 4608, 0): {
        64: (22.62, 21.21, 17.29, 15.46, 26.93),
        128: (31.39, 20.21, 28.37, 26.11, 26.11, 29.13, 20.94, 41.22),
        256: (55.43, 39.8, 40.45, 48.13, 27.06, 29.45, 38.19, 41.36),
    },
    (4608, 12288, 1): {
        64: (77.18, 64.14, 64.3, 70.99, 57.27),
        128: (138.95, 82.12, 97.91, 121.91, 78.25, 73.65, 94.34, 61.21),
        256: (270.86, 129.37, 172.86, 234.44, 122.95, 99.47, 171.43, 94.17),
    },
    (12288, 4608, 0): {
        64: (49.48, 46.54, 43.21, 32.84, 59.03),
        128: (69.97, 47.53, 64.14, 53.25, 59.54, 63.97, 38.98, 92.7),
        256: (116.94, 96.66, 92.44, 97.89, 62.66, 64.36, 68.77, 94.14),
    },
    (4096, 6144, 0): {
        64: (22.43, 19.3, 18.13, 24.13, 24.78),
        128: (35.18, 19.98, 28.13, 33.44, 24.54, 27.29, 31.87, 37.9),
        256: (66.58, 36.85, 44.19, 57.75, 27.09, 27.92, 47.31, 38.33),
    },
    (4096, 4096, 0): {
        64: (12.49, 18.43, 14.04, 13.73, 24.14),
        128: (23.66, 18.39, 16.55, 22.82, 23.99, 26.6, 18.71, 37.37),
        256: (45.44, 19.94, 29.73, 41.94, 24.53, 26.84, 31.47, 37.6),
    },
    (4096, 14336, 1): {
        64: (80.71, 65.36, 67.17, 74.63, 70.44),
        128: (149.94, 92.42, 100.93, 128.82, 94.18, 70.91, 100.16, 92.44),
        256: (290.3, 139.12, 180.95, 243.55, 136.22, 117.62, 179.79, 124.25),
    },
    (14336, 4096, 0): {
        64: (32.5, 53.1, 34.59, 36.63, 67.85),
        128: (55.71, 52.62, 44.03, 55.79, 67.59, 72.37, 42.09, 105.8),
        256: (110.53, 58.83, 79.96, 105.11, 69.26, 72.63, 70.76, 108.3),
    },
}
"""Inputs, outputs and whether gated, of a 7.25B and an 8B: µs of the tiles at so many rows (H200, `wide_bench`)."""


@pytest.mark.parametrize("shape", TIMED)
def test_linears_of_many_rows_run_in_the_tile_that_was_fastest(
    tables: Callable[[str], list[list[str]]], shape: tuple[int, int, int]
) -> None:
    """And in tiles of those at all numbers of rows that have them."""
    ways = [" ".join(way) for way in tables("half " + " ".join(map(str, shape)))]
    for rows, times in TIMED[shape].items():
        of = {f"wide {tile}": us for tile, us in zip(TIMED_TILES, times, strict=False)}
        assert of[ways[rows - 1]] <= 1.01 * min(times)
    assert all(way.startswith("tiles") for way in ways[:16])
    assert {way.split("x")[1].split("/")[0] for way in ways[16:32]} == {"32"}
    assert {way.split("x")[1].split("/")[0] for way in ways[32:64]} == {"64"}
    assert set(ways[64:]) <= {f"wide {tile}" for tile in TIMED_TILES[1:]}
    assert len(set(ways[64:128])) == 1


def copied_tile(fp8_table: list[list[str]], columns: int) -> list[tuple[int, int]]:
    """Row and column of each byte of a tile in a stage, as the lanes of a warp copy a packed matrix."""
    (tile_bytes, copies), places = [int(word) for word in fp8_table[0]], [int(word) for word in fp8_table[1]]
    found: dict[int, tuple[int, int]] = {}
    for copy in range(copies):
        for row, vector, place in zip(places[::3], places[1::3], places[2::3], strict=True):
            for byte, column in enumerate(PACKED):
                at = place + copy * tile_bytes // copies + byte
                assert at not in found, "two lanes write there"
                found[at] = row + copy * 16 // copies, 16 * vector + column
    assert sorted(found) == list(range(tile_bytes))
    assert sorted(found.values()) == [(row, column) for row in range(16) for column in range(columns)]
    return [found[at] for at in range(tile_bytes)]


@pytest.mark.parametrize("columns", [32, 64])
def test_each_lane_gets_the_e4m3_weights_that_its_products_want(
    tables: Callable[[str], list[list[str]]], columns: int
) -> None:
    """On a model of ldmatrix, against the operand of mma.m16n8k16 as half-width weights reach it."""
    table = tables(f"fp8 {columns}")
    tile = copied_tile(table, columns)
    assert len(table) == 2 + columns // 32
    for pair, line in enumerate(table[2:]):
        named = [int(word) for word in line]
        for first in range(0, 32, 8):
            banks = {named[lane] // 16 % 8 for lane in range(first, first + 8)}
            assert len(banks) == 8, "eight rows that are read together are in different banks"
        for lane in range(32):
            g, t = lane // 4, lane % 4
            # Four bytes from each matrix: those at 4t of row g, which lane 8 * matrix + g names.
            registers = [[tile[named[8 * matrix + g] + 4 * t + byte] for byte in range(4)] for matrix in range(4)]
            for step in range(2):
                upper, lower = registers[2 * step], registers[2 * step + 1]
                fragment = [upper[:2], lower[:2], upper[2:], lower[2:]]
                k = 32 * pair + 16 * step + 2 * t
                expected = [[(row, k + more + i) for i in (0, 1)] for more in (0, 8) for row in (g, g + 8)]
                assert fragment == expected


def test_a_stage_of_64_columns_lies_as_the_copy_engine_swizzles_lines_of_64_bytes(
    tables: Callable[[str], list[list[str]]],
) -> None:
    """It flips bits 4 and 5 of an address where bits 7 and 8 are set."""
    _, places, *_ = tables("fp8 64")
    for row, vector, place in zip(*(map(int, places[first::3]) for first in range(3)), strict=True):
        for above in (0, 8, 16, 120):
            straight = (row + above) * 64 + vector * 16
            assert place + above * 64 == straight ^ (straight >> 3 & 0x30)


def test_an_e4m3_number_becomes_float16_by_moving_its_bits() -> None:
    """What common/fp8.cuh does before 8.9: 2^-8 of the number, exactly, for all but the two that are none."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    spread = codes.int() << 8  # in the upper byte of a half
    bits = (spread & 0x8000) | (spread & 0x7F00) >> 1
    moved = torch.where(bits < 0x8000, bits, bits - 0x10000).to(torch.int16).view(torch.float16)
    assert torch.equal(moved * 256, codes.view(FP8).half())
    assert torch.equal(codes.view(FP8).half().float(), codes.view(FP8).float())


@pytest.mark.parametrize(("rows", "drafts", "branch_size"), [(1, 1, 0), (3, 2, 16), (5, 0, 0), (8, 7, 0), (4, 3, 8)])
def test_the_plan_of_a_cycle_lies_where_python_reads_it(
    tables: Callable[[str], list[list[str]]], rows: int, drafts: int, branch_size: int
) -> None:
    (found,) = tables(f"plan {rows} {drafts} {branch_size}")
    volumes = [math.prod(shape) for shape in cycle.part_shapes(rows, drafts, branch_size)]
    wide, narrow = volumes[: cycle.NUM_WIDE], volumes[cycle.NUM_WIDE :]
    expected = [*accumulate(wide, initial=0), *accumulate(narrow, initial=0)]
    assert [int(offset) for offset in found] == expected


def test_no_type_is_defined_twice_outside_of_a_source_of_its_own() -> None:
    """Two types of one name in a namespace break the rule of one definition, and the linker does not tell."""
    found: Counter[str] = Counter()
    for path in sorted((ROOT / "csrc" / "cuda").rglob("*")):
        if path.suffix in (".h", ".cuh"):
            found.update(re.findall(r"^(?:struct|class)(?: alignas\([^)]*\))? (\w+)[^;]*\{", path.read_text(), re.M))
    assert found
    assert [name for name, count in found.items() if count > 1] == []
