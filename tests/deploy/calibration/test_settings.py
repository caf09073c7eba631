"""A calibration job starts only with valid settings; the error names the invalid one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.calibration.settings import JobSettings, read_settings
from deploy.strict import yaml_file
from tide_core.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "deploy" / "calibrate.yaml"


def read(**changes: Any) -> JobSettings:
    return read_settings({"name": "run", "storage": "/somewhere", **changes})


CREDENTIALS = [
    "s3://me:hidden@bucket/runs",
    "s3://bucket/runs?secret_key=hidden&region=x",
    "s3://bucket/runs?region=x&AccessKey=hidden",
    "s3://bucket/runs?X-Amz-Signature=hidden",
    "s3://bucket/runs?session_token=hidden",
    "abfs://account.blob.core.windows.net/bucket/runs?sv=2020-02-10&sig=hidden",
]


@pytest.mark.parametrize("name", ["storage", "output"])
@pytest.mark.parametrize("url", CREDENTIALS)
def test_credentials_are_refused_and_not_shown(url: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*credentials") as caught:
        read(**{name: url, "dtype": "wrong as well"})
    assert "hidden" not in str(caught.value)


def test_the_shipped_settings_are_sound() -> None:
    settings = read_settings(yaml_file.read(SHIPPED))
    assert settings.model == "demo"
    assert settings.config.data == "self"
    assert settings.workers.count == settings.train_workers == 1
    assert Path(settings.storage).is_absolute(), "~ is the home of the submitting user"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"nmae": "x"}, "nmae"),
        ({"name": "../up"}, "name"),
        ({"name": ""}, "name"),
        ({"storage": "build/runs"}, "whole path"),
        ({"output": "artefacts/mine"}, "whole path"),
        ({"dtype": "float8"}, "dtype"),
        ({"quantization": "int8"}, "quantization"),
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
def test_what_is_wrong_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(**changes)


@pytest.mark.parametrize("storage", ["s3://bucket/runs", "gs://bucket/runs", "file:///runs"])
def test_a_url_is_a_storage(storage: str) -> None:
    assert read(storage=storage).storage == storage


def test_a_worker_has_as_many_threads_as_cpus_by_default() -> None:
    assert read(workers={"num_cpus": 4.0}).threads == 4
    assert read(workers={"num_cpus": 0.5}).threads == 1
    assert read(workers={"num_cpus": 4.0, "threads": 2}).threads == 2


def test_libraries_that_do_not_ask_torch_have_as_many_threads() -> None:
    assert read(workers={"num_cpus": 4.0}).runtime_env == {"env_vars": {"OMP_NUM_THREADS": "4"}}


def test_a_storage_and_an_output_may_be_in_the_home_of_the_user() -> None:
    settings = read(storage="~/runs", output="~/artefact")
    assert (settings.storage, settings.output) == (str(Path.home() / "runs"), str(Path.home() / "artefact"))


def test_a_container_before_an_account_is_no_credential() -> None:
    url = "abfss://container@account.dfs.core.windows.net/runs"
    assert read_settings({"name": "run", "storage": url}).storage == url


def test_what_is_no_url_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"storage: got 's3://\[bucket/x'"):
        read_settings({"storage": "s3://[bucket/x"})
