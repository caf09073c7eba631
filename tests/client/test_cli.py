"""`tide client` in a process of its own, as a shell runs it, against scripted servers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from tests.client import scripted
from tests.client.conftest import TIDE
from tests.client.scripted import PATIENCE_S, TEXT, GrpcServer, Script, hangs
from tests.client.scripted_http import HttpServer

pytestmark = pytest.mark.slow

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
SUMMARY = (
    "tide: 4 tokens (stop): 2 after layer 1, 2 after all 4 layers; differing from full depth: 1; "
    "2.00 tokens per deep pass, 2.5 layers run per token; first token after 1.00 s, all after 2.00 s (2.0 tok/s)\n"
)


def test_standard_output_is_the_text_and_standard_error_one_line_about_it(server: GrpcServer, tide_client: Run) -> None:
    run = tide_client("Say", "--address", server.address)
    assert (run.returncode, run.stdout, run.stderr) == (0, TEXT, SUMMARY)


def test_over_http_it_says_the_same(http_server: HttpServer, tide_client: Run) -> None:
    run = tide_client("Say", "--http", http_server.url, "--show-exits")
    assert (run.returncode, run.stdout, run.stderr) == (0, "[4]The[1] cat[1!] sat[4].", SUMMARY)
    assert http_server.bodies[0]["messages"] == [{"role": "user", "content": "Say"}]


def test_the_key_may_stand_in_the_environment(server: GrpcServer, script: Script, tide_client: Run) -> None:
    environment = {**os.environ, "TIDE_API_KEY": "s3cret"}
    assert tide_client("Say", "--address", server.address, env=environment).returncode == 0
    assert {metadata["authorization"] for metadata in script.metadata} == {"Bearer s3cret"}


@pytest.mark.parametrize("way", ["--address", "--http"])
def test_a_server_that_is_not_there_is_one_line_and_exit_code_1(tide_client: Run, way: str) -> None:
    gone = GrpcServer()
    gone.stop()
    where = f"http://{gone.address}" if way == "--http" else gone.address
    run = tide_client("Say", way, where)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
    assert run.stderr.startswith(f"tide: error: {where}: UNAVAILABLE: ")


def test_ctrl_c_ends_the_request_on_the_server_and_is_exit_code_130(
    server: GrpcServer, script: Script, start: Start
) -> None:
    script.acts.append(hangs(after=1))
    process = start("Say", "--address", server.address)
    assert process.stdout is not None
    assert process.stdout.read(3) == "The"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == 130
    assert script.ends.get(timeout=PATIENCE_S) == "gone"


def test_ctrl_c_ends_a_bench_too(server: GrpcServer, script: Script, start: Start) -> None:
    script.acts.extend([scripted.never_ends] * 2)
    process = start("Say", "--address", server.address, "--bench", "2")
    script.until_asked(2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == 130
    assert [script.ends.get(timeout=PATIENCE_S) for _ in range(2)] == ["gone", "gone"]


def test_a_closed_pipe_ends_the_request_on_the_server_and_is_exit_code_141(
    server: GrpcServer, script: Script, start: Start
) -> None:
    script.acts.append(scripted.never_ends)
    process = start("Say", "--address", server.address)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(3) == "The"
    process.stdout.close()
    assert (process.wait(timeout=PATIENCE_S), process.stderr.read()) == (141, "")
    process.stdout = None
    assert script.ends.get(timeout=PATIENCE_S) == "gone"


def test_on_a_terminal_each_layer_has_a_colour_and_full_depth_none(server: GrpcServer) -> None:
    main, other = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    command = [TIDE, "client", "Say", "--address", server.address]
    run = subprocess.run(command, stdout=other, stderr=subprocess.PIPE, env=environment, timeout=PATIENCE_S)
    os.close(other)
    shown = os.read(main, 1000).decode()
    os.close(main)
    assert run.returncode == 0
    assert shown == "The\033[32m cat\033[0m\033[32;7m sat\033[0m.\r\n"
    assert b"2 after \033[32mlayer 1\033[0m, 2 after all 4 layers" in run.stderr
