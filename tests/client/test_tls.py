"""TLS and mTLS of both clients and of `tide client`, against a server that asks for them."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.client.scripted import TEXT, GrpcServer
from tide_client import AsyncTideClient, BadValueError, StatusError, TideClient, Tls

NAME = "tide.internal"
Tide = Callable[..., tuple[int, str, str]]


@dataclass
class Pki:
    """An authority, and certificates for a server named `NAME` and for a client, each with its key."""

    folder: Path

    def __post_init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self._authority = key, subject
        self._write("ca", key, self._certificate(key, subject, is_authority=True))
        for name, names in (("server", [x509.DNSName(NAME)]), ("client", [x509.DNSName("someone")])):
            own = ec.generate_private_key(ec.SECP256R1())
            self._write(name, own, self._certificate(own, x509.Name([]), names=names))

    def _certificate(
        self, key: Any, subject: x509.Name, *, names: list[x509.DNSName] | None = None, is_authority: bool = False
    ) -> x509.Certificate:
        signer, issuer = self._authority
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
        return builder.sign(signer, hashes.SHA256())

    def _write(self, name: str, key: Any, certificate: x509.Certificate) -> None:
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        self.file(name, "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        self.file(name, "crt").write_bytes(certificate.public_bytes(pem))

    def file(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}.{kind}"

    def tls(self, *, client: bool = False, name: str | None = NAME) -> Tls:
        own = {"cert_file": self.file("client", "crt"), "key_file": self.file("client", "key")} if client else {}
        return Tls(ca_file=self.file("ca", "crt"), server_name=name, **own)

    def credentials(self, *, asks: bool) -> grpc.ServerCredentials:
        pair = self.file("server", "key").read_bytes(), self.file("server", "crt").read_bytes()
        return grpc.ssl_server_credentials([pair], self.file("ca", "crt").read_bytes(), asks)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(params=[False, True], ids=["tls", "mtls"])
def asks(request: pytest.FixtureRequest) -> bool:
    """Whether the server asks for a certificate of the client."""
    return bool(request.param)


@pytest.fixture
def secure(pki: Pki, asks: bool) -> Iterator[GrpcServer]:
    server = GrpcServer(credentials=pki.credentials(asks=asks))
    yield server
    server.stop()


def generate_sync(address: str, tls: Tls | None, timeout_s: float) -> str:
    with TideClient(address, tls=tls, retries=0, timeout_s=timeout_s) as client:
        return client.generate("Say").text


def generate_async(address: str, tls: Tls | None, timeout_s: float) -> str:
    async def generate() -> str:
        async with AsyncTideClient(address, tls=tls, retries=0, timeout_s=timeout_s) as client:
            return (await client.generate("Say")).text

    return asyncio.run(generate())


@pytest.mark.parametrize("generate", [generate_sync, generate_async], ids=["sync", "async"])
def test_both_clients_show_what_the_server_asks_for(
    secure: GrpcServer, pki: Pki, asks: bool, generate: Callable[..., str]
) -> None:
    assert generate(secure.address, pki.tls(client=asks), 60.0) == TEXT


@pytest.mark.parametrize("generate", [generate_sync, generate_async], ids=["sync", "async"])
def test_a_server_that_cannot_prove_its_name_is_not_talked_to(
    secure: GrpcServer, pki: Pki, asks: bool, generate: Callable[..., str]
) -> None:
    for tls in (pki.tls(client=asks, name=None), Tls(server_name=NAME), None):  # another name, other authorities, none
        with pytest.raises(StatusError, match="UNAVAILABLE"):
            generate(secure.address, tls, 60.0)
    assert secure.script.requests == []


def test_a_client_without_a_certificate_is_turned_away_where_one_is_asked_for(pki: Pki) -> None:
    server = GrpcServer(credentials=pki.credentials(asks=True))
    try:
        with pytest.raises(StatusError, match="UNAVAILABLE"):
            generate_sync(server.address, pki.tls(), 60.0)
        assert server.script.requests == []
    finally:
        server.stop()


def test_the_command_takes_the_same_files(secure: GrpcServer, pki: Pki, asks: bool, tide: Tide) -> None:
    files = ["--tls-ca", str(pki.file("ca", "crt"))]
    if asks:
        files += ["--tls-cert", str(pki.file("client", "crt")), "--tls-key", str(pki.file("client", "key"))]
    code, out, err = tide("client", "Say", "--address", secure.address, "--tls-server-name", NAME, *files)
    assert (code, out) == (0, TEXT), err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cert_file": "a"}, "key_file is missing, expected both or none"),
        ({"key_file": "a"}, "cert_file is missing, expected both or none"),
        ({"server_name": "a b"}, "server_name is 'a b'"),
        ({"ca_file": "/nowhere/ca"}, "ca_file is '/nowhere/ca', expected a file that can be read: No such file"),
        ({"ca_file": __file__}, "expected a PEM file"),
    ],
)
def test_bad_settings_are_named_before_anything_is_sent(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadValueError) as caught:
        TideClient("127.0.0.1:1", tls=Tls(**options))
    assert said in str(caught.value)
