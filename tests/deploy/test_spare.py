"""The spare processes of a node: which ones they are, and when another is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import spare
from deploy.spare import Spares, find

VARIABLES = {"TIDE_PRELOAD": "1", "A": "b"}
ENVIRONMENT = b"PATH=/bin\0TIDE_PRELOAD=1\0A=b\0"


def add(proc: Path, pid: int, *, title: str = "ray::IDLE", parent: int | None = None, env: bytes = ENVIRONMENT) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (ray) S {os.getppid() if parent is None else parent} 7 7 0")
    (folder / "cmdline").write_bytes(title.encode() + b"\0" * 40)
    (folder / "environ").write_bytes(env)


def test_a_spare_is_an_idle_worker_of_this_raylet_with_the_variables_of_the_replica(tmp_path: Path) -> None:
    add(tmp_path, 10)
    add(tmp_path, 11, title="ray::ServeReplica:tide:TideServer")
    add(tmp_path, 12, parent=1)
    add(tmp_path, 13, env=b"PATH=/bin\0")
    add(tmp_path, 14, env=ENVIRONMENT.replace(b"A=b", b"A=c"))
    assert [process.pid for process in find(VARIABLES, tmp_path)] == [10]


def test_a_spare_for_a_proxy_has_no_libraries_imported(tmp_path: Path) -> None:
    add(tmp_path, 10)
    add(tmp_path, 11, env=b"A=b\0")
    assert [process.pid for process in find({"A": "b"}, tmp_path)] == [11]


def test_another_is_asked_for_only_where_there_is_none_and_none_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    replicas, proxies = json.dumps({"env_vars": VARIABLES}), json.dumps({"env_vars": {"A": "b"}})
    monkeypatch.setattr(spare, "ask_for_worker", asked.append)
    monkeypatch.setattr(spare, "environments", lambda: [replicas, proxies])
    monkeypatch.setattr(spare, "find", lambda variables, **kind: find(variables, tmp_path, **kind))
    spares = Spares()
    spares.ensure()
    spares.ensure()
    assert asked == [replicas, proxies], "both are still starting"
    add(tmp_path, 10)
    add(tmp_path, 11, env=b"A=b\0")
    spares.ensure()
    assert asked == [replicas, proxies]
    (tmp_path / "10").rename(tmp_path / "gone")  # a replica took it
    spares.ensure()
    assert asked == [replicas, proxies, replicas]


def test_of_several_replicas_of_a_node_the_oldest_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    replicas = json.dumps({"env_vars": VARIABLES})
    monkeypatch.setattr(spare, "ask_for_worker", asked.append)
    monkeypatch.setattr(spare, "environments", lambda: [replicas])
    monkeypatch.setattr(spare, "find", lambda variables, **kind: find(variables, tmp_path, **kind))
    for pid in (os.getpid(), os.getpid() - 1):
        add(tmp_path, pid, title="ray::ServeReplica:tide:TideServer")
    Spares().ensure()
    assert asked == []
    (tmp_path / str(os.getpid() - 1)).rename(tmp_path / "gone")
    Spares().ensure()
    assert asked == [replicas]


async def test_a_failure_is_logged_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[None] = []

    def fail(self: Spares) -> None:
        tries.append(None)
        if len(tries) == 3:
            monkeypatch.delenv("TIDE_PRELOAD")
        raise OSError("no raylet")

    monkeypatch.setenv("TIDE_PRELOAD", "1")
    monkeypatch.setattr(spare, "CHECK_S", 0.0)
    monkeypatch.setattr(Spares, "ensure", fail)
    with caplog.at_level("ERROR", logger="ray.serve"):
        await Spares().keep()
    assert len(tries) == 3
    assert len([record for record in caplog.records if "no spare process" in record.message]) == 1


def test_no_library_is_imported_where_the_application_does_not_ask() -> None:
    code = "import sys, deploy.preload; print([name for name in ('torch', 'ray', 'deploy.app') if name in sys.modules])"
    variables = {name: value for name, value in os.environ.items() if name != "TIDE_PRELOAD"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_raylet_of_the_installed_ray_can_be_asked() -> None:
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

    fields = {field.name for field in node_manager_pb2.PrestartWorkersRequest.DESCRIPTOR.fields}
    assert fields == {"language", "job_id", "runtime_env_info", "keep_alive_duration_secs", "num_workers"}
    assert "PrestartWorkers" in vars(node_manager_pb2_grpc.NodeManagerServiceServicer)
