"""A run in an object store: each machine gets the files it pulls as they are in the store, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.calibration import storage
from deploy.calibration.storage import RemoteRunFiles, open_run, remove
from deploy.object_store import location, put
from tide_core.calibration.ledger import RunFiles
from tide_core.errors import ConfigError


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


def machine(url: str, folder: Path) -> RemoteRunFiles:
    folder.mkdir()
    return RemoteRunFiles(url, folder)


def test_what_one_machine_keeps_another_can_bring(url: str, tmp_path: Path) -> None:
    one, two = machine(url, tmp_path / "one"), machine(url, tmp_path / "two")
    one.path("shards/a").write_bytes(b"first")
    one.push(["shards/a"])
    two.pull(["shards/a", "shards/never"])
    assert (two.folder / "shards/a").read_bytes() == b"first"
    assert not (two.folder / "shards/never").exists()
    assert [path.name for path in (tmp_path / "store/run/shards").iterdir()] == ["a"], "and no temporary file"


def test_a_file_that_changed_is_brought_again_and_one_that_did_not_is_not(url: str, tmp_path: Path) -> None:
    one, two = machine(url, tmp_path / "one"), machine(url, tmp_path / "two")
    one.path("ledger").write_bytes(b"1")
    one.push(["ledger"])
    two.pull(["ledger"])
    before = (two.folder / "ledger").stat().st_ino
    two.pull(["ledger"])
    assert (two.folder / "ledger").stat().st_ino == before
    one.path("ledger").write_bytes(b"second")
    one.push(["ledger"])
    two.pull(["ledger"])
    assert (two.folder / "ledger").read_bytes() == b"second"
    before = (one.folder / "ledger").stat().st_ino
    one.pull(["ledger"])
    assert (one.folder / "ledger").stat().st_ino == before, "nor one that was kept from here"


def test_a_file_of_the_same_size_that_changed_is_brought_again(url: str, tmp_path: Path) -> None:
    one, two = machine(url, tmp_path / "one"), machine(url, tmp_path / "two")
    for text in (b"first", b"other"):
        one.path("state").write_bytes(text)
        one.push(["state"])
        two.pull(["state"])
        assert (two.folder / "state").read_bytes() == text


def test_a_machine_that_dies_while_it_keeps_a_file_leaves_the_old_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine(url, tmp_path / "one"), machine(url, tmp_path / "two")
    one.path("shards/a").write_bytes(b"old")
    one.push(["shards/a"])
    store = one._store

    class Dying:
        """A store that takes a few bytes of a file, and then no more."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        @contextlib.contextmanager
        def open_output_stream(self, target: str) -> Iterator[Any]:
            with store.open_output_stream(target) as stream:
                stream.write(b"ne")
            raise KeyboardInterrupt
            yield

    monkeypatch.setattr(one, "_store", Dying())
    one.path("shards/a").write_bytes(b"new one")
    with pytest.raises(KeyboardInterrupt):
        one.push(["shards/a"])
    two.pull(["shards/a"])
    assert (two.folder / "shards/a").read_bytes() == b"old"


@pytest.mark.parametrize("kind", ["s3", "gcs", "abfs"])
def test_a_store_in_which_a_file_appears_whole_is_not_asked_to_move_it(kind: str) -> None:
    puts = []

    class Whole:
        type_name = kind

        @contextlib.contextmanager
        def open_output_stream(self, target: str) -> Iterator[Any]:
            puts.append(target)
            yield io.BytesIO()

    put(Whole(), "bucket/run/shards/a", b"1")
    assert puts == ["bucket/run/shards/a"]


def test_a_disk_that_fails_while_a_file_is_brought_leaves_the_old_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine(url, tmp_path / "one"), machine(url, tmp_path / "two")
    for text in (b"old", b"new one"):
        one.path("a").write_bytes(text)
        one.push(["a"])
        if text == b"old":
            two.pull(["a"])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            two.pull(["a"])
    assert (two.folder / "a").read_bytes() == b"old"
    two.pull(["a"])
    assert (two.folder / "a").read_bytes() == b"new one", "and it does not count as brought"


def test_options_of_a_url_stay_at_its_end() -> None:
    assert location("s3://bucket/runs/?region=x&a=b", "run", "ray") == "s3://bucket/runs/run/ray?region=x&a=b"
    assert location("s3://bucket/runs", "run") == "s3://bucket/runs/run"
    assert location("/what?/runs/", "run") == "/what?/runs/run", "a folder has none"


def test_a_file_that_is_gone_is_gone_everywhere(url: str, tmp_path: Path) -> None:
    one, two = machine(url, tmp_path / "one"), machine(url, tmp_path / "two")
    one.path("state").write_bytes(b"1")
    one.push(["state"])
    two.pull(["state"])
    (two.folder / "state").unlink()
    two.push(["state"])
    one.pull(["state"])
    assert not (one.folder / "state").exists()


def test_a_file_that_was_damaged_locally_is_not_hidden(url: str, tmp_path: Path) -> None:
    """`bring` compares with the store, so that a local copy which vanished comes back."""
    one = machine(url, tmp_path / "one")
    one.path("a").write_bytes(b"1")
    one.push(["a"])
    (one.folder / "a").unlink()
    one.pull(["a"])
    assert (one.folder / "a").read_bytes() == b"1"


def test_files_that_are_one_thing_are_never_seen_half_replaced(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machine(url, tmp_path / "one"), machine(url, tmp_path / "two")
    names = ["artefact/heads", "artefact/report", "artefact/manifest"]

    def write(text: str) -> None:
        for name in names:
            one.path(name).write_text(text)

    write("old")
    one.push_together(names)
    write("new")
    seen: list[bool] = []

    def watched(store: Any, there: str, raw: bytes) -> None:
        two.pull(names)
        seen.append((two.folder / names[-1]).exists())
        put(store, there, raw)

    monkeypatch.setattr(storage, "put", watched)
    one.push_together(names)
    assert seen == [False, False, False], "the last file is absent while the others change"
    two.pull(names)
    assert [(two.folder / name).read_text() for name in names] == ["new"] * 3


def test_a_plain_folder_is_used_as_it_is(tmp_path: Path) -> None:
    with open_run(str(tmp_path), "run") as files:
        assert type(files) is RunFiles
        assert files.folder == tmp_path / "run"


def test_the_folder_of_a_stored_run_goes_with_it(url: str) -> None:
    with open_run(url.removesuffix("/run"), "run") as files:
        folder = files.folder
        assert folder.is_dir()
    assert not folder.exists()


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_and_no_other(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_run(url, "run") as files:
        dead = tmp_path / "tide-run-dead"
        shutil.copytree(files.folder, dead)
        (dead / "shard").write_bytes(b"1")
        with open_run(url, "run") as other:
            assert files.folder.is_dir()
            assert other.folder.is_dir()
            assert not dead.exists()


def test_a_folder_of_a_store_is_removed_with_all_that_is_in_it(url: str, tmp_path: Path) -> None:
    one = machine(url, tmp_path / "one")
    for name in ("ray/train-1/a", "ray/train-1/b/c", "shards/a"):
        one.path(name).write_bytes(b"1")
    one.push(["ray/train-1/a", "ray/train-1/b/c", "shards/a"])
    for place in (url, str(tmp_path / "store")):
        remove(place.removesuffix("/run"), "run", "ray")
        remove(place.removesuffix("/run"), "run", "ray")  # and it is no fault if nothing is there
        assert [path.name for path in (tmp_path / "store" / "run").iterdir()] == ["shards"]


def test_a_store_that_only_fsspec_knows_is_as_good(tmp_path: Path) -> None:
    one, two = machine("memory://bucket/run", tmp_path / "one"), machine("memory://bucket/run", tmp_path / "two")
    for text in (b"first", b"second one"):
        one.path("shards/a").write_bytes(text)
        one.push(["shards/a"])
        two.pull(["shards/a", "shards/never"])
        assert (two.folder / "shards/a").read_bytes() == text
    (one.folder / "shards/a").unlink()
    one.push(["shards/a"])
    two.pull(["shards/a"])
    assert not (two.folder / "shards/a").exists()


def test_an_unknown_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="storage"):
        RemoteRunFiles("nosuchscheme://x/y", tmp_path)
