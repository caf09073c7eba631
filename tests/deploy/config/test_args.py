"""Arguments of the application and the limits of one request: ranges, defaults, errors that name the field."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deploy.config.args import AppArgs, Limits
from tide_core.config import MOST_AUTO_ROWS, EngineConfig
from tide_core.errors import RequestError
from tide_core.request import SamplingParams

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "config.yaml").read_text())
APPLICATION: dict[str, Any] = CONFIG["applications"][0]


def test_engine_settings_are_completed_with_their_defaults() -> None:
    args = AppArgs.model_validate({"engine": {"model": "demo", "max_rows": 8}})
    assert EngineConfig(**args.engine) == EngineConfig(model="demo", max_rows=8)
    assert args.served_model_name is None
    assert args.limits == Limits()
    assert (args.api_keys_file, args.playground) == (None, None)


def test_arguments_reach_a_replica_as_they_were_checked() -> None:
    """The builder sends plain values; the replica checks them again."""
    given = {"engine": {"model": "demo", "max_rows": 3}, "limits": {"max_tokens": 9}, "api_keys_file": "keys.json"}
    args = AppArgs.model_validate(given)
    assert AppArgs(**args.model_dump()) == args
    assert (args.engine["max_rows"], args.limits.max_tokens) == (3, 9)


@pytest.mark.parametrize("name", ["demo", ["demo"], ["demo", "gpt-4o", "text-embedding"]])
def test_a_model_is_served_by_one_name_or_several(name: Any) -> None:
    args = AppArgs.model_validate({"served_model_name": name})
    assert args.model_names == ([name] if isinstance(name, str) else name)
    assert AppArgs(**args.model_dump()).model_names == args.model_names, "as a replica reads it"


def test_arguments_cannot_be_changed_after_they_were_checked() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        AppArgs().playground = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engine": {"max_row": 4}}, "did you mean max_rows?"),
        ({"engine": {"max_rows": "4"}}, "max_rows"),
        ({"engine": {"max_rows": 0}}, "max_rows"),
        ({"engine": {"kv_memory_gib": float("nan")}}, "kv_memory_gib"),
        ({"docs_url": "javascript:alert(1)"}, "docs_url"),
        ({"docs_url": 'https://docs.example/"onclick="x'}, "docs_url"),
        ({"engine": []}, "engine"),
        ({"engin": {}}, "engin"),
        ({"served_model_name": 3}, "served_model_name"),
        ({"served_model_name": ""}, "served_model_name"),
        ({"served_model_name": "x" * 257}, "served_model_name"),
        ({"served_model_name": []}, "served_model_name"),
        ({"served_model_name": ["demo", ""]}, "served_model_name"),
        ({"served_model_name": ["demo", 3]}, "served_model_name"),
        ({"served_model_name": ["demo", "demo"]}, "names that differ"),
        ({"limits": {"max_token": 5}}, "max_token"),
        ({"limits": {"max_tokens": 0}}, "max_tokens"),
        ({"limits": 5}, "limits"),
        ({"api_keys_file": ""}, "api_keys_file"),
        ({"api_keys_file": True}, "api_keys_file"),
        ({"playground": "yes"}, "playground"),
        ({"target_wait_s": 0.0}, "target_wait_s"),
        ({"target_wait_s": "2"}, "target_wait_s"),
    ],
    ids=str,
)
def test_unknown_keys_and_wrong_types_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        AppArgs.model_validate(values)
    assert named in str(refused.value)


def test_serve_sees_the_class_of_the_builders_argument() -> None:
    from deploy.app import build_app

    assert inspect.signature(build_app).parameters["args"].annotation is AppArgs


def test_the_builder_needs_no_torch() -> None:
    code = (
        "import sys; from deploy.app import build_app; from deploy.config.args import AppArgs; "
        "build_app(AppArgs()); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "False\n"


def test_the_shipped_config_fits_the_application() -> None:
    from deploy.app import TideServer, build_app

    assert APPLICATION["import_path"] == f"{build_app.__module__}:{build_app.__name__}"
    (deployment,) = APPLICATION["deployments"]
    assert deployment["name"] == TideServer.name
    args = AppArgs.model_validate(APPLICATION["args"])
    assert args.engine["model"] == "demo"
    # Serve must not hold back what the engine could batch or queue.
    most_rows = min(MOST_AUTO_ROWS, args.engine["max_batch_tokens"])
    assert deployment["max_ongoing_requests"] >= most_rows + args.engine["max_queued"]
    assert CONFIG["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize(("asked", "allowed"), [(1, True), (100, True), (101, False), (2**31 - 1, False)])
def test_a_request_for_more_tokens_than_the_limit_is_refused_by_name(asked: int, allowed: bool) -> None:
    limits, params = Limits(max_tokens=100), SamplingParams(max_tokens=asked)
    if allowed:
        limits.check(params)
    else:
        with pytest.raises(RequestError, match=f"max_tokens: got {asked}, expected at most 100"):
            limits.check(params)


@pytest.mark.parametrize(("asked", "granted"), [(None, 20.0), (0.5, 0.5), (20, 20.0), (1e9, 20.0)])
def test_a_request_gets_the_time_it_asks_for_up_to_the_limit(asked: float | None, granted: float) -> None:
    assert Limits(max_timeout_s=20.0).timeout_s(asked) == granted


@pytest.mark.parametrize("asked", [0, -1.0, math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_refused(asked: float) -> None:
    with pytest.raises(RequestError, match="timeout_s"):
        Limits().timeout_s(asked)


@pytest.mark.parametrize("name", list(Limits.model_fields))
@pytest.mark.parametrize("value", [0, -1, 10**12, math.nan, math.inf, True, "7", None], ids=str)
def test_a_limit_out_of_its_range_or_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        Limits.model_validate({name: value})
    assert [error["loc"] for error in refused.value.errors()] == [(name,)]


def test_an_unknown_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_token\n"):
        Limits.model_validate({"max_token": 5})


def test_limits_as_they_come_are_those_of_the_security_design() -> None:
    limits = Limits()
    assert (limits.max_tokens, limits.body_bytes, limits.json_depth) == (4096, 2_000_000, 64)
    assert (limits.header_bytes, limits.num_headers) == (65536, 100)
    with pytest.raises(ValidationError, match="frozen"):
        limits.max_tokens = 10**6  # type: ignore[misc]
