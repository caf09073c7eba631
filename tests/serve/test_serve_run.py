"""`serve run deploy/config.yaml` as a user runs it: a cluster of its own, the demo model, real HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

pytestmark = [pytest.mark.serve, pytest.mark.demo]

ROOT = Path(__file__).parents[2]
START_S = 180
STOP_S = 60
PROMPT = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def post(self, body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def others_of_session(self) -> list[psutil.Process]:
        """Every process the command left behind: Ray's keep its session."""
        return [process for process in psutil.process_iter() if _session(process.pid) == self.process.pid]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The shipped config on free ports. It is the last test's to stop; what is left then is killed here."""
    folder = Path(tempfile.mkdtemp(prefix="tide-"))  # short: Ray puts sockets in it, and their paths have a limit
    port, *ports = free_ports(4)
    config = yaml.safe_load((ROOT / "deploy" / "config.yaml").read_text())
    config["http_options"]["port"] = port
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "serve", "run", str(folder / "config.yaml")],
            cwd=ROOT,
            env=environment(folder, ports),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A test run in the background has Ctrl-C turned off, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_until_healthy(server)
        yield server
    finally:
        for left in server.others_of_session():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path, ports: list[int]) -> dict[str, str]:
    """Nothing shared with another cluster on this machine."""
    ours = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 * 2**20),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
    }
    return {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **ours}


def free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while not server.is_healthy():
        assert server.process.poll() is None, f"serve run ended:\n{server.log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"not healthy in {START_S} s:\n{server.log.read_text()[-4000:]}"
        time.sleep(0.5)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_a_completion_answers_with_real_text(server: Server) -> None:
    status, answer = server.post({**PROMPT, "tide": {"exit_layers": True}})
    assert status == 200
    assert "Paris" in answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 12
    layers = answer["tide"]["exit_layers"]
    assert len(layers) == 12
    assert set(layers) <= {2, 30}, "the demo artefact's exit, or all layers"


def test_the_openai_client_gets_one_text_streamed_and_whole(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    assert [model.id for model in client.models.list().data] == ["demo"]
    whole = client.completions.create(**PROMPT)
    chunks = list(client.completions.create(**PROMPT, stream=True))
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert len(chunks) > 1
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.choices[0].text == server.post(PROMPT)[1]["choices"][0]["text"]


def test_a_bad_value_is_400_and_names_its_field(server: Server) -> None:
    status, answer = server.post({**PROMPT, "max_tokens": 0})
    assert status == 400
    assert answer["error"]["param"] == "max_tokens"


def test_tokens_pass_through_haproxy(server: Server) -> None:
    names = [" ".join(process.cmdline()) for process in server.others_of_session()]
    assert any("haproxy -" in name for name in names)


def test_ctrl_c_ends_it_and_leaves_no_process(server: Server) -> None:
    assert len(server.others_of_session()) > 5
    server.process.send_signal(signal.SIGINT)
    server.process.wait(timeout=STOP_S)
    deadline = time.monotonic() + 20
    while (left := server.others_of_session()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert not server.is_healthy()
