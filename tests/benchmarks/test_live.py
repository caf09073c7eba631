"""A `serve run` of the benchmarks and tests: one whose node Ray gave up is started again, any other end is an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import live
from benchmarks.common.live import GIVEN_UP, Server

pytestmark = pytest.mark.unit


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the next starts log before they end; one that logs "lives" is healthy instead."""
    logs: list[str] = []

    def started(command: Sequence[str], folder: Path, *_: Any) -> subprocess.Popen[bytes]:
        text = logs.pop(0)
        (folder / Server.log_file).write_text(text)
        process = subprocess.Popen([sys.executable, "-c", "input()" if text == "lives" else ""], stdin=subprocess.PIPE)
        if text != "lives":
            process.wait()
        return process

    monkeypatch.setattr(live, "_started", started)
    monkeypatch.setattr(Server, "is_healthy", lambda server, path: server.log == "lives")
    monkeypatch.setattr(Server, "replicas", lambda server: [server.process])
    monkeypatch.setattr(Server, "others_of_session", lambda server: [server.process])
    monkeypatch.setattr(live.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    monkeypatch.setattr(live, "free_ports", lambda num: list(range(num)))
    return logs


def config() -> dict[str, Any]:
    return {"http_options": {}, "grpc_options": {}}


def test_a_server_whose_node_ray_gave_up_is_started_again(ends: list[str]) -> None:
    ends += [f"Exception: {GIVEN_UP}."] * 2 + ["lives"]
    with live.serving(config()) as server:
        assert server.log == "lives"
        assert server.process.poll() is None
    assert server.process.poll() is not None
    assert not ends


@pytest.mark.parametrize("text", ["another reason", GIVEN_UP])
def test_one_that_ends_otherwise_or_time_and_again_is_an_error(ends: list[str], text: str) -> None:
    ends += [text] * live.MAX_STARTS
    with pytest.raises(AssertionError, match=f"serve run ended:\n{text}"), live.serving(config()):
        pass
    assert len(ends) == (0 if text == GIVEN_UP else live.MAX_STARTS - 1)
