"""Weights from a store arrive whole or not at all, are fetched once, and never change under a server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy import fetch, weights
from deploy.weights import fetch_model, local_model
from tide_core.errors import ConfigError, ModelError

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the weights again",
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket" / "mine"
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"another format")
    return folder


def url(store: Path) -> str:
    return f"file://{store}"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_model_is_fetched_to_its_own_name_without_pickles_and_second_copies(store: Path, tmp_path: Path) -> None:
    folder = fetch_model(url(store), tmp_path / "models")
    assert folder == tmp_path / "models" / "mine"
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_complete_model_is_not_fetched_again(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_model(url(store), tmp_path / "models")
    monkeypatch.setattr(weights._Listing, "_copy", lambda *_: pytest.fail("fetched again"))
    assert fetch_model(url(store), tmp_path / "models") == first


def test_an_interrupted_fetch_leaves_no_model_and_the_next_one_continues(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, copied = weights._Listing._copy, []

    def dies_at_the_weights(self: Any, name: str, folder: Path) -> None:
        if name == "model.safetensors":
            raise OSError("the network is gone")
        copy(self, name, folder)

    def watched(self: Any, name: str, folder: Path) -> None:
        copied.append(name)
        copy(self, name, folder)

    monkeypatch.setattr(weights, "DOWNLOADS", 1)  # in order of name, so that config.json is there before the weights
    monkeypatch.setattr(weights._Listing, "_copy", dies_at_the_weights)
    with pytest.raises(ModelError, match="the network is gone"):
        fetch_model(url(store), tmp_path / "models")
    assert not (tmp_path / "models" / "mine").exists()
    monkeypatch.setattr(weights._Listing, "_copy", watched)
    fetch_model(url(store), tmp_path / "models")
    assert "model.safetensors" in copied
    assert "config.json" not in copied


def test_a_file_that_ends_too_early_is_no_model(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = weights._Listing.__init__

    def promises_more(self: Any, place: str) -> None:
        init(self, place)
        self.files = {name: (size + 1, at) for name, (size, at) in self.files.items()}

    monkeypatch.setattr(weights._Listing, "__init__", promises_more)
    with pytest.raises(ModelError, match="as the store lists it"):
        fetch_model(url(store), tmp_path / "models")
    assert not (tmp_path / "models" / "mine").exists()


def test_a_folder_that_is_in_use_is_not_replaced_by_another_version(store: Path, tmp_path: Path) -> None:
    folder = fetch_model(url(store), tmp_path / "models")
    (store / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ModelError, match="a name that is free"):
        fetch_model(url(store), tmp_path / "models")
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_folder_that_somebody_else_made_is_not_taken_for_the_model(store: Path, tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    with pytest.raises(ModelError, match="a name that is free"):
        fetch_model(url(store), tmp_path / "models")


def test_a_server_reads_each_version_of_a_url_from_a_folder_of_its_own(store: Path, tmp_path: Path) -> None:
    first = local_model(url(store), tmp_path / "cache")
    assert local_model(url(store), tmp_path / "cache") == first
    (store / "model.safetensors").write_bytes(b"other weights")
    second = local_model(url(store), tmp_path / "cache")
    assert Path(first, "model.safetensors").read_bytes() == b"weights"
    assert Path(second, "model.safetensors").read_bytes() == b"other weights"


def test_a_file_of_the_same_size_with_another_time_is_another_version(store: Path, tmp_path: Path) -> None:
    first = local_model(url(store), tmp_path / "cache")
    (store / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(store / "model.safetensors", (1, 1))
    assert local_model(url(store), tmp_path / "cache") != first


@pytest.mark.parametrize("model", ["demo", "/models/mine", "org/name", "mine.gguf"])
def test_what_is_no_url_is_left_to_the_engine(model: str) -> None:
    assert local_model(model) == model


def test_an_incomplete_folder_of_a_store_is_refused_by_what_it_lacks(store: Path, tmp_path: Path) -> None:
    (store / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="a tokenizer in it"):
        fetch_model(url(store), tmp_path / "models")
    assert not (tmp_path / "models" / "mine").exists()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is none"):
        fetch_model(f"file://{tmp_path}/nothing", tmp_path / "models")


def test_credentials_in_a_url_are_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch_model("s3://me:hunter2@bucket/mine", tmp_path)
    assert "hunter2" not in str(caught.value)


def test_the_command_prints_the_folder_of_a_url_and_asks_the_hub_for_an_id(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tide_core.models import hub

    app = fetch.typer.Typer()
    app.command()(fetch.main)
    done = CliRunner().invoke(app, [url(store), "--models", str(tmp_path / "models")])
    assert (done.exit_code, done.stdout.strip()) == (0, str(tmp_path / "models" / "mine"))
    assert json.loads((tmp_path / "models" / "mine" / weights.SOURCE).read_text())["url"] == url(store)
    monkeypatch.setattr(hub, "fetch", lambda model: Path("/hub") / model)
    assert CliRunner().invoke(app, ["org/name"]).stdout.strip() == "/hub/org/name"


def test_the_command_ends_with_code_2_and_one_line_if_the_name_is_neither(tmp_path: Path) -> None:
    app = fetch.typer.Typer()
    app.command()(fetch.main)
    done = CliRunner().invoke(app, ["/not/a/name"])
    assert done.exit_code == 2
    assert "a URL such as" in done.stderr
