"""Shared rules: quiet libraries, one thread pool size, and a wall round the unit tests."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

UNIT = Path(__file__).parent / "unit"


def pytest_itemcollected(item: pytest.Item) -> None:
    """For `-n 2 --dist loadgroup`: one process has all that start Ray, which mostly waits, and begins with them; the
    other takes file after file, and the rest is shared when one has nothing left."""
    item.add_marker(pytest.mark.xdist_group("ray" if item.get_closest_marker("serve") else str(item.path)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("serve") is None)
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
    if UNIT in request.path.parents:

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("a unit test opened a network connection")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket.socket, "bind", refuse)
        monkeypatch.setenv("RAY_ADDRESS", "unit tests start no Ray")
