"""What is applied is the config that is tested: the text of deploy/config.*.yaml, whole."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config.serve_config import check
from deploy.strict import yaml_file
from tests.k8s.kustomize import REPOSITORY, SERVICES, one, overlay
from tests.k8s.pods import templates_of

DEPLOY = REPOSITORY / "deploy"
LAPTOP, CLUSTER = (yaml_file.read(DEPLOY / name) for name in ("config.yaml", "config.cpu.yaml"))
DIFFERENT_ON_PURPOSE = {
    "controller_options.runtime_env.env_vars.RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
    "applications.0.runtime_env.env_vars.RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
    "http_options.host",
    "grpc_options.enable_reflection",
    "controller_options.runtime_env.env_vars.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "logging_config.encoding",
    "logging_config.log_level",
    "applications.0.runtime_env.env_vars.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "applications.0.args.api_keys_file",
    "applications.0.deployments.0.num_replicas",
    "applications.0.deployments.0.max_replicas_per_node",
    "applications.0.deployments.0.ray_actor_options.num_cpus",
}


def flat(node: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(node, (dict, list)):
        return {path: node}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return {key: value for name, part in items for key, value in flat(part, f"{path}.{name}".lstrip(".")).items()}


@pytest.mark.parametrize("name", SERVICES)
def test_the_serve_config_of_the_manifest_is_the_file_itself(name: str) -> None:
    file = DEPLOY / f"config.{name.split('-')[0]}.yaml"
    assert one(overlay(name), "RayService")["spec"]["serveConfigV2"] == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SERVICES)
def test_there_is_nothing_to_say_about_it(name: str) -> None:
    text = one(overlay(name), "RayService")["spec"]["serveConfigV2"]
    assert check(yaml_file.parse(text.encode(), name)) == []


def test_on_a_clusters_cpus_only_the_door_and_the_replicas_are_other_than_on_this_machine() -> None:
    here, there = flat(LAPTOP), flat(CLUSTER)
    assert {key for key in here.keys() | there.keys() if here.get(key) != there.get(key)} == DIFFERENT_ON_PURPOSE


@pytest.mark.parametrize("name", SERVICES)
def test_every_door_that_is_open_to_a_network_asks_for_keys(name: str) -> None:
    config = yaml_file.parse(one(overlay(name), "RayService")["spec"]["serveConfigV2"].encode(), name)
    keys_file = config["applications"][0]["args"]["api_keys_file"]
    assert config["grpc_options"]["enable_reflection"] is False, "it answers without a key"
    for role, template in templates_of(overlay(name)).items():
        if role == "head":
            continue
        (container,) = template["spec"]["containers"]
        mount = next(each for each in container["volumeMounts"] if keys_file == f"{each['mountPath']}/keys.json")
        volume = next(each for each in template["spec"]["volumes"] if each["name"] == mount["name"])
        assert volume["secret"]["secretName"] == "tide-keys"
        assert volume["secret"]["defaultMode"] == 0o440
        assert "subPath" not in mount, "a file mounted alone would never follow the Secret"


@pytest.mark.parametrize("name", SERVICES)
def test_the_configs_themselves_are_not_sent_to_the_cluster(name: str) -> None:
    assert not [each for each in overlay(name) if each["kind"] == "ConfigMap"]
