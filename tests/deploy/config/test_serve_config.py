"""The check of a whole Serve config: what Serve would ignore or coerce is refused by its path."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.config.serve_config import OUR_DEPLOYMENT, SERVICER, check, check_file
from deploy.published import CURRENT, Publication
from deploy.strict import yaml_file
from tests.evaluation.on_disk import save_artefact_for_it
from tide_core.errors import ConfigError

DEPLOY = Path(__file__).parents[3] / "deploy"
CONFIG = yaml_file.read(DEPLOY / "config.yaml")
APP = "applications[0]"
ONE = f"{APP}.deployments[0]"
GONE = object()


def changed(path: str, value: Any, config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    """The shipped config with one thing changed, or taken out."""
    whole = copy.deepcopy(config)
    *parents, last = re.findall(r"[^.\[\]]+", path)
    holder: Any = whole
    for part in parents:
        holder = holder[int(part)] if part.isdigit() else holder.setdefault(part, {})
    if value is GONE:
        del holder[last]
    else:
        holder[int(last) if last.isdigit() else last] = value
    return whole


def refusal_of(config: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        check(config)
    return refused.value


def warnings_of(path: str, value: Any) -> list[str]:
    return check(changed(path, value))


def test_the_shipped_config_is_right_and_there_is_nothing_to_say_about_it() -> None:
    assert check_file(DEPLOY / "config.yaml") == []


def test_the_config_for_gpus_is_right() -> None:
    assert check_file(DEPLOY / "config.gpu.yaml") == []


def test_the_name_of_our_deployment_is_that_of_the_application() -> None:
    from deploy.app import TideServer

    assert TideServer.name == OUR_DEPLOYMENT  # type: ignore[attr-defined]
    assert SERVICER in CONFIG["grpc_options"]["grpc_servicer_functions"]


TYPOS = [
    ("", "http_option", "http_options"),
    ("", "aplications", "applications"),
    ("http_options", "request_timeout", "request_timeout_s"),
    ("http_options", "ports", "port"),
    ("grpc_options", "grpc_servicer_function", "grpc_servicer_functions"),
    ("controller_options", "runtime_envs", "runtime_env"),
    ("logging_config", "log_levle", "log_level"),
    ("tracing_config", "enable", "enabled"),
    (APP, "route_prefx", "route_prefix"),
    (f"{APP}.logging_config", "encodng", "encoding"),
    (f"{APP}.runtime_env", "env_var", "env_vars"),
    (f"{APP}.autoscaling_policy", "policy_functions", "policy_function"),
    (f"{APP}.args", "engin", "engine"),
    (f"{APP}.args", "api_key_file", "api_keys_file"),
    (f"{APP}.args.engine", "max_row", "max_rows"),
    (f"{APP}.args.limits", "max_token", "max_tokens"),
    (ONE, "max_ongoing_request", "max_ongoing_requests"),
    (ONE, "num_replica", "num_replicas"),
    (f"{ONE}.ray_actor_options", "num_cpu", "num_cpus"),
    (f"{ONE}.ray_actor_options.runtime_env", "pips", "pip"),
    (f"{ONE}.backpressure_config", "retry_after", "retry_after_s"),
    (f"{ONE}.autoscaling_config", "max_replica", "max_replicas"),
    (f"{ONE}.autoscaling_config.policy", "policy_functio", "policy_function"),
    (f"{ONE}.request_router_config", "request_router_clas", "request_router_class"),
    (f"{ONE}.logging_config", "logs_dirs", "logs_dir"),
    (f"{ONE}.user_config", "exit_treshold", "min_threshold"),
    (f"{ONE}.user_config", "mods", "modes"),
]


@pytest.mark.parametrize(("where", "typo", "meant"), TYPOS, ids=[f"{where}.{typo}" for where, typo, _ in TYPOS])
def test_an_unknown_key_is_refused_where_it_stands_with_what_was_meant(where: str, typo: str, meant: str) -> None:
    refused = refusal_of(changed(f"{where}.{typo}", 1))
    assert refused.field == (where or "config")
    assert refused.value == typo
    assert f"did you mean {meant}?" in refused.expected


def test_a_key_that_resembles_nothing_is_told_what_there_is() -> None:
    assert "one of mode, epsilon" in refusal_of(changed(f"{ONE}.user_config.zzz", 1)).expected


VALUES = [
    ("http_options.port", 0),
    ("http_options.port", 70000),
    ("http_options.port", -1),
    ("http_options.port", "8000"),
    ("http_options.port", True),
    ("http_options.port", 8000.5),
    ("grpc_options.port", 0),
    ("grpc_options.port", 8000),
    ("grpc_options.port", 65536),
    ("http_options", None),
    ("http_options", []),
    ("http_options", 3),
    ("http_options.host", False),
    ("http_options.request_timeout_s", "300"),
    ("proxy_location", "Everywhere"),
    ("logging_config.log_level", "LOUD"),
    ("logging_config", "JSON"),
    ("applications", {}),
    ("applications", None),
    (APP, "tide"),
    (f"{APP}.name", False),
    (f"{APP}.route_prefix", "v1"),
    (f"{APP}.route_prefix", "/v1/"),
    (f"{APP}.route_prefix", "/{v1}"),
    (f"{APP}.deployments", {}),
    (f"{APP}.import_path", 7),
    (f"{APP}.args", []),
    (f"{APP}.args.engine", []),
    (f"{APP}.args.engine.max_rows", "64"),
    (f"{APP}.args.engine.max_rows", 0),
    (f"{APP}.args.engine.max_batch_tokens", 0),
    (f"{APP}.args.engine.device", "gpu"),
    (f"{APP}.args.engine.prefix_caching", "on"),
    (f"{APP}.args.engine.audit_share", "1e-3"),
    (f"{APP}.args.engine.checkpoint_layers", [2]),
    (f"{APP}.args.limits.max_tokens", 0),
    (f"{APP}.args.limits.json_depth", 10**6),
    (f"{APP}.args.limits", 5),
    (f"{APP}.args.served_model_name", False),
    (f"{APP}.args.served_model_name", ""),
    (f"{APP}.args.served_model_name", {"demo": 1}),
    (f"{APP}.args.playground", "yes"),
    (f"{APP}.args.target_wait_s", 0),
    (f"{APP}.runtime_env.env_vars.RAY_SERVE_ENABLE_HA_PROXY", 1),
    (f"{ONE}.name", "TideServe"),
    (f"{ONE}.max_ongoing_requests", 0),
    (f"{ONE}.max_ongoing_requests", True),
    (f"{ONE}.max_queued_requests", "256"),
    (f"{ONE}.num_replicas", 0),
    (f"{ONE}.graceful_shutdown_timeout_s", -1),
    (f"{ONE}.backpressure_config.status_code", 500),
    (f"{ONE}.ray_actor_options.num_cpus", -1),
    (f"{ONE}.ray_actor_options.num_cpus", "one"),
    (f"{ONE}.ray_actor_options", 3),
    (f"{ONE}.user_config.mode", False),
    (f"{ONE}.user_config.mode", "fst"),
    (f"{ONE}.user_config.modes", []),
    (f"{ONE}.user_config.threshold", 3),
    (ONE, 5),
    (ONE, []),
]


@pytest.mark.parametrize(("path", "value"), VALUES, ids=[f"{path}={value!r}" for path, value in VALUES])
def test_a_bad_value_is_refused_by_its_path(path: str, value: Any) -> None:
    assert refusal_of(changed(path, value)).field == path


def scaled(**settings: Any) -> dict[str, Any]:
    return changed(f"{ONE}.autoscaling_config", settings, changed(f"{ONE}.num_replicas", GONE))


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"min_replicas": -1}, ".min_replicas"),
        ({"max_replicas": "two"}, ".max_replicas"),
        ({"max_replicas": True}, ".max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, ""),
        ({"policy": {"policy_function": "deploy.autoscaling:by_lod"}}, ".policy"),
        ({"policy": {"policy_function": 5}}, ".policy.policy_function"),
        ({"policy": "deploy.autoscaling:by_load"}, ".policy"),
    ],
    ids=str,
)
def test_autoscaling_is_checked_although_serve_takes_any_mapping_for_it(settings: dict[str, Any], place: str) -> None:
    assert refusal_of(scaled(**settings)).field == f"{ONE}.autoscaling_config{place}"


def test_two_ways_to_set_the_number_of_replicas_are_refused_together() -> None:
    refused = refusal_of(changed(f"{ONE}.autoscaling_config", {"max_replicas": 2}))
    assert refused.field == ONE
    assert "num_replicas" in refused.expected


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (f"{APP}.import_path", "deploy.app:build_ap"),
        (f"{APP}.import_path", "deploi.app:build_app"),
        (f"{APP}.import_path", "deploy.nothing.build_app"),
        ("grpc_options.grpc_servicer_functions[0]", "tide.v1.tide_pb2_grpc.add_TideServicer_to_server"),
        ("grpc_options.grpc_servicer_functions[1]", "nothing.v1.add_it"),
    ],
)
def test_what_cannot_be_imported_is_named(path: str, named: str) -> None:
    refused = refusal_of(changed(path, named))
    assert (refused.field, refused.value) == (path, named)
    assert "Error" in refused.expected


def test_a_module_that_ends_the_process_is_refused_and_does_not_end_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quits_at_once.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    assert "SystemExit" in refusal_of(changed(f"{APP}.import_path", "quits_at_once:app")).expected


def test_an_application_of_somebody_else_is_left_to_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys_app.py").write_text("app = 1\n")
    monkeypatch.chdir(tmp_path)
    other = {"name": "other", "route_prefix": "/other", "import_path": "somebodys_app:app", "args": {"any": "thing"}}
    config = copy.deepcopy(CONFIG)
    config["applications"].append(other)
    assert check(config) == []
    other["rout_prefix"] = "/"
    assert refusal_of(config).field == "applications[1]"


def test_our_application_is_known_however_its_path_is_written() -> None:
    config = changed(f"{APP}.import_path", "deploy.app.build_app")
    assert check(config) == []
    assert refusal_of(changed(f"{APP}.args.engin", {}, config)).field == f"{APP}.args"


def test_what_is_missing_is_named() -> None:
    assert refusal_of(changed(f"{APP}.import_path", GONE)).field == f"{APP}.import_path"
    assert refusal_of(changed(f"{ONE}.name", GONE)).field == f"{ONE}.name"
    assert refusal_of(changed("applications", GONE)).field == "applications"


def test_validators_of_serve_that_stumble_do_not_take_the_check_down() -> None:
    assert refusal_of(changed(f"{ONE}.ray_actor_options.runtime_env", {"py_modules": 5})).field.startswith(ONE)


def test_a_key_file_that_is_there_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    config = changed(f"{APP}.args.api_keys_file", str(path), changed("grpc_options.enable_reflection", False))
    assert check(config) == [], "it may be on another machine"
    path.write_text("{}")
    assert "a file of keys" in refusal_of(config).expected


def test_the_artefact_that_a_config_names_is_opened_and_its_layers_are_known(tmp_path: Path) -> None:
    folder = save_artefact_for_it(tmp_path / "artefact")
    at = f"{ONE}.user_config"
    assert check(changed(f"{at}.artefact", str(folder))) == []
    refused = refusal_of(changed(at, {"artefact": str(folder), "min_layers": 99}))
    assert refused.field == f"{at}.min_layers"
    heads = folder / "heads.safetensors"
    heads.write_bytes(heads.read_bytes()[:-1] + b"x")
    for path in (f"{at}.artefact", f"{APP}.args.engine.artefact"):
        refused = refusal_of(changed(path, str(folder)))
        assert refused.field == path
        assert "a sound artefact" in refused.expected
    for place in ("/nowhere", "s3://bucket/artefact"):
        [warning] = check(changed(f"{at}.artefact", place))
        assert f"{place} is not on this machine" in warning


def test_a_pointer_need_not_have_been_published_and_what_it_names_is_opened(tmp_path: Path) -> None:
    at, place = f"{ONE}.user_config.artefact", tmp_path / "published"
    for pointer in (place / CURRENT, f"s3://bucket/published/{CURRENT}"):
        assert check(changed(at, str(pointer))) == []
    version = Publication(str(place)).publish(save_artefact_for_it(tmp_path / "artefact"), "me").digest
    assert check(changed(at, str(place / CURRENT))) == []
    (place / "versions" / version / "heads.safetensors").write_bytes(b"damaged")
    assert "a sound artefact" in refusal_of(changed(at, str(place / CURRENT))).expected


@pytest.mark.parametrize("name", ["model", "artefact"])
def test_credentials_in_a_url_are_refused_and_not_shown(name: str) -> None:
    refused = refusal_of(changed(f"{APP}.args.engine.{name}", "s3://me:hunter2@bucket/mine"))
    assert "hunter2" not in str(refused)
    assert refused.field.endswith(f"engine.{name}")


WARNINGS = [
    (
        f"{ONE}.graceful_shutdown_timeout_s",
        60,
        "tide: graceful_shutdown_timeout_s (60) is below limits.max_timeout_s (280)",
    ),
    (f"{ONE}.graceful_shutdown_timeout_s", GONE, "tide: graceful_shutdown_timeout_s (20) is below"),
    (f"{APP}.args.limits.max_timeout_s", 295, "tide: graceful_shutdown_timeout_s (290) is below"),
    (f"{ONE}.max_queued_requests", GONE, "tide: max_queued_requests is not set"),
    (f"{ONE}.max_queued_requests", -1, "tide: max_queued_requests is not set"),
    (f"{ONE}.max_ongoing_requests", GONE, "tide: max_ongoing_requests (5) is below engine.max_rows (64)"),
    ("http_options.request_timeout_s", 280, "tide: http_options.request_timeout_s (280) should be above"),
    ("grpc_options.request_timeout_s", 10, "tide: grpc_options.request_timeout_s (10) should be above"),
    ("grpc_options.request_timeout_s", GONE, "grpc_options.request_timeout_s: not set"),
    ("http_options.host", "0.0.0.0", "tide: no api_keys_file, and http_options.host is 0.0.0.0"),
    ("http_options.host", GONE, "tide: no api_keys_file, and http_options.host is 0.0.0.0"),
    ("grpc_options.grpc_servicer_functions", [], "there is no gRPC API"),
    (
        "grpc_options.grpc_servicer_functions[1]",
        "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
        "add_HealthServicer_to_server use deploy.grpc_api.servicers.add_health",
    ),
    (f"{APP}.args.api_keys_file", "/nowhere/keys.json", "reflection answers without a key"),
    (
        f"{APP}.runtime_env.env_vars.RAY_SERVE_GRPC_MAX_MESSAGE_SIZE",
        GONE,
        "tide: without RAY_SERVE_GRPC_MAX_MESSAGE_SIZE",
    ),
    (f"{APP}.runtime_env.env_vars.RAY_SERVE_ENABLE_HA_PROXY", "0", "tide: RAY_SERVE_ENABLE_HA_PROXY must be the same"),
    (
        "controller_options.runtime_env.env_vars.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
        "30",
        "tide: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S must be the same",
    ),
]


@pytest.mark.parametrize(
    ("path", "value", "warning"),
    WARNINGS,
    ids=[f"{path}={'gone' if value is GONE else value}" for path, value, _ in WARNINGS],
)
def test_what_works_and_was_hardly_meant_is_a_warning(path: str, value: Any, warning: str) -> None:
    assert [warning in each for each in warnings_of(path, value)] == [True]


@pytest.mark.parametrize("seconds", ["279", GONE, "never"], ids=["too short", "not set", "no number"])
def test_haproxy_that_would_cut_the_longest_answer_when_replicas_change_is_a_warning(seconds: Any) -> None:
    name, config = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", CONFIG
    for holder in ("controller_options", APP):
        config = changed(f"{holder}.runtime_env.env_vars.{name}", seconds, config)
    shown = "120" if seconds is GONE else seconds
    assert [
        each.startswith(f"tide: {name} ({shown}) is below limits.max_timeout_s (280)") for each in check(config)
    ] == [True]


def test_serves_slower_proxy_is_a_warning() -> None:
    config = changed("controller_options", GONE)
    config = changed(f"{APP}.runtime_env.env_vars.RAY_SERVE_ENABLE_HA_PROXY", GONE, config)
    assert ["slower Python proxy" in each for each in check(config)] == [True]


def test_an_application_without_deployments_has_serves_defaults() -> None:
    warnings = warnings_of(f"{APP}.deployments", [])
    assert [each.split()[1] for each in warnings] == [
        "graceful_shutdown_timeout_s",
        "max_queued_requests",
        "max_ongoing_requests",
    ]
