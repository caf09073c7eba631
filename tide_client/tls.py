"""TLS of a gRPC connection. The server speaks plain text; what ends TLS in front of it checks these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tide_client.errors import BadValueError
from tide_client.settings import channel_options, fits_a_header

PEM_START = b"-----BEGIN "


@dataclass(frozen=True, slots=True)
class Tls:
    """`Tls()` encrypts and trusts the authorities that come with gRPC. Files are PEM."""

    ca_file: str | Path | None = None
    """Certificates of the authorities to trust, instead of the usual ones."""
    cert_file: str | Path | None = None
    """The client's own certificate and those up to its authority, for a server that asks for one (mTLS)."""
    key_file: str | Path | None = None
    """The private key of `cert_file`, without a password."""
    server_name: str | None = None
    """The name that the server's certificate must have, if it is not the one in the address."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            missing, given = ("key_file", "cert_file") if self.key_file is None else ("cert_file", "key_file")
            raise BadValueError(f"{missing} is missing, expected both or none: {given} is given")
        if self.server_name is not None and not fits_a_header(self.server_name):
            raise BadValueError(f"server_name is {self.server_name!r}, expected a host name")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files."""
        return grpc.ssl_channel_credentials(
            _pem("ca_file", self.ca_file), _pem("key_file", self.key_file), _pem("cert_file", self.cert_file)
        )


def open_channel(module: Any, address: str, tls: Tls | None) -> Any:
    """A channel of `module`, `grpc` or `grpc.aio`."""
    options: list[tuple[str, Any]] = list(channel_options())
    if tls is None:
        return module.insecure_channel(address, options=options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return module.secure_channel(address, tls.credentials(), options=options)


def _pem(name: str, path: str | Path | None) -> bytes | None:
    """The file's content, checked: gRPC would fail at the first call, without a word of which file."""
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadValueError(f"{name} is {str(path)!r}, expected a file that can be read: {error.strerror}") from None
    if PEM_START not in content:
        raise BadValueError(f"{name} is {str(path)!r}, expected a PEM file")
    return content
