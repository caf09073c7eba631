"""`tide check-config` and `tide new-key` from the shell: exit codes, one line per error, no traceback."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.keys import KeyLimits, KeyRing
from tests.evaluation.on_disk import save_model
from tide_core.cli import main

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy" / "config.yaml"

Tide = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tide(capsys: pytest.CaptureFixture[str]) -> Tide:
    """Run `tide …` here; its exit code, standard output and standard error."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run


def test_a_right_config_is_ok_and_the_shipped_one_is_looked_at_by_default(
    tide: Tide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert tide("check-config") == (0, "deploy/config.yaml: ok\n", "")
    assert tide("check-config", "deploy/config.gpu.yaml") == (0, "deploy/config.gpu.yaml: ok\n", "")


def test_a_config_is_judged_for_a_device_that_is_not_here(
    tide: Tide, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.read_text().replace("model: demo", f"model: {save_model(tmp_path / 'model')}"))
    capsys.readouterr()  # the library shows a bar while it saves the model
    code, out, err = tide("check-config", path, "--device", "h200")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{path}: ok"
    assert "tide on h200: weights 0.00 GiB, bfloat16 (auto) on cuda, KV pool " in out
    assert tide("check-config", path, "--device", "h2000")[0] == 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("max_ongoing_requests", "max_ongoing_request", "did you mean max_ongoing_requests?"),
        ("modes:", "exit_treshold:", "did you mean min_threshold?"),
        ("port: 8000", "port: 0", "http_options.port: got 0, expected a port in 1..65535"),
        ("port: 9000", "port: 8000", "grpc_options.port: got 8000"),
        ("port: 8000", "port: no", "no would become false; write that, or quote it"),
        ("host: 127.0.0.1", "host: !!python/name:os.system", ": anchors, aliases and tags are not allowed"),
        ("deploy.app:build_app", "deploy.app:build_ap", "has no attribute 'build_ap'"),
    ],
)
def test_a_wrong_config_is_refused_with_code_2_and_one_line(
    tide: Tide, tmp_path: Path, before: str, after: str, message: str
) -> None:
    path, text = tmp_path / "config.yaml", CONFIG.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    code, out, err = tide("check-config", path)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("data", [b"", b"- a\n", b"words\n", b"a: [\n", b"\xff\xfe", b"a: 1\na: 2\n"], ids=repr)
def test_a_file_that_is_no_config_is_refused_with_code_2_and_named(tide: Tide, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(data)
    code, out, err = tide("check-config", path)
    assert (code, out) == (2, "")
    assert "config.yaml" in err
    assert tide("check-config", tmp_path / "missing.yaml")[0] == 2


def test_warnings_go_to_stderr_and_count_only_if_asked(tide: Tide, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.read_text().replace("graceful_shutdown_timeout_s: 290", "graceful_shutdown_timeout_s: 60"))
    code, out, err = tide("check-config", path)
    assert (code, out) == (0, f"{path}: ok, 1 warning\n")
    assert err.startswith("warning: tide: graceful_shutdown_timeout_s (60)")
    code, out, err = tide("check-config", "--strict", path)
    assert (code, out) == (2, "")
    assert "1 warning" in err


def test_a_new_key_is_printed_once_and_opens_the_door(tide: Tide, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    code, out, err = tide("new-key", "team-a", "--file", path)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert KeyRing.read(str(path)).caller(f"Bearer {out.strip()}").name == "team-a"
    assert out.strip() not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_new_key_may_have_limits_and_those_are_whole_numbers_from_1(tide: Tide, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    code, out, _ = tide(
        "new-key", "team-a", "--file", path, "--requests-per-minute", "60", "--tokens-per-minute", "900"
    )
    assert code == 0
    limits = KeyRing.read(str(path)).caller(f"Bearer {out.strip()}").limits
    assert limits == KeyLimits(requests_per_minute=60, tokens_per_minute=900)
    code, out, err = tide("new-key", "team-b", "--file", path, "--concurrent-requests", "0")
    assert (code, out) == (2, "")
    assert "concurrent_requests" in err


def test_a_name_that_is_taken_or_none_is_refused_and_nothing_is_written(tide: Tide, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert tide("new-key", "bad name", "--file", path)[:2] == (2, "")
    assert not path.exists()
    tide("new-key", "team-a", "--file", path)
    before = path.read_bytes()
    code, out, err = tide("new-key", "team-a", "--file", path)
    assert (code, out) == (2, "")
    assert "team-a" in err
    assert path.read_bytes() == before


def test_a_file_that_holds_something_else_is_not_overwritten(tide: Tide, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("words")
    code, _, err = tide("new-key", "team-a", "--file", path)
    assert code == 2
    assert "a file of keys" in err
    assert path.read_text() == "words"


def test_a_folder_that_is_not_there_is_an_error_without_a_traceback(tide: Tide, tmp_path: Path) -> None:
    code, out, err = tide("new-key", "team-a", "--file", tmp_path / "none" / "keys.json")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1


def test_the_commands_cost_the_other_commands_nothing() -> None:
    code = "import sys, tide_core.cli.app; print([name for name in ('ray', 'pydantic', 'yaml') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "[]\n"
