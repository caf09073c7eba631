"""A calibration job starts only with settings that all make sense, and says which does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy import strict_yaml
from deploy.calibration.settings import JobSettings, read_settings
from tide_core.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "deploy" / "calibrate.yaml"


def read(**changes: Any) -> JobSettings:
    return read_settings({"name": "run", "storage": "/somewhere", **changes})


@pytest.mark.parametrize("url", ["s3://me:hidden@bucket/runs", "s3://bucket/runs?secret_key=hidden&region=x"])
def test_credentials_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="credentials") as caught:
        read(storage=url)
    assert "hidden" not in str(caught.value)


def test_the_shipped_settings_are_sound() -> None:
    settings = read_settings(strict_yaml.read(SHIPPED))
    assert settings.model == "demo"
    assert settings.config.data == "self"
    assert settings.workers.count == settings.train_workers == 1
    assert Path(settings.storage).is_absolute(), "~ is the home of whoever submits"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nmae": "x"}, "nmae"),
        ({"name": "../up"}, "name"),
        ({"name": ""}, "name"),
        ({"storage": "build/runs"}, "whole path"),
        ({"output": "artefacts/mine"}, "whole path"),
        ({"dtype": "float8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"calibration": {"num_sample": 3}}, "num_samples"),
        ({"calibration": {"steps": 0}}, "steps"),
        ({"workers": {"count": 0}}, "workers.count"),
        ({"workers": {"cuont": 2}}, "count"),
        ({"workers": {"stall_s": -1.0}}, "workers.stall_s"),
        ({"train_workers": 0}, "train_workers"),
        ({"train_workers": True}, "train_workers"),
        ({"measure": "no"}, "measure"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(**changes)


@pytest.mark.parametrize("storage", ["s3://bucket/runs", "gs://bucket/runs", "file:///runs"])
def test_a_url_is_a_storage(storage: str) -> None:
    assert read(storage=storage).storage == storage


def test_a_worker_computes_with_as_many_threads_as_it_has_cpus_if_nothing_else_is_said() -> None:
    assert read(workers={"num_cpus": 4.0}).threads == 4
    assert read(workers={"num_cpus": 0.5}).threads == 1
    assert read(workers={"num_cpus": 4.0, "threads": 2}).threads == 2
