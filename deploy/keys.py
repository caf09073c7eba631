"""API keys: a file of hashed keys, and what each key allows.

    {"keys": [{"name": "team-a", "sha256": "9f86d0…", "modes": ["full", "verified"], "min_threshold": 0.5}]}

`modes`, `min_threshold` and the limits `requests_per_minute`, `concurrent_requests` and `tokens_per_minute` are
optional. `tide new-key` creates a key and writes its entry; the key itself is not stored. A key is long and random, so
a plain hash protects it. The file is read again when it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.failures import UnauthenticatedError
from deploy.strict import json_body
from tide_core.disk import write_whole
from tide_core.errors import ConfigError, RequestError
from tide_core.request import MODES

logger = logging.getLogger("ray.serve")

KEY_BYTES = 32
LOOK_AGAIN_S = 1.0
"""How often it is looked whether the file has changed."""
OWNER_ONLY = 0o600
MAX_FILE_BYTES = 2**20
MAX_FILE_DEPTH = 8
MAX_HEADER_CHARS = 512
SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """How much a key may use of one replica; None: no limit."""

    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, or anyone if there are no keys."""

    name: str = "anyone"
    salt: str = ""
    """Callers with different salts share nothing in the prefix cache."""
    modes: tuple[str, ...] = MODES
    min_threshold: float = 0.0
    limits: KeyLimits = field(default_factory=KeyLimits)


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    modes: list[str] = Field(default=list(MODES), min_length=1)
    min_threshold: float = Field(default=0.0, ge=0.0, le=2.0)
    requests_per_minute: int | None = Field(default=None, ge=1)
    concurrent_requests: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[_Key] = Field(min_length=1)


class KeyRing:
    """The keys of a file. With no keys, every caller is accepted."""

    def __init__(self, callers: dict[bytes, Caller] | None = None) -> None:
        self._callers = callers or {}
        self.num_failed = 0
        """Calls without a key, or with one that is not known."""
        self._path: str | None = None
        self._state: object = None
        self._looked_at = 0.0
        self._clock: Callable[[], float] = time.monotonic

    @classmethod
    def read(cls, path: str | None, clock: Callable[[], float] = time.monotonic) -> KeyRing:
        """The keys in a file, and later those that it has then; no keys for None. A bad file raises ConfigError. A file
        that becomes bad, or is removed, changes nothing: it never opens access."""
        ring = cls()
        if path is not None:
            ring._path, ring._clock, ring._looked_at = path, clock, clock()
            ring._state = _state_of(path)
            ring._callers = _callers(_read(path))
        return ring

    @property
    def is_open(self) -> bool:
        return not self._callers

    def caller(self, authorization: str | None) -> Caller:
        """The caller whose key an authorization header holds. All keys are compared, each in constant time."""
        self._look_again()
        try:
            return self._caller(authorization)
        except UnauthenticatedError:
            self.num_failed += 1
            raise

    def _caller(self, authorization: str | None) -> Caller:
        if self.is_open:
            return Caller()
        if authorization is None:
            raise UnauthenticatedError("an API key is needed: send Authorization: Bearer KEY")
        scheme, key = authorization[: len(SCHEME)], authorization[len(SCHEME) :]
        if len(authorization) > MAX_HEADER_CHARS or scheme.lower() != SCHEME or not key.isascii():
            raise UnauthenticatedError("the Authorization header must be: Bearer KEY")
        given = hashlib.sha256(key.encode()).digest()
        found = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(given, digest):
                found = caller
        if found is None:
            raise UnauthenticatedError("the API key is not known")
        return found

    def _look_again(self) -> None:
        """Read the file again if it has changed."""
        now = self._clock()
        if self._path is None or now - self._looked_at < LOOK_AGAIN_S:
            return
        self._looked_at = now
        state = _state_of(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._callers = _callers(_read(self._path))
        except ConfigError as error:
            logger.error("tide: the changed key file is refused, the keys before it stay in force: %s", error)
            return
        logger.info("tide: the key file has changed: %d keys", len(self._callers))


def add_key(path: Path, name: str, limits: KeyLimits | None = None) -> str:
    """Create a key and add its entry to a file, which is created if missing. The key itself is not stored."""
    key = f"tide-{secrets.token_urlsafe(KEY_BYTES)}"
    try:
        given = {} if limits is None else {one: value for one, value in asdict(limits).items() if value is not None}
        entry = _Key(name=name, sha256=hashlib.sha256(key.encode()).hexdigest(), **given)
    except ValidationError as error:
        if error.errors()[0]["loc"] != ("name",):
            raise ConfigError("limits", given, f"whole numbers from 1: {_brief(error)}") from None
        expected = "1 to 64 letters, digits, dots, dashes and underscores, a letter or digit first"
        raise ConfigError("name", name, expected) from None
    path = path.expanduser().resolve()  # the target of a link, so that the link stays
    entries = _read(str(path)) if path.exists() else []
    if name in {other.name for other in entries}:
        raise ConfigError("name", name, f"one that {path.name} does not have yet")
    content = {"keys": [one.model_dump(exclude_unset=True) for one in (*entries, entry)]}
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode(), mode=OWNER_ONLY)
    return key


def _callers(entries: list[_Key]) -> dict[bytes, Caller]:
    callers = {}
    for entry in entries:
        digest = bytes.fromhex(entry.sha256)
        salt = hashlib.sha256(b"cache salt of " + digest).hexdigest()
        limits = KeyLimits(entry.requests_per_minute, entry.concurrent_requests, entry.tokens_per_minute)
        callers[digest] = Caller(entry.name, salt, tuple(entry.modes), entry.min_threshold, limits)
    return callers


def _state_of(path: str) -> object:
    """Differs once the file, or the target of a link, is another or has been written."""
    try:
        found = os.stat(Path(path).expanduser())
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: str) -> list[_Key]:
    """The entries of a file; names and keys must be unique."""
    file = Path(path).expanduser()
    try:
        if file.exists() and not file.is_file():  # reading a pipe would block
            raise ConfigError("api_keys_file", path, "a regular file")
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError("api_keys_file", path, f"a file that can be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError("api_keys_file", path, f"a file of at most {MAX_FILE_BYTES} bytes")
    try:
        entries = _KeyFile.model_validate(json_body.parse(data, MAX_FILE_DEPTH)).keys
    except (ValidationError, RequestError) as error:
        raise ConfigError("api_keys_file", path, f"a file of keys: {_brief(error)}") from None
    seen: set[str] = set()
    for entry in entries:
        if unknown := [mode for mode in entry.modes if mode not in MODES]:
            raise ConfigError(f"modes of key {entry.name}", unknown[0], f"some of {', '.join(MODES)}")
        if {entry.name, entry.sha256} & seen:
            raise ConfigError("api_keys_file", entry.name, "every name and every key once")
        seen |= {entry.name, entry.sha256}
    return entries


def _brief(error: ValidationError | RequestError) -> str:
    """What is wrong and where, without the content, which could be a key put in by mistake."""
    if isinstance(error, RequestError):
        return str(error.value)
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
