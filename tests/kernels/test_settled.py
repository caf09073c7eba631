"""When attention may read pages before the kernels before it have ended: the host's record of what was launched."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).parent / "settled_model"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What is answered to the questions of a script, after the launches before them."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("settled_model") / "check"
    command = [compiler, "-std=c++17", "-pthread", f"-I{MODEL}", f"-I{ROOT / 'csrc'}", str(MODEL / "check.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)

    def run(script: str) -> list[str]:
        done = subprocess.run([str(program), *script.split()], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.split()

    return run


@pytest.fixture(scope="module")
def answers(words: Callable[[str], list[str]]) -> Callable[[str], list[bool]]:
    """The same of questions with yes or no."""
    return lambda script: [word == "yes" for word in words(script)]


@pytest.mark.parametrize(
    ("launches", "allowed"),
    [
        ("", False),
        ("settles 1", True),
        ("settles 1 nothing 1 nothing 1", True),
        ("settles 1 writes 1", False),
        ("settles 1 writes 1 nothing 1", False),
        ("settles 1 writes 1 settles 1", True),
        ("settles 1 pool 1 7", False),
        ("settles 1 pool 1 8", True),
        ("settles 1 pool 1 7 settles 1", True),
        ("pool 1 8", False),
    ],
)
def test_pages_are_read_early_only_if_nothing_has_written_them_since_all_had_ended(
    answers: Callable[[str], list[bool]], launches: str, allowed: bool
) -> None:
    assert answers(f"{launches} may-read 1 7") == [allowed]


def test_nothing_is_settled_while_a_pool_has_new_tokens(answers: Callable[[str], list[bool]]) -> None:
    assert answers("settled 1 settles 1 settled 1 pool 1 7 settled 1 nothing 1 settled 1") == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("launches", "of_new_tokens", "of_others", "of_another_pool"),
    [
        ("", "nothing", "nothing", "nothing"),
        ("settles 1", "all", "all", "all"),
        ("settles 1 pool 1 7", "nothing", "nothing", "all"),
        ("fresh 1 7", "old", "nothing", "all"),
        ("writes 1 fresh 1 7", "old", "nothing", "all"),
        ("fresh 1 7 nothing 1", "nothing", "nothing", "all"),
        ("fresh 1 7 writes 1", "nothing", "nothing", "nothing"),
        ("fresh 1 7 settles 1", "all", "all", "all"),
        ("fresh 1 7 fresh 1 8", "all", "all", "old"),
        ("fresh 2 7", "nothing", "nothing", "nothing"),
    ],
)
def test_behind_a_launch_that_wrote_new_tokens_older_pages_are_read_early_by_those_alone(
    words: Callable[[str], list[str]], launches: str, of_new_tokens: str, of_others: str, of_another_pool: str
) -> None:
    asked = f"{launches} ahead 1 7 1 ahead 1 7 0 ahead 1 8 1"
    assert words(asked) == [of_new_tokens, of_others, of_another_pool]


def test_streams_devices_and_threads_do_not_settle_for_each_other(answers: Callable[[str], list[bool]]) -> None:
    assert answers("settles 1 may-read 2 7") == [False]
    assert answers("settles 0 device 1 may-read 0 7 device 0 may-read 0 7") == [False, True]
    assert answers("writes 0 device 1 settles 0 device 0 may-read 0 7") == [False]
    assert answers("settles 1 elsewhere 1 7 may-read 1 7") == [False, True]
