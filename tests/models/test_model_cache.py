from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tide_core.errors import ModelError
from tide_core.models import model_cache
from tide_core.models.model_cache import MANIFEST, converted


class Converter:
    """Writes a small folder and counts how often it was asked to."""

    def __init__(self, *, pause_s: float = 0.0) -> None:
        self.calls = 0
        self.pause_s = pause_s

    def __call__(self, source: Path, target: Path) -> None:
        self.calls += 1
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (target / name).write_bytes(name.encode() + source.read_bytes())
            time.sleep(self.pause_s)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"source " * 100)
    return path


def temporary_folders(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if path.name.endswith(".tmp")]


def test_a_source_is_converted_once_into_a_folder_named_after_its_digest(source: Path, tmp_path: Path) -> None:
    convert = Converter()
    folder = converted(source, convert, tmp_path / "cache")
    assert folder == converted(source, convert, tmp_path / "cache")
    assert convert.calls == 1
    assert folder.name == f"weights-{model_cache.sha256(source)[:16]}"
    assert temporary_folders(tmp_path / "cache") == []


def test_the_manifest_names_source_and_every_file(source: Path, tmp_path: Path) -> None:
    folder = converted(source, Converter(), tmp_path / "cache")
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source"] == {"name": "weights.gguf", "size": 700, "sha256": model_cache.sha256(source)}
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {MANIFEST}
    for name, entry in manifest["files"].items():
        assert entry == {"size": (folder / name).stat().st_size, "sha256": model_cache.sha256(folder / name)}


def test_another_source_of_the_same_name_gets_its_own_folder(source: Path, tmp_path: Path) -> None:
    first = converted(source, Converter(), tmp_path / "cache")
    source.write_bytes(b"changed")
    assert converted(source, Converter(), tmp_path / "cache") != first


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[50] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def cut_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:60])


def edit_manifest(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        change(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return edit


def replace_folder_by_a_file(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("not a folder")


BREAKS: dict[str, Callable[[Path], object]] = {
    "missing file": lambda folder: (folder / "tokenizer.json").unlink(),
    "flipped byte": flip_a_byte,
    "cut file": lambda folder: os.truncate(folder / "model.safetensors", 10),
    "missing manifest": lambda folder: (folder / MANIFEST).unlink(),
    "cut manifest": cut_manifest,
    "empty manifest": lambda folder: (folder / MANIFEST).write_text(""),
    "manifest of another kind": lambda folder: (folder / MANIFEST).write_text("[1]"),
    "older format": edit_manifest(lambda manifest: manifest.update(format_version=0)),
    "other source": edit_manifest(lambda manifest: manifest.update(source={"sha256": "0"})),
    "no files listed": edit_manifest(lambda manifest: manifest.update(files={})),
    "entry of another kind": edit_manifest(lambda manifest: manifest["files"].update({"config.json": 3})),  # type: ignore[attr-defined]
    "file outside": edit_manifest(lambda manifest: manifest["files"].update({"../../x": {}})),  # type: ignore[attr-defined]
    "file in place of the folder": replace_folder_by_a_file,
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_folder_is_reported_and_built_again(
    name: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert = Converter()
    folder = converted(source, convert, tmp_path / "cache")
    BREAKS[name](folder)
    with caplog.at_level(logging.WARNING, "tide"):
        assert converted(source, convert, tmp_path / "cache") == folder
    assert convert.calls == 2
    assert "built again" in caplog.text
    assert model_cache.find_fault(folder, model_cache.sha256(source)) is None
    assert temporary_folders(tmp_path / "cache") == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("x", 1, "y"), RuntimeError("bug")])
def test_a_conversion_that_stops_leaves_nothing_behind(error: BaseException, source: Path, tmp_path: Path) -> None:
    def stop(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise error

    with pytest.raises(type(error)):
        converted(source, stop, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if not path.name.endswith(".lock")] == []
    assert converted(source, Converter(), tmp_path / "cache").is_dir()


def test_leftovers_of_a_killed_process_are_cleared(source: Path, tmp_path: Path) -> None:
    folder = converted(source, Converter(), tmp_path / "cache")
    left = folder.with_name(f".{folder.name}.0123.tmp")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (folder / MANIFEST).unlink()
    converted(source, Converter(), tmp_path / "cache")
    assert temporary_folders(tmp_path / "cache") == []


def test_those_who_convert_at_once_share_one_conversion(source: Path, tmp_path: Path) -> None:
    convert = Converter(pause_s=0.05)
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(converted(source, convert, tmp_path / "cache")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 6
    assert len(set(folders)) == 1
    assert convert.calls == 1


def test_waiting_for_another_process_has_a_limit(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "LOCK_LIMIT_S", 0.2)
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    with (models / f".weights-{model_cache.sha256(source)[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another process"):
            converted(source, Converter(), tmp_path / "cache")


def test_a_source_that_changes_while_it_is_read_is_refused(source: Path, tmp_path: Path) -> None:
    def slow(source: Path, target: Path) -> None:
        Converter()(source, target)
        source.write_bytes(b"other bytes")

    with pytest.raises(ModelError, match="does not change"):
        converted(source, slow, tmp_path / "cache")
    assert temporary_folders(tmp_path / "cache") == []


@pytest.mark.parametrize("place", ["file", "proc"])
def test_a_cache_that_cannot_be_written_is_named_with_reason_and_remedy(
    place: str, source: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    with pytest.raises(ModelError) as caught:
        converted(source, Converter(), taken if place == "file" else Path("/proc/tide"))
    assert caught.value.field == "cache directory"
    assert "TIDE_CACHE_DIR" in caught.value.expected
    assert "irectory" in caught.value.expected


def test_a_disk_that_is_full_is_named_as_the_cache_directory(source: Path, tmp_path: Path) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="No space left"):
        converted(source, full, tmp_path / "cache")


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        converted(tmp_path / "none.gguf", Converter(), tmp_path / "cache")
    assert caught.value.field == "gguf file"


def test_the_environment_variable_moves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert model_cache.default_cache_dir() == tmp_path / "elsewhere"
    monkeypatch.delenv("TIDE_CACHE_DIR")
    assert model_cache.default_cache_dir() == Path.home() / ".cache" / "tide-serve"
