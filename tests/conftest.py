"""Shared rules: quiet libraries, as many threads as cores, what is fast, and no network in unit tests."""

from __future__ import annotations

import functools
import gc
import os
import socket
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time, however slow the machine is; `--hypothesis-profile=default` looks for new ones.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

TOGETHER = (("tests/job/", "tests/serve/bad_input/"), ("tests/serve/",), ("tests/playground/",))
"""Folders that run one after another in one process: their tests share a cluster, a service or a browser, and no more
than two processes start clusters, each with about the same work."""
FIRST = (
    "tests/job/",
    "tests/serve/bad_input/",
    "tests/serve/",
    "tests/image/test_image.py",
    "tests/kernels/test_cuda_build.py",
    "tests/execution/graphs/test_lookahead.py",
    "tests/cli/test_demo.py",
    "tests/playground/",
)
"""What begins first, in this order. It takes a minute or more, and no process is to be alone with it in the end."""
MARKS = {
    "serve": ("tests/job/", "tests/serve/"),
    "browser": ("tests/playground/",),
    "build": (
        "/test_cuda_build.py",
        "/test_linear_tiles.py",
        "/test_protos.py::test_the_stubs_load_on_an_older_protobuf",
        "/test_cuda_host.py",
        "/test_site.py",
    ),
    "slow": (
        "::test_a_model_that_repeats_itself_is_not_asked_for_ever",
        "::test_a_program_that_forgets_to_close_the_engine_still_ends",
        "::test_a_side_in_its_own_process_returns_the_time_of_its_step",
        "::test_a_side_that_takes_too_long_or_fails_is_no_failure_of_the_run",
        "::test_a_table_that_cannot_be_read_is_measured_again",
        "::test_cycles_in_graphs_are_measured_as_well",
        "benchmarks/test_import.py",
        "::test_mechanisms_are_taken_out_one_at_a_time_and_come_back",
        "::test_rows_that_are_not_plain_are_compared_with_plain_ones",
        "::test_every_family_runs_with_a_block_head",
        "::test_every_part_runs_and_all_rows_of_the_table_that_need_no_gpu_are_filled",
        "::test_a_greedy_batch_gives_what_each_prompt_gives_alone",
        "/test_executor.py",
        "/test_decide.py",
        "/test_families.py",
        "/test_process_group.py",
        "/test_measured.py",
        "/test_native_threads.py",
        "/test_pipeline.py",
        "/test_report.py",
        "/test_scheduler.py::Test",
        "/test_stored_run.py",
        "/test_tide_surface.py::test_calibrate_times_its_exits",
        "/test_train.py",
        "deploy/test_commands.py",
        "execution/graphs/",
    ),
}
"""What `make test-fast` leaves out, by a part of a test's name. What is neither here nor marked in its file is fast."""


@functools.cache
def marks_of(function: str) -> list[str]:
    return [name for name, parts in MARKS.items() if any(part in function for part in parts)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Folders of TOGETHER run in one process, those with Ray first, as they mostly wait; all else file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            return next((folders[0] for folders in TOGETHER if path.startswith(folders)), path)

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: [not item.nodeid.startswith(part) for part in FIRST])
    import torch

    has_gpu, skipped, repeated = torch.cuda.is_available(), set[str](), list[pytest.Item]()
    for item in items:
        for name in marks_of(item.nodeid.partition("[")[0]):
            item.add_marker(name)
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
            function = item.nodeid.partition("[")[0]
            if function in skipped:
                repeated.append(item)
            skipped.add(function)
    if repeated:  # a test that is skipped is so once, not with each of its thousands of cases
        config.hook.pytest_deselected(items=repeated)
        left_out = {*repeated}
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No look for garbage while tests are collected, and none later at what was imported for them: it stays to the end.
    Each of several looks would take a good part of a second in every process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _unit_tests_start_no_ray_and_open_no_socket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("unit"):

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("a unit test opened a network connection")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket.socket, "bind", refuse)
        monkeypatch.setenv("RAY_ADDRESS", "unit tests start no Ray")
