"""Shared rules: quiet libraries, as many threads as cores, and a wall round the unit tests."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: more threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

RAY = ("tests/job/", "tests/serve/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes one has all that start Ray, which mostly waits, and begins with them; the others take file
    after file, and share the rest with it when it has nothing left."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            return "ray" if path.startswith(RAY) else path

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.nodeid.startswith(RAY))
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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
