"""Arguments and config of the Serve application: what is not known is refused before anything starts."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from deploy.args import AppArgs
from tide_core.config import EngineConfig

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "config.yaml").read_text())
APPLICATION: dict[str, Any] = CONFIG["applications"][0]


def test_engine_settings_are_completed_with_their_defaults() -> None:
    args = AppArgs.model_validate({"engine": {"model": "demo", "checkpoint_layers": [2, 4]}})
    assert EngineConfig(**args.engine) == EngineConfig(model="demo", checkpoint_layers=(2, 4))
    assert args.served_model_name is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engine": {"max_row": 4}}, "did you mean max_rows?"),
        ({"engine": {"max_rows": "4"}}, "max_rows"),
        ({"engine": {"max_rows": 0}}, "max_rows"),
        ({"engine": {"kv_memory_gib": float("nan")}}, "kv_memory_gib"),
        ({"engine": []}, "engine"),
        ({"engin": {}}, "engin"),
        ({"served_model_name": 3}, "served_model_name"),
        ({"served_model_name": ""}, "served_model_name"),
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
        "import sys; from deploy.app import build_app; from deploy.args import AppArgs; "
        "build_app(AppArgs()); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "False\n"


def test_the_shipped_config_has_only_keys_that_serve_knows() -> None:
    from ray.serve.schema import ServeDeploySchema

    checked = ServeDeploySchema.model_validate(CONFIG)  # Serve itself ignores a key it does not know
    assert list(unknown_keys(CONFIG, checked)) == []


def unknown_keys(given: Any, checked: Any, path: str = "") -> list[str]:
    """Keys of `given` that found no place in the models it was read into."""
    if isinstance(checked, BaseModel):
        unknown = [f"{path}.{key}" for key in given if key not in type(checked).model_fields]
        known = (key for key in given if key in type(checked).model_fields)
        return unknown + [
            found for key in known for found in unknown_keys(given[key], getattr(checked, key), f"{path}.{key}")
        ]
    if isinstance(checked, list):
        pairs = enumerate(zip(given, checked, strict=True))
        return [found for index, (one, other) in pairs for found in unknown_keys(one, other, f"{path}[{index}]")]
    return []


def test_a_misspelt_key_of_a_config_is_found() -> None:
    from ray.serve.schema import ServeDeploySchema

    deployment = {**APPLICATION["deployments"][0], "max_ongoing_request": 1}
    broken = {**CONFIG, "applications": [{**APPLICATION, "deployments": [deployment]}]}
    assert unknown_keys(broken, ServeDeploySchema.model_validate(broken)) == [
        ".applications[0].deployments[0].max_ongoing_request"
    ]


def test_the_shipped_config_fits_the_application() -> None:
    from deploy.app import TideServer, build_app

    assert APPLICATION["import_path"] == f"{build_app.__module__}:{build_app.__name__}"
    (deployment,) = APPLICATION["deployments"]
    assert deployment["name"] == TideServer.name
    args = AppArgs.model_validate(APPLICATION["args"])
    assert args.engine["model"] == "demo"
    # Serve must not hold back what the engine could batch, nor let through what the engine would refuse.
    assert deployment["max_ongoing_requests"] == args.engine["max_rows"] + args.engine["max_queued"]
    assert CONFIG["http_options"]["host"] == "127.0.0.1"
