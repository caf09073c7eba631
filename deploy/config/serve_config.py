"""A strict check of a Serve config. Serve itself ignores unknown keys, so a typo would have no effect.

Serve or TIDE must know every key and accept every value. Settings that are valid but probably a mistake are warnings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from deploy.artefact_source import ArtefactSource
from deploy.config.args import AppArgs
from deploy.config.policy import LivePolicy
from deploy.keys import Caller, KeyRing
from deploy.object_store import is_url, refuse_credentials
from deploy.strict import yaml_file
from deploy.strict.schema import imported, validated
from tide_core.config import LEAST_AUTO_ROWS, MOST_AUTO_ROWS, REMOVED, EngineConfig
from tide_core.errors import ArtefactError, ConfigError, RequestError, refuse_unknown

OUR_DEPLOYMENT = "TideServer"
SERVICER = "deploy.grpc_api.servicers.add_tide"
GENERATED = {
    "tide.v1.tide_pb2_grpc.add_TideServiceServicer_to_server": SERVICER,
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server": "deploy.grpc_api.servicers.add_health",
}
"""Generated functions that work, and ours in their place, which give an undecodable body its status and keep health out
of the request slots."""
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
HARD_STOP, DEFAULT_HARD_STOP_S = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "120"
MESSAGE_SIZE = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"
ROUTE = re.compile(r"/|(/[^/{}\s]+)+")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def check_file(path: Path) -> list[str]:
    """Warnings; raises ConfigError for a setting that would fail or be ignored."""
    return check(yaml_file.read(path))


def check(config: Mapping[str, Any]) -> list[str]:
    """The same for a parsed config."""
    from ray.serve.schema import ServeDeploySchema

    from deploy.app import build_app

    schema = validated(ServeDeploySchema, config, "")
    _check_ports(schema)
    for index, path in enumerate(schema.grpc_options.grpc_servicer_functions):
        imported(path, f"grpc_options.grpc_servicer_functions[{index}]")
    warnings = _warnings(schema)
    for index, (app, given) in enumerate(zip(schema.applications, config["applications"], strict=True)):
        where = f"applications[{index}]"
        _check_for_serve(given, where)
        if imported(app.import_path, f"{where}.import_path") is build_app:
            args, policies = _check_app(given, where)
            warnings += _app_warnings(schema, app, args)
            for place, policy in policies:
                warnings += [f"{app.name}: {each}" for each in _check_artefact(args, policy, where, place)]
    return warnings


def _check_ports(schema: Any) -> None:
    http, grpc = schema.http_options.port, schema.grpc_options.port
    for name, port in (("http_options.port", http), ("grpc_options.port", grpc)):
        if not 1 <= port <= 65535:
            raise ConfigError(name, port, "a port in 1..65535")
    if http == grpc:
        raise ConfigError("grpc_options.port", grpc, "another port than http_options.port")


def _check_for_serve(app: Mapping[str, Any], where: str) -> None:
    """Check what Serve's schema accepts but Serve rejects or ignores later."""
    from ray.runtime_env import RuntimeEnv
    from ray.serve.config import AutoscalingPolicy

    prefix = app.get("route_prefix", "/")
    if prefix is not None and not ROUTE.fullmatch(prefix):
        raise ConfigError(f"{where}.route_prefix", prefix, "null, / or /a/path, without braces")
    holders = [(app, where)]
    for index, deployment in enumerate(app.get("deployments") or ()):
        holders.append((deployment.get("ray_actor_options") or {}, f"{where}.deployments[{index}].ray_actor_options"))
    for holder, place in holders:
        environment = holder.get("runtime_env") or {}
        refuse_unknown(f"{place}.runtime_env", environment, sorted(RuntimeEnv.known_fields))
        for name, value in (environment.get("env_vars") or {}).items():
            if not isinstance(value, str):
                raise ConfigError(f"{place}.runtime_env.env_vars.{name}", value, "text: quote it")
    if app.get("autoscaling_policy") is not None:
        validated(AutoscalingPolicy, app["autoscaling_policy"], f"{where}.autoscaling_policy")


def _check_app(app: Mapping[str, Any], where: str) -> tuple[AppArgs, list[tuple[str, LivePolicy]]]:
    """Check arguments, policy and key file of a TIDE application. The policies come with their places."""
    given, place = app.get("args") or {}, f"{where}.args"
    if isinstance(engine := given.get("engine"), Mapping):
        for name in ("model", "artefact"):
            refuse_credentials(f"{place}.engine.{name}", str(engine.get(name) or ""))
        refuse_unknown(f"{place}.engine", engine, [*(field.name for field in fields(EngineConfig)), *REMOVED])
        try:
            EngineConfig.from_mapping(engine)
        except ConfigError as error:
            raise ConfigError(f"{place}.engine.{error.field}", error.value, error.expected) from error
    args = validated(AppArgs, given, place)
    if args.api_keys_file is not None and Path(args.api_keys_file).expanduser().exists():
        KeyRing.read(args.api_keys_file)  # a missing file may exist on the machine that serves
    policies = []
    for index, deployment in enumerate(app.get("deployments") or ()):
        place = f"{where}.deployments[{index}]"
        if deployment["name"] != OUR_DEPLOYMENT:
            raise ConfigError(f"{place}.name", deployment["name"], OUR_DEPLOYMENT)
        try:
            policies.append((place, LivePolicy.read(deployment.get("user_config") or {})))
        except ConfigError as error:
            raise ConfigError(f"{place}.{error.field}", error.value, error.expected) from error
    return args, policies or [(where, LivePolicy())]


def _check_artefact(args: AppArgs, policy: LivePolicy, where: str, place: str) -> list[str]:
    """Open the artefact that the policy or the engine's settings name, and check the policy's defaults with it. Whether
    it belongs to the model is seen at the start, or by `tide inspect --model`."""
    own = str(EngineConfig.from_mapping(args.engine).artefact)
    named = own if policy.artefact is None else policy.artefact
    setting = f"{where}.args.engine.artefact" if policy.artefact is None else f"{place}.user_config.artefact"
    if named in ("auto", "none"):
        return []
    folder = Path(named).expanduser()
    if ArtefactSource(named).is_followed and (is_url(named) or not folder.exists()):
        return []  # nothing has to be published yet
    if is_url(named) or not folder.exists():
        return [f"the artefact {named} is not on this machine, so it was not opened"]
    from tide_core.engine.assemble import checkpoint_policies  # torch comes with them
    from tide_core.exits.artefact.artefact import load_artefact
    from tide_core.exits.policy import resolve_policy

    try:
        artefact = load_artefact(ArtefactSource(str(folder)).local(None).folder, None)
    except ArtefactError as error:
        raise ConfigError(setting, named, f"a sound artefact: {error}") from error
    try:
        params = policy.params({}, Caller(), "verified")
        resolve_policy(params, checkpoint_policies(artefact), artefact.manifest.model.num_layers)
    except RequestError as error:
        raise ConfigError(f"{place}.user_config.{error.field}", error.value, error.expected) from error
    return []


def _warnings(schema: Any) -> list[str]:
    functions = schema.grpc_options.grpc_servicer_functions
    warnings = [
        f"grpc_options.grpc_servicer_functions: instead of {name} use {GENERATED[name]}"
        for name in functions
        if name in GENERATED
    ]
    if SERVICER not in [GENERATED.get(name, name) for name in functions]:
        warnings.append(f"grpc_options.grpc_servicer_functions: without {SERVICER} there is no gRPC API")
    if _env(schema.controller_options).get(HA_PROXY) != "1":
        warnings.append(f"controller_options: without {HA_PROXY}: '1' tokens go through Serve's slower Python proxy")
    for name in ("http_options", "grpc_options"):
        if getattr(schema, name).request_timeout_s is None:
            warnings.append(f"{name}.request_timeout_s: not set, so Serve never ends a request")
    return warnings


def _app_warnings(schema: Any, app: Any, args: AppArgs) -> list[str]:
    """Warnings for one application; each begins with its name."""
    warnings, longest = [], args.limits.max_timeout_s
    ours, controllers = _env(app), _env(schema.controller_options)
    for name in sorted({HA_PROXY, *controllers}):
        if name.startswith("RAY_SERVE_") and ours.get(name) != controllers.get(name):
            warnings.append(f"{name} must be the same in runtime_env of the application and of the controller")
    hard_stop = controllers.get(HARD_STOP, DEFAULT_HARD_STOP_S)
    if controllers.get(HA_PROXY) == "1" and not (hard_stop.isdecimal() and int(hard_stop) >= longest):
        warnings.append(
            f"{HARD_STOP} ({hard_stop}) is below limits.max_timeout_s ({longest:g}): "
            "a long answer may be cut when the replicas change"
        )
    if MESSAGE_SIZE not in ours:
        warnings.append(f"without {MESSAGE_SIZE} in its runtime_env a gRPC message may be as large as 2 GiB")
    host = schema.http_options.host
    if args.api_keys_file is None and host not in LOCAL_HOSTS:
        warnings.append(f"no api_keys_file, and http_options.host is {host}: anyone who reaches it may use it")
    if args.api_keys_file is not None and schema.grpc_options.enable_reflection:
        warnings.append("grpc_options.enable_reflection: reflection answers without a key")
    for name in ("http_options", "grpc_options"):
        timeout = getattr(schema, name).request_timeout_s
        if timeout is not None and timeout <= longest:
            warnings.append(
                f"{name}.request_timeout_s ({timeout:g}) should be above limits.max_timeout_s ({longest:g}), "
                "or Serve ends requests before they can return their own error"
            )
    for deployment in app.deployments or (None,):
        warnings += _deployment_warnings(deployment, args)
    return [f"{app.name}: {warning}" for warning in warnings]


def _deployment_warnings(deployment: Any, args: AppArgs) -> list[str]:
    warnings, longest = [], args.limits.max_timeout_s
    grace = _number(deployment, "graceful_shutdown_timeout_s", 20)
    if grace < longest:
        warnings.append(
            f"graceful_shutdown_timeout_s ({grace:g}) is below limits.max_timeout_s ({longest:g}): "
            "a long answer may be cut when a replica stops"
        )
    if _number(deployment, "max_queued_requests", -1) == -1:
        warnings.append("max_queued_requests is not set, so Serve's queue is unbounded")
    ongoing, engine = _number(deployment, "max_ongoing_requests", 5), EngineConfig.from_mapping(args.engine)
    rows = engine.max_rows
    if isinstance(rows, str):  # auto
        rows = MOST_AUTO_ROWS if engine.device == "cuda" else LEAST_AUTO_ROWS
    if ongoing < rows:
        warnings.append(f"max_ongoing_requests ({ongoing:g}) is below engine.max_rows ({rows}): rows stay empty")
    return warnings


def _number(deployment: Any, name: str, default: float) -> float:
    """The setting, or Serve's default."""
    value = getattr(deployment, name, None)
    return value if isinstance(value, (int, float)) else default


def _env(holder: Any) -> Mapping[str, Any]:
    return (getattr(holder, "runtime_env", None) or {}).get("env_vars") or {}
