"""What `tide check-config --device` says of the applications of a Serve config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from deploy.config.sizes import sizes
from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tests.models.gguf_factory import make_gguf
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


def test_quantised_weights_count_as_they_are_kept_and_only_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tide_core.kernels._native", reason="the native module is not built")
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tide_core.kv.sizing.gib", str)  # bytes: the file is small
    file = make_gguf(tmp_path / "tiny.gguf", kind=GGMLQuantizationType.Q8_0).path
    counted = {}
    for quantization, device in (("auto", "cpu"), ("none", "cpu"), ("auto", "l4")):
        [line] = sizes(config_of({"model": str(file), "quantization": quantization}), device)
        counted[quantization, device] = int(line.split(": weights ")[1].split(",")[0])
    widened = counted["none", "cpu"]
    assert counted["auto", "l4"] == widened // 2, "a GPU runs it in bfloat16"
    assert 8.5 / 32 < counted["auto", "cpu"] / widened < 0.35, "8 bits and a scale, and a few weights in float32"
    assert not list(tmp_path.rglob("*.safetensors")), "nothing was widened for the answer"


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
