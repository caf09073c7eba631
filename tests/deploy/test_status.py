"""`tide status`: Serve's status with the policies that replicas refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.experimental import internal_kv
from ray.serve.schema import ServeInstanceDetails

from deploy import status
from deploy.config.last_good import ClusterStore
from tide_core.cli import main
from tide_core.errors import ConfigError, EngineError

pytestmark = pytest.mark.unit
REASON = "user_config.artefact: got '/nowhere', expected a folder"


@pytest.fixture
def details() -> ServeInstanceDetails:
    """A service of two replicas, as Ray's dashboard describes it."""
    replicas = [
        {"replica_id": each, "state": "RUNNING", "actor_name": each, "start_time_s": 0.0} for each in ("one", "two")
    ]
    config = {"name": "TideServer", "num_replicas": 2}
    deployment = {
        "name": "TideServer",
        "status": "HEALTHY",
        "status_trigger": "CONFIG_UPDATE_COMPLETED",
        "message": "",
        "deployment_config": config,
        "target_num_replicas": 2,
        "required_resources": {"CPU": 1},
        "replicas": replicas,
    }
    app = {
        "name": "tide",
        "route_prefix": "/",
        "docs_path": None,
        "status": "RUNNING",
        "message": "",
        "last_deployed_time_s": 0.0,
        "deployments": {"TideServer": deployment},
        "source": "declarative",
        "external_scaler_enabled": False,
    }
    return ServeInstanceDetails(
        controller_info={}, proxy_location="HeadOnly", proxies={}, applications={"tide": app}, target_capacity=None
    )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Ray's key-value store, here."""
    kept: dict[bytes, bytes] = {}
    monkeypatch.setattr(internal_kv, "_internal_kv_put", lambda key, value, **_: kept.update({key: value}))
    monkeypatch.setattr(internal_kv, "_internal_kv_del", lambda key, **_: kept.pop(key, None))
    return kept


def test_a_policy_that_a_replica_refuses_is_in_the_status_until_it_takes_one(
    details: ServeInstanceDetails, cluster: dict[bytes, bytes]
) -> None:
    replica = ClusterStore("tide", "TideServer", "two")
    replica.note_refused(REASON)
    found = status.with_refusals(details, cluster.get)
    assert found["applications"]["tide"]["deployments"]["TideServer"][status.REFUSED] == {"two": REASON}
    [line] = status.refusals(found)
    assert f"tide, TideServer: policy refused: {REASON} (1 of 2 replicas" in line
    replica.note_refused(None)
    found = status.with_refusals(details, cluster.get)
    assert status.REFUSED not in found["applications"]["tide"]["deployments"]["TideServer"]
    assert status.refusals(found) == []


def test_a_reason_of_a_replica_that_is_gone_is_not_shown(
    details: ServeInstanceDetails, cluster: dict[bytes, bytes]
) -> None:
    ClusterStore("tide", "TideServer", "three").note_refused(REASON)
    assert status.refusals(status.with_refusals(details, cluster.get)) == []


def test_replicas_that_refuse_for_the_same_reason_share_a_line(
    details: ServeInstanceDetails, cluster: dict[bytes, bytes]
) -> None:
    for each in ("one", "two"):
        ClusterStore("tide", "TideServer", each).note_refused(REASON)
    [line] = status.refusals(status.with_refusals(details, cluster.get))
    assert "(2 of 2 replicas" in line


@pytest.mark.parametrize("refused", [True, False])
def test_the_command_prints_the_status_of_serve_and_fails_for_a_refused_policy(
    details: ServeInstanceDetails,
    cluster: dict[bytes, bytes],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(status.AUTH_MODE, "disabled")
    ClusterStore("tide", "TideServer", "one").note_refused(REASON if refused else None)
    monkeypatch.setattr(status, "read", lambda address: status.with_refusals(details, cluster.get))
    code = main(["status"])
    out, err = capsys.readouterr()
    assert code == int(refused)
    deployment = yaml.safe_load(out)["applications"]["tide"]["deployments"]["TideServer"]
    assert (deployment["status"], deployment["replica_states"]) == ("HEALTHY", {"RUNNING": 2})
    assert deployment.get(status.REFUSED) == ({"one": REASON} if refused else None)
    assert (f"policy refused: {REASON}" in err) is refused


def test_a_store_that_fails_stops_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the GCS does not answer")

    monkeypatch.setattr(internal_kv, "_internal_kv_put", fail)
    monkeypatch.setattr(internal_kv, "_internal_kv_del", fail)
    replica = ClusterStore("tide", "TideServer", "one")
    replica.note_refused(REASON)
    replica.note_refused(None)


@pytest.mark.parametrize(
    ("has_file", "variables", "mode"),
    [
        (True, {}, "token"),
        (False, {}, None),
        (False, {"RAY_AUTH_TOKEN": "secret"}, "token"),
        (True, {"RAY_AUTH_MODE": "disabled"}, "disabled"),
    ],
)
def test_the_token_of_this_user_is_sent_unless_they_chose_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool, variables: dict[str, str], mode: str | None
) -> None:
    for name in (status.AUTH_MODE, *status.TOKEN_VARIABLES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if has_file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / status.TOKEN_FILE).write_text("token")
    status.use_token()
    assert os.environ.get(status.AUTH_MODE) == mode


def test_the_token_is_chosen_before_ray_is_imported() -> None:
    code = "import sys, deploy.cli, deploy.status; print('ray' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize(("address", "error"), [("nonsense", ConfigError), ("http://127.0.0.1:x", ConfigError)])
def test_an_address_that_is_none_is_refused_by_name(address: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="address"):
        status.read(address)


def test_a_cluster_that_is_not_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(status.socket, "create_connection", refuse)
    with pytest.raises(EngineError, match=r"no cluster answers at .*:6399"):
        status.read("127.0.0.1:6399")
