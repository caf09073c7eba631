"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tide_core.disk import write_whole

pytestmark = pytest.mark.unit


def test_a_disk_that_is_full_names_the_file_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*shard'"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["shard"]


def test_every_byte_is_on_the_disk_before_the_name_is_and_then_the_name_is_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, done = tmp_path / "shard", []
    path.write_bytes(b"old")
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append("the folder" if name == tmp_path else f"{name.stat().st_size} bytes of {name.suffix}")
        fsync(descriptor)

    def renamed(before: Path, after: Path) -> None:
        assert after.read_bytes() == b"old"
        done.append(f"{before.suffix} to {after.name}")
        rename(before, after)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    write_whole(path, b"new one")
    assert done == ["7 bytes of .tmp", ".tmp to shard", "the folder"]
    assert path.read_bytes() == b"new one"


def test_a_secret_is_never_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes = tmp_path / "keys", []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    write_whole(path, b"secret", mode=0o600)
    assert modes[0] == stat.S_IMODE(path.stat().st_mode) == 0o600
