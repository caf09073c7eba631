"""API keys: the caller of a key, and that no mistake in a file or a header gives access."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.failures import UnauthenticatedError, failure_of
from deploy.keys import LOOK_AGAIN_S, MAX_FILE_BYTES, MAX_HEADER_CHARS, Caller, KeyLimits, KeyRing, add_key
from tide_core.errors import ConfigError
from tide_core.request import MODES

KEY, OTHER = "tide-one", "tide-two"


def entry(name: str = "team-a", key: str = KEY, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), **more}


def ring_of(tmp_path: Path, *entries: dict[str, Any]) -> KeyRing:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": list(entries)}))
    return KeyRing.read(str(path))


def test_a_key_is_known_by_its_hash_and_brings_what_it_is_allowed(tmp_path: Path) -> None:
    limited = entry("team-b", OTHER, modes=["full", "verified"], min_threshold=0.5)
    ring = ring_of(tmp_path, entry(), limited)
    one, two = ring.caller(f"Bearer {KEY}"), ring.caller(f"Bearer {OTHER}")
    assert (one.name, one.modes, one.min_threshold) == ("team-a", MODES, 0.0)
    assert (two.name, two.modes, two.min_threshold) == ("team-b", ("full", "verified"), 0.5)
    assert one.salt != two.salt
    assert min(len(one.salt), len(two.salt)) == 64
    assert hashlib.sha256(KEY.encode()).hexdigest() not in one.salt


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_scheme_is_read_in_any_case(tmp_path: Path, scheme: str) -> None:
    assert ring_of(tmp_path, entry()).caller(f"{scheme} {KEY}").name == "team-a"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        KEY,
        f"Bearer{KEY}",
        f"Basic {KEY}",
        f"Token {KEY}",
        f"Bearer  {KEY}",
        f"Bearer {KEY} ",
        f"Bearer {KEY}\n",
        f"Bearer {KEY}, Bearer {KEY}",
        f" Bearer {KEY}",
        f"Bearer {KEY.upper()}",
        f"Bearer {OTHER}",
        f"Bearer {KEY}\xe9",
        "Bearer \ud800",
        "Bearer \u0000",
        f"Bearer {hashlib.sha256(KEY.encode()).hexdigest()}",
        "Bearer team-a",
        f"Bearer {KEY}" + "x" * MAX_HEADER_CHARS,
        f"Bearer {KEY}" + " " * MAX_HEADER_CHARS,
        "x" * 10_000_000,
    ],
    ids=lambda header: repr(header)[:40],
)
def test_any_other_header_is_refused_and_not_repeated(tmp_path: Path, header: str | None) -> None:
    with pytest.raises(UnauthenticatedError) as refused:
        ring_of(tmp_path, entry()).caller(header)
    failure = failure_of(refused.value, "id")
    assert (failure.status, failure.grpc_code) == (401, "UNAUTHENTICATED")
    assert KEY not in failure.message
    assert len(failure.message) < 100


def test_a_header_that_is_too_long_is_refused_whatever_it_holds(tmp_path: Path) -> None:
    long = "k" * MAX_HEADER_CHARS
    ring = ring_of(tmp_path, entry(key=long), entry("team-b", long[:-7]))
    assert ring.caller(f"Bearer {long[:-7]}").name == "team-b"
    with pytest.raises(UnauthenticatedError):
        ring.caller(f"Bearer {long}")


def test_every_key_is_compared_in_constant_time_wherever_the_right_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ring_of(tmp_path, *(entry(f"team-{number}", f"key-{number}") for number in range(5)))
    compared: list[int] = []
    compare = hmac.compare_digest
    monkeypatch.setattr("deploy.keys.hmac.compare_digest", lambda a, b: compared.append(1) or compare(a, b))
    for key in ("key-0", "key-4"):
        ring.caller(f"Bearer {key}")
    with pytest.raises(UnauthenticatedError):
        ring.caller("Bearer key-5")
    assert len(compared) == 15


def test_without_a_file_whoever_comes_is_anyone() -> None:
    ring = KeyRing.read(None)
    assert ring.is_open
    assert ring.caller(None) == ring.caller("whatever") == Caller()


NO_KEY_FILES = {
    "empty": b"",
    "no json": b"keys:\n- name: team-a\n",
    "a list": b"[]",
    "null": b"null",
    "no keys": b"{}",
    "an empty list of keys": b'{"keys": []}',
    "keys that are no list": b'{"keys": {"team-a": "9f"}}',
    "a text": b'{"keys": ["tide-secret"]}',
    "a key itself": json.dumps({"keys": [{"name": "a", "sha256": "tide-secret"}]}).encode(),
    "no hash": b'{"keys": [{"name": "a"}]}',
    "no name": json.dumps({"keys": [{"sha256": "0" * 64}]}).encode(),
    "upper case": json.dumps({"keys": [{"name": "a", "sha256": "A" * 64}]}).encode(),
    "an unknown field": json.dumps({"keys": [entry(mode="full")]}).encode(),
    "an extra field": json.dumps({"keys": [entry()], "open": True}).encode(),
    "one name twice": json.dumps({"keys": [entry(), entry(key=OTHER)]}).encode(),
    "one key twice": json.dumps({"keys": [entry(), entry("team-b")]}).encode(),
    "one field twice": b'{"keys": [], "keys": [' + json.dumps(entry()).encode() + b"]}",
    "a bad name": json.dumps({"keys": [entry("a b")]}).encode(),
    "a name with a line end": json.dumps({"keys": [entry("a\n")]}).encode(),
    "an unknown mode": json.dumps({"keys": [entry(modes=["full", "fst"])]}).encode(),
    "no mode at all": json.dumps({"keys": [entry(modes=[])]}).encode(),
    "a floor out of range": json.dumps({"keys": [entry(min_threshold=3)]}).encode(),
    "a floor that is no number": b'{"keys": [{"name": "a", "sha256": "' + b"0" * 64 + b'", "min_threshold": NaN}]}',
    "nested without end": b'{"keys": ' + b"[" * 100_000,
    "no text": b"\xff\xfe\x00",
    "too large": b'{"keys": [' + b" " * MAX_FILE_BYTES + b"]}",
}


@pytest.mark.parametrize("name", NO_KEY_FILES)
def test_a_file_that_is_no_key_file_is_refused_and_never_an_open_door(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(NO_KEY_FILES[name])
    with pytest.raises(ConfigError) as refused:
        KeyRing.read(str(path))
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError):
        add_key(path, "team-z")
    assert path.read_bytes() == NO_KEY_FILES[name]


@pytest.mark.timeout(120)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("missing", ".", "pipe", "loop"):
        with pytest.raises(ConfigError, match="api_keys_file"):
            KeyRing.read(str(tmp_path / name))
    with pytest.raises(ConfigError, match="a regular file"):
        KeyRing.read("/dev/zero")


def test_a_file_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    ring_of(tmp_path, entry())
    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(ConfigError, match="Permission denied"):
        KeyRing.read(str(tmp_path / "keys.json"))


def test_a_new_key_works_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = [add_key(path, f"team-{number}") for number in range(3)]
    assert len(set(keys)) == 3
    assert all(re.fullmatch(r"tide-[A-Za-z0-9_-]{43}", key) for key in keys)
    text = path.read_text()
    assert not any(key in text for key in keys)
    ring = KeyRing.read(str(path))
    assert [ring.caller(f"Bearer {key}").name for key in keys] == ["team-0", "team-1", "team-2"]


def test_what_other_keys_are_allowed_stays_as_it_was(tmp_path: Path) -> None:
    before = entry(modes=["full"], min_threshold=0.5)
    ring_of(tmp_path, before)
    add_key(tmp_path / "keys.json", "team-b")
    assert json.loads((tmp_path / "keys.json").read_bytes())["keys"][0] == before


def test_a_key_file_is_for_its_owner_alone_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "keys.json", []
    write = os.fsync

    def watch(descriptor: int) -> None:
        seen.extend(oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir())
        write(descriptor)

    monkeypatch.setattr("tide_core.disk.os.fsync", watch)
    before = os.umask(0)
    try:
        add_key(path, "team-a")
        path.chmod(0o644)
        add_key(path, "team-b")
    finally:
        os.umask(before)
    assert seen[0] == "0o600"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_that_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_of(tmp_path, entry())
    before = (tmp_path / "keys.json").read_bytes()
    monkeypatch.setattr("tide_core.disk.os.rename", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        add_key(tmp_path / "keys.json", "team-b")
    assert (tmp_path / "keys.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["", "a b", "-a", ".a", "a/b", "é", "a\n", "a" * 65, "../x"])
def test_a_bad_name_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        add_key(tmp_path / "keys.json", name)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    ring_of(tmp_path, entry())
    before = (tmp_path / "keys.json").read_bytes()
    with pytest.raises(ConfigError, match=r"one that keys\.json does not have yet"):
        add_key(tmp_path / "keys.json", "team-a")
    assert (tmp_path / "keys.json").read_bytes() == before


def test_a_link_to_a_key_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "keys.json")
    key = add_key(tmp_path / "link.json", "team-a")
    assert (tmp_path / "link.json").is_symlink()
    assert KeyRing.read(str(tmp_path / "keys.json")).caller(f"Bearer {key}").name == "team-a"


# A file that changes while it is in use.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, *entries: dict[str, Any]) -> None:
    """As a Secret changes: the whole file at once, by a new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"keys": list(entries)}))
    fresh.replace(path)


def test_a_changed_file_is_read_again_within_a_second_and_a_removed_key_is_refused(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    write(path, entry())
    ring = KeyRing.read(str(path), clock)
    write(path, entry("team-b", OTHER))
    assert ring.caller(f"Bearer {KEY}").name == "team-a", "it is not looked at for every request"
    clock.now = LOOK_AGAIN_S
    assert ring.caller(f"Bearer {OTHER}").name == "team-b"
    with pytest.raises(UnauthenticatedError):
        ring.caller(f"Bearer {KEY}")


@pytest.mark.parametrize("broken", [b"", b"{}", b'{"keys": []}', None], ids=["empty", "no keys", "none", "removed"])
def test_a_file_that_becomes_bad_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: bytes | None
) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    write(path, entry())
    ring = KeyRing.read(str(path), clock)
    path.unlink()
    if broken is not None:
        path.write_bytes(broken)
    for now in (1.0, 2.0, 3.0):
        clock.now = now
        assert ring.caller(f"Bearer {KEY}").name == "team-a"
        assert not ring.is_open
    assert len([record for record in caplog.records if "key file is refused" in record.message]) == 1
    write(path, entry("team-b", OTHER))
    clock.now = 4.0
    assert ring.caller(f"Bearer {OTHER}").name == "team-b"


def test_calls_without_a_known_key_are_counted(tmp_path: Path) -> None:
    ring = ring_of(tmp_path, entry())
    ring.caller(f"Bearer {KEY}")
    for header in (None, "Bearer wrong", "words"):
        with pytest.raises(UnauthenticatedError):
            ring.caller(header)
    assert ring.num_failed == 3


def test_a_key_brings_its_limits_and_those_are_whole_numbers_from_1(tmp_path: Path) -> None:
    limits = {"requests_per_minute": 60, "concurrent_requests": 4, "tokens_per_minute": 9000}
    assert ring_of(tmp_path, entry(**limits)).caller(f"Bearer {KEY}").limits == KeyLimits(**limits)
    assert ring_of(tmp_path, entry()).caller(f"Bearer {KEY}").limits == KeyLimits()
    for name in limits:
        for bad in (0, -1, 1.5, "60", True):
            with pytest.raises(ConfigError, match=name):
                ring_of(tmp_path, entry(**{name: bad}))
