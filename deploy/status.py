"""`tide status`: what `serve status` prints, with the policies that replicas refuse.

Serve shows a message of a deployment at transitions only, so a replica that keeps its last good policy looks HEALTHY
there. Such a replica writes its reason to Ray's GCS (`deploy.config.last_good`), and it is read from there.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from deploy.config.last_good import NAMESPACE, refused_key
from tide_core.errors import ConfigError, EngineError

AUTH_MODE = "RAY_AUTH_MODE"
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_FILE = Path(".ray") / "auth_token"
REFUSED = "policy_refused"
"""In the status of a deployment: the reason of each replica that refuses its policy."""
CONNECT_S = 5.0

Lookup = Callable[[bytes], bytes | None]


def use_token() -> None:
    """Have Ray send its token if this user has one. To be called before Ray is imported; a choice of the user stays."""
    if AUTH_MODE not in os.environ and (
        any(os.environ.get(name) for name in TOKEN_VARIABLES) or (Path.home() / TOKEN_FILE).is_file()
    ):
        os.environ[AUTH_MODE] = "token"


def read(address: str | None) -> dict[str, Any]:
    """The status of a cluster: that of Serve, with `policy_refused` in each deployment where a replica refuses one."""
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
    from ray.dashboard.utils import ray_address_to_api_server_url
    from ray.experimental.internal_kv import _internal_kv_get
    from ray.serve.schema import ServeInstanceDetails

    try:
        address = canonicalize_bootstrap_address_or_die(address)
    except ValueError as error:
        raise ConfigError("address", address, "HOST:PORT of Ray's GCS") from error
    _check_open(address)
    try:
        url = ray_address_to_api_server_url(address)  # it connects the key-value store, too
        details = ServeInstanceDetails(**ServeSubmissionClient(url).get_serve_details())
        return with_refusals(details, lambda key: _internal_kv_get(key, namespace=NAMESPACE))
    except Exception as error:  # Ray has no common class for what it raises here
        raise EngineError(f"the cluster at {address} does not answer: {error}") from error


def with_refusals(details: Any, lookup: Lookup) -> dict[str, Any]:
    """Serve's `ServeInstanceDetails` as `serve status` prints them, with `policy_refused`."""
    from dataclasses import asdict

    status: dict[str, Any] = asdict(details._get_status())
    for app_name, app in details.applications.items():
        for name, deployment in app.deployments.items():
            replicas = [replica.replica_id for replica in deployment.replicas]
            found = {each: lookup(refused_key(app_name, name, each)) for each in replicas}
            refused = {replica: reason.decode() for replica, reason in found.items() if reason is not None}
            if refused:
                status["applications"][app_name]["deployments"][name][REFUSED] = refused
    return status


def refusals(status: Mapping[str, Any]) -> list[str]:
    """A line for each deployment and reason."""
    return [
        f"{app_name}, {name}: policy refused: {reason} ({count} of {_num_replicas(deployment)} replicas; "
        "the last good policy stays in force)"
        for app_name, app in status["applications"].items()
        for name, deployment in app["deployments"].items()
        for reason, count in _counted(deployment.get(REFUSED, {}).values())
    ]


def as_yaml(status: dict[str, Any]) -> str:
    """As `serve status` writes it."""
    import yaml
    from ray.serve.scripts import ServeDeploySchemaDumper, process_dict_for_yaml_dump

    return str(
        yaml.dump(
            process_dict_for_yaml_dump(status),
            Dumper=ServeDeploySchemaDumper,
            default_flow_style=False,
            sort_keys=False,
        )
    )


def _check_open(address: str) -> None:
    """Raise at once where nothing listens: Ray tries for more than half a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise EngineError(f"no cluster answers at {address}: {error}") from error


def _counted(reasons: Iterable[str]) -> list[tuple[str, int]]:
    return sorted(Counter(reasons).items())


def _num_replicas(deployment: Mapping[str, Any]) -> int:
    return sum(deployment["replica_states"].values())
