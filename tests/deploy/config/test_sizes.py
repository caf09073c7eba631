"""What `tide check-config --device` says of the applications of a Serve config."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config.sizes import sizes
from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tide_core.errors import ConfigError


def config_of(*engines: dict[str, Any]) -> dict[str, Any]:
    return {"applications": [{"name": f"app{n}", "args": {"engine": engine}} for n, engine in enumerate(engines)]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("sizes")
    return str(save_model(root / "model")), str(save_artefact_for_it(root / "artefact", kind="block"))


def test_every_application_has_a_line(folders: tuple[str, str]) -> None:
    model, _ = folders
    first, second = sizes(config_of({"model": model}, {"model": model, "max_rows": 8}), "l4")
    assert first.startswith("app0 on l4: weights 0.00 GiB, bfloat16 (auto) on cuda, KV pool ")
    assert "max_rows 256 (auto), max_batch_tokens 2048 (auto): fits " in first
    assert "app1 on l4: " in second
    assert "max_rows 8, " in second


@pytest.mark.parametrize("model", ["s3://bucket/model", "nobody/has-this"])
def test_a_model_that_is_not_here_is_not_fetched(model: str) -> None:
    [line] = sizes(config_of({"model": model}), "h200")
    assert line == f"app0 on h200: the model {model} is not on this machine, so nothing was computed"


def test_an_artefact_that_is_here_takes_its_part_of_the_pool(folders: tuple[str, str]) -> None:
    model, artefact = folders
    kept = {"model": model, "kv_memory_gib": 0.001, "max_model_len": 256}
    plain, exits, missing = (
        next(sizes(config_of({**kept, "artefact": name}), "cpu"))
        for name in ("none", artefact, "/nowhere/current.json")
    )
    blocks = [int(line.split(" GiB in ")[1].split()[0]) for line in (plain, exits, missing)]
    assert blocks[1] < blocks[0] == blocks[2]


def test_what_does_not_fit_is_refused_by_its_place(folders: tuple[str, str]) -> None:
    model, _ = folders
    with pytest.raises(ConfigError, match=r"applications\[1\]\.args\.engine\.kv_memory_gib: got 100, expected at most"):
        list(sizes(config_of({"model": model}, {"model": model, "kv_memory_gib": 100}), "l4"))
    with pytest.raises(ConfigError, match=r"--device: got '.*', expected more memory than the weights take"):
        list(sizes(config_of({"model": model}), "cuda:0.0001GiB"))
