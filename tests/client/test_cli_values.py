"""Values that `tide client` refuses before it asks anyone: one line, exit code 2, no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.scripted import TEXT, GrpcServer, Script

Tide = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("Say", "--mode", "quick"), "mode is 'quick', expected full, verified, bounded, fast"),
        (("Say", "--max-tokens", str(2**40)), "max_tokens is 1099511627776"),
        (("Say", "--seed", str(2**70)), "seed is 1180591620717411303424"),
        (("Say", "--timeout", "0"), "timeout_s is 0.0, expected seconds above 0"),
        (("Say", "--timeout", "nan"), "timeout_s is nan"),
        (("Say", "--bench", "0"), "--bench: got 0, expected at least 1 stream"),
        (("Say", "--http", "127.0.0.1:8000"), "the address is '127.0.0.1:8000', expected one such as http://"),
        (("Say", "--http", "http://here:port"), "the address is 'http://here:port'"),
        (("Say", "--http", "http://127.0.0.1:1", "--temperature", "nan"), "not JSON compliant"),
        (("Say", "--http", "http://127.0.0.1:1", "--application", "a"), "--application: got 'a', expected none with"),
        (("Say", "--http", "https://127.0.0.1:1", "--tls"), "--tls: got 'given', expected none with --http"),
        (("Say", "--http", "https://127.0.0.1:1", "--resume"), "--resume: got 'given', expected none with --http"),
        (("Say", "--n", "0"), "--n: got 0, expected at least 1"),
        (("Say", "--http", "http://127.0.0.1:1", "-n", "2"), "--n: got 'given', expected none with --http"),
        (("Say", "--http", "http://127.0.0.1:1", "--tools", "x"), "--tools: got 'given', expected none with --http"),
        (("Say", "--plain", "--tool-choice", "none"), "--tool-choice: got 'given', expected none with --plain"),
        (("Say", "--tools", "/nowhere/tools"), "--tools: got '/nowhere/tools', expected a file that can be read"),
        (("Say", "--tools", "/dev/null"), "--tools: got '/dev/null', expected a file that can be read: it is not JSON"),
        (("Say", "--tls-cert", "/nowhere/cert"), "key_file is missing, expected both or none: cert_file is given"),
        (("Say", "--tls-ca", "/nowhere/ca"), "ca_file is '/nowhere/ca', expected a file that can be read"),
        (("Say", "--application", "a b"), "application is 'a b', expected printable ASCII"),
        ((" ",), "prompt: got ' ', expected text"),
        (("\udcff",), "prompt: got 'bytes that are not UTF-8', expected text"),
        (("Say", "--api-key-file", "/nowhere/key"), "--api-key-file: got '/nowhere/key', expected a file that can be"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(tide: Tide, args: tuple[str, ...], said: str) -> None:
    code, out, err = tide("client", "--address", "127.0.0.1:1", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("tide: error: ")
    assert said in err


@pytest.mark.parametrize("content", [b"", b"two words\n", b"\xff\xfe"])
def test_a_file_without_a_key_in_it_is_refused_and_not_shown(tide: Tide, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    code, _, err = tide("client", "Say", "--api-key-file", str(file))
    assert (code, err.count("\n")) == (2, 1)
    assert "two words" not in err


def test_a_key_is_no_option(tide: Tide) -> None:
    code, out, _ = tide("client", "--help")
    assert code == 0
    assert "--api-key-file" in out
    assert "--api-key " not in out
    assert "TIDE_API_KEY" in out


def test_standard_input_that_is_no_text_is_refused(tide: Tide, stdin: Callable[..., None]) -> None:
    stdin(b"\xff\xfe")
    code, _, err = tide("client", "-")
    assert (code, err.count("\n")) == (2, 1)


def test_an_empty_variable_is_no_key(
    tide: Tide,
    server: GrpcServer,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDE_API_KEY", "")
    assert tide("client", "Say", "--address", server.address, "--hide-exits")[:2] == (0, TEXT)
    assert all("authorization" not in metadata for metadata in script.metadata)
