"""The quick starts of docs/clients.md, checked against the schema, compiled and run against a scripted server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from tests.client.scripted import TEXT, GrpcServer, fails, whole
from tests.docs.documents import ROOT, Document, commands
from tide.v1 import tide_pb2, tide_pb2_grpc

PAGE = Document("docs/clients.md")
PROMPT = "The capital of France is"
INSTALL_S = 300


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    server = GrpcServer()
    yield server
    server.stop()


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=INSTALL_S
    )


def commands_of(program: str) -> list[list[str]]:
    return [list(words) for words in commands(PAGE, program)]


def assert_answered(done: subprocess.CompletedProcess[str], server: GrpcServer) -> None:
    assert (done.returncode, done.stdout) == (0, TEXT), done.stderr
    assert "2.5 layers per token" in done.stderr
    [request] = server.script.requests
    assert (request.prompt, request.sampling_params.max_tokens) == (PROMPT, 12)
    assert server.script.metadata[0]["authorization"] == "Bearer s3cret"


def test_messages_for_grpcurl_are_those_of_the_schema() -> None:
    asked = [words for words in commands_of("grpcurl") if "-d" in words]
    assert len(asked) == 3
    services = {
        descriptor.full_name: descriptor
        for file in (tide_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
        for descriptor in file.services_by_name.values()
    }
    for words in asked:
        service, _, method = words[-1].partition("/")
        message = GetMessageClass(services[service].methods_by_name[method].input_type)()
        json_format.Parse(words[words.index("-d") + 1], message)
        assert message.ByteSize() > 0


@pytest.mark.build
def test_grpcurl_gets_an_answer_to_each_request_of_the_page(server: GrpcServer) -> None:
    """With the schema as a file, as the page has it for servers with keys: the scripted server has no reflection."""
    if shutil.which("grpcurl") is None:
        pytest.skip("no grpcurl here")
    asked = [words for words in commands_of("grpcurl") if words[-1].startswith("tide.v1.")]
    assert [words[-1].partition("/")[2] for words in asked] == ["GenerateStream", "Generate"]
    schema = ["-import-path", "protos", "-proto", "tide/v1/tide.proto"]
    for words in asked:
        message, method = words[words.index("-d") + 1], words[-1]
        done = run(["grpcurl", "-plaintext", *schema, "-d", message, server.address, method], ROOT)
        assert done.returncode == 0, done.stderr
        assert '"finishReason": "FINISH_REASON_STOP"' in done.stdout
    streamed, whole = server.script.requests
    assert (streamed.prompt, streamed.sampling_params.max_tokens) == (PROMPT, 12)
    assert whole.exits.mode == tide_pb2.MODE_VERIFIED


@pytest.mark.parametrize("code", ["UNAVAILABLE", "CANCELLED"])
def test_the_service_config_retries_before_the_first_message_and_not_after(server: GrpcServer, code: str) -> None:
    config = (ROOT / "protos/tide/v1/service_config.json").read_text()
    request = tide_pb2.GenerateRequest(prompt=PROMPT)
    with grpc.insecure_channel(server.address, [("grpc.service_config", config)]) as channel:
        stub = tide_pb2_grpc.TideServiceStub(channel)
        server.script.acts.extend([fails(code), fails(code), whole])
        chunks = list(stub.GenerateStream(request, timeout=60))
        assert "".join(token.text for chunk in chunks for token in chunk.tokens) == TEXT
        assert len(server.script.requests) == 3
        server.script.acts.append(fails(code, after=1))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.GenerateStream(request, timeout=60))
        assert caught.value.code().name == code
        assert len(server.script.requests) == 4


@pytest.mark.build
def test_the_typescript_compiles_against_the_schema_and_streams(server: GrpcServer) -> None:
    """In a folder that keeps the packages, which take most of the time."""
    folder = ROOT / "build" / "quick_start_ts"
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("npm") is None:
        pytest.skip("no npm here")
    [install] = commands_of("npm")
    [generate] = commands_of("npx")
    [code] = PAGE.blocks("ts")
    if _installed(folder) != install:
        installed = run([*install, "--no-audit", "--no-fund", "--loglevel=error"], folder)
        if installed.returncode != 0:
            pytest.skip(f"the packages cannot be installed here: {installed.stderr.strip()[-200:]}")
        (folder / "installed.json").write_text(json.dumps(install))
    for name in ("generated", "protos"):
        shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(ROOT / "protos", folder / "protos")
    (folder / "ask.ts").write_text(code)
    options = {"strict": True, "module": "commonjs", "target": "es2022", "skipLibCheck": True, "types": ["node"]}
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "files": ["ask.ts"]}))
    for step in (generate, ["npx", "tsc"]):
        done = run(["npx", "--no-install", *step[1:]], folder)
        assert done.returncode == 0, done.stdout + done.stderr
    assert_answered(run(["node", "ask.js", server.address], folder, TIDE_API_KEY="s3cret"), server)


def _installed(folder: Path) -> list[str] | None:
    """The command whose packages the folder has."""
    file = folder / "installed.json"
    return json.loads(file.read_text()) if file.exists() else None


@pytest.mark.build
def test_the_go_compiles_against_the_schema_and_streams(tmp_path: Path, server: GrpcServer) -> None:
    for tool in ("go", "protoc"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    [code] = PAGE.blocks("go")
    (tmp_path / "protos").mkdir()
    shutil.copytree(ROOT / "protos" / "tide", tmp_path / "protos" / "tide")  # go:embed follows no links
    (tmp_path / "main.go").write_text(code)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    [init, *installs, tidy] = commands_of("go")
    [generate] = commands_of("protoc")
    for step in (init, *installs):
        done = run(step, tmp_path, GOBIN=str(tmp_path / "bin"))
        if done.returncode != 0:
            pytest.skip(f"Go's modules cannot be installed here: {done.stderr.strip()[-200:]}")
    for step in (generate, tidy, ["go", "build", "-o", "ask", "."]):
        done = run(step, tmp_path, PATH=path)
        assert done.returncode == 0, done.stderr
    assert_answered(run([str(tmp_path / "ask"), server.address], tmp_path, TIDE_API_KEY="s3cret"), server)
