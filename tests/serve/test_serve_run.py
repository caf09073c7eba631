"""`tide serve deploy/config.yaml` as a user runs it: a cluster of its own, the demo model, real clients."""

from __future__ import annotations

import contextlib
import copy
import functools
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from benchmarks.clients.features import Service
from benchmarks.clients.run import CLIENTS, Result, run_client
from benchmarks.common import ROOT
from benchmarks.common.live import STOP_S, Server, default_config, serving
from tests.docs.documents import Document
from tests.serve.load import PATIENCE_S, until
from tide_client import StatusError, TideClient

pytestmark = [pytest.mark.serve, pytest.mark.demo, pytest.mark.timeout(1800)]

PROMPT = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
CHAT = [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]
SERVING = health_pb2.HealthCheckResponse.SERVING
LIST_SERVICES = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
MANY_TOKENS = 4000
"""More than are made while a test looks at a running request."""
RESUMED_TOKENS = 250
"""Seconds of work: the request is seen to run just before its replica is killed."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The shipped config on free ports, but that text which repeats itself takes its time, so that streams last. It is
    the last test's to stop; what is left then is killed here."""
    config = default_config()
    config["applications"][0]["args"]["engine"]["suffix_drafts"] = False
    with serving(config, command=("tide", "serve"), default_auth=True) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[TideClient]:
    with TideClient(server.address) as client:
        yield client


def assert_cut_off(client: TideClient, num_tokens_before: int) -> None:
    """The only request that ran gives its blocks back, long before its last token."""
    assert until(lambda: client.exit_stats().kv_usage == 0)
    stats = client.exit_stats()
    assert stats.num_running == 0
    assert stats.total_tokens - num_tokens_before < MANY_TOKENS


def test_the_log_has_a_line_for_every_stage_of_the_start(server: Server) -> None:
    for stage in ("loading the engine's libraries", "loading its weights", "artefact", "ready to serve demo"):
        assert stage in server.log


def test_a_completion_answers_with_real_text(server: Server) -> None:
    status, answer = server.post({**PROMPT, "tide": {"exit_layers": True}})
    assert status == 200
    assert "Paris" in answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 12
    layers = answer["tide"]["exit_layers"]
    assert len(layers) == 12
    assert set(layers) <= {2, 30}, "the demo artefact's exit, or all layers"


@pytest.fixture(scope="module")
def clients(server: Server) -> Callable[[str], Result]:
    """What a client got: its checks run together, when the first one is asked for."""
    return functools.cache(lambda client: run_client(client, Service(server.url, "demo")))


@pytest.mark.parametrize(
    ("client", "feature"), [(client, feature) for client, checks in CLIENTS.items() for feature in checks.by_feature]
)
def test_clients(clients: Callable[[str], Result], client: str, feature: str) -> None:
    """The table in docs/openai.md: a cell is a test."""
    result = clients(client)
    if result.version is None:
        pytest.skip(f"{client} is not installed: make clients")
    assert result.outcomes[feature].passed, result.outcomes[feature].remark


def test_the_openai_client_chats_with_usage_logprobs_and_exit_layers(server: Server) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    asked: Any = {"model": "demo", "messages": CHAT, "max_tokens": 16, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content) == 16
    extra = {"tide": {"tokens": True}}
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}, extra_body=extra)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 16
    tokens = [token for chunk in chunks for token in (chunk.model_extra or {}).get("tide", {}).get("tokens", [])]
    assert len(tokens) == 16
    assert {token["exit_layer"] for token in tokens} <= {2, 30}


def test_the_examples_of_the_document_run_as_they_stand(server: Server) -> None:
    """docs/openai.md: second turn, choices, lists of prompts, a schema, tools."""
    text = (ROOT / "docs" / "openai.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace("http://127.0.0.1:8000", server.url), found)
    assert len(found["drawn"].choices) == 3
    assert [choice.index for choice in found["batch"].choices] == [0, 1]
    pair = json.loads(found["structured"].choices[0].message.content)
    assert pair.keys() == {"color", "number"}
    assert found["call"].function.name == "weather"
    assert json.loads(found["call"].function.arguments)["city"] in ("Rome", "Oslo")
    assert found["called"].choices[0].finish_reason == "tool_calls"
    assert found["response"].output_text


def test_grpc_streams_the_text_of_http(server: Server, client: TideClient) -> None:
    with client.stream(PROMPT["prompt"], max_tokens=12) as stream:
        text = "".join(token.text for token in stream)
    assert text == server.post(PROMPT)[1]["choices"][0]["text"]
    assert stream.answer.usage.completion_tokens == 12
    assert stream.answer.artefact_digest == client.model_info().artefact_digest


def test_grpc_gives_the_choices_and_the_required_call_of_http(server: Server, client: TideClient) -> None:
    asked = {**PROMPT, "n": 2, "temperature": 1.0, "seed": 5}
    drawn = {"max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 5}
    with client.stream(PROMPT["prompt"], **drawn) as stream:
        assert Counter(token.choice for token in stream) == {0: 12, 1: 12}
    expected = [choice["text"] for choice in server.post(asked)[1]["choices"]]
    assert [choice.text for choice in stream.answer.choices] == expected

    city = {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", **city}}}
    forced: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    with client.stream(CHAT, **forced) as stream:
        pieces = [delta for delta in stream.deltas() if delta.call_index == 0]
    [made] = stream.answer.tool_calls
    assert stream.answer.finish_reason == "tool_calls"
    assert (made.name, made.id) == (pieces[0].name, pieces[0].call_id)
    assert "".join(piece.arguments for piece in pieces) == made.arguments
    assert json.loads(made.arguments)["city"] in ("Rome", "Oslo")


def test_the_examples_for_grpc_run_as_they_stand(server: Server) -> None:
    """docs/clients.md: a stream, choices, tools and the turn after them, a schema, a deadline."""
    text = (ROOT / "docs" / "clients.md").read_text()
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[:5]:
        exec(block.replace("127.0.0.1:9000", server.address), found)
    assert len({choice.text for choice in found["drawn"].choices}) == 3
    assert json.loads(found["call"].arguments)["city"] in ("Rome", "Oslo")
    assert found["answer"].usage.completion_tokens > 0
    assert json.loads(found["structured"].text)["number"] in range(100)
    assert found["late"].code == "DEADLINE_EXCEEDED"


def test_reflection_alone_is_enough_to_call(server: Server) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    with grpc.insecure_channel(server.address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("tide.v1.TideService").FindMethodByName("Tokenize")
        ask, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = channel.unary_unary("/tide.v1.TideService/Tokenize", ask.SerializeToString, reply.FromString)
        assert call(ask(text="hello"), timeout=60).ids
        listed = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        assert b"tide.v1.TideService" in next(listed(iter([LIST_SERVICES]), timeout=60))


def test_grpc_health_is_serving(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(service="tide.v1.TideService"), timeout=60)
        assert reply.status == SERVING


def test_more_health_watches_than_request_slots_starve_nobody(server: Server, client: TideClient) -> None:
    """330 of them took every slot of the replica."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(server.address, own)) for _ in range(11)]
        asked = health_pb2.HealthCheckRequest()
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(asked, timeout=PATIENCE_S)
            for channel in channels
            for _ in range(30)
        ]
        codes = Counter(status_of_the_first(watch) for watch in watches)
        assert codes.keys() == {"OK", "RESOURCE_EXHAUSTED"}
        assert sum(watch.is_active() for watch in watches) <= 64, codes
        assert client.generate(PROMPT["prompt"], max_tokens=2).usage.completion_tokens == 2
        assert (
            health_pb2_grpc.HealthStub(channels[0]).Check(asked, timeout=60).status
            == health_pb2.HealthCheckResponse.SERVING
        )


def status_of_the_first(watch: Any) -> str:
    try:
        assert next(watch).status == SERVING
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def test_bytes_that_are_no_request_are_the_callers_fault(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/tide.v1.TideService/Generate")(b"\xff\xff\xff\xff", timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_client_that_goes_frees_its_blocks_at_once(server: Server, client: TideClient) -> None:
    before = client.exit_stats().total_tokens
    with client.stream(CHAT, max_tokens=MANY_TOKENS, ignore_eos=True) as stream:
        next(iter(stream))
        assert client.exit_stats().num_running == 1
    assert_cut_off(client, before)


def test_a_deadline_ends_the_call_and_frees_its_blocks(server: Server, client: TideClient) -> None:
    before = client.exit_stats().total_tokens
    with pytest.raises(StatusError) as caught:
        client.generate(CHAT, max_tokens=MANY_TOKENS, ignore_eos=True, timeout_s=0.5)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert_cut_off(client, before)


def test_an_http_client_that_goes_frees_its_blocks_at_once(server: Server, client: TideClient) -> None:
    import http.client

    before = client.exit_stats().total_tokens
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    body = json.dumps({**PROMPT, "max_tokens": MANY_TOKENS, "ignore_eos": True, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert connection.getresponse().read(20)
    assert client.exit_stats().num_running == 1
    connection.close()
    assert_cut_off(client, before)


def test_a_running_request_is_aborted_by_name(server: Server, client: TideClient) -> None:
    stream = client.stream(CHAT, max_tokens=MANY_TOKENS, ignore_eos=True, request_id="long one")
    tokens = iter(stream)
    next(tokens)
    assert client.abort("long one")
    list(tokens)
    assert stream.answer.finish_reason == "abort"
    assert not client.abort("long one")


def documented_commands() -> tuple[str, str, str]:
    """Three lines of docs/serving.md: for the token, for the status, for another config."""
    [block] = [block for block in Document("docs/serving.md").blocks("") if "serve status" in block]
    export, status, deploy = block.splitlines()
    assert (status, deploy) == ("serve status", "serve deploy deploy/config.yaml")
    return export, status, deploy


def test_the_commands_of_the_guide_show_the_state_of_a_cluster_that_asks_for_a_token(server: Server) -> None:
    assert server.token
    assert (Path(server.environment["HOME"]) / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    export, status, _ = documented_commands()
    done = server.shell(f"{export}\n{status}", server.folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert yaml.safe_load(done.stdout)["applications"]["tide"]["status"] == "RUNNING"
    ours = server.shell("tide status", server.folder)
    assert (ours.returncode, yaml.safe_load(ours.stdout)) == (0, yaml.safe_load(done.stdout)), ours.stderr[-2000:]


def test_a_changed_policy_takes_effect_without_a_restart_or_a_dropped_stream(
    server: Server, client: TideClient
) -> None:
    [replica] = server.replicas()
    config = copy.deepcopy(server.config)
    config["applications"][0]["deployments"][0]["user_config"] = {"mode": "full", "modes": ["full", "verified"]}
    (server.folder / "deploy").mkdir()
    (server.folder / "deploy" / "config.yaml").write_text(yaml.safe_dump(config))
    export, _, deploy = documented_commands()
    with client.stream(CHAT, max_tokens=MANY_TOKENS, ignore_eos=True, timeout_s=PATIENCE_S) as stream:
        modes = {next(stream).mode}
        deployed = server.shell(f"{export}\n{deploy}", server.folder)
        assert deployed.returncode == 0, deployed.stderr[-2000:]
        assert until(lambda: client.model_info().default_mode == "full")
        num_before = client.exit_stats().total_tokens
        assert until(lambda: client.exit_stats().total_tokens > num_before + 20), "the stream goes on"
        modes |= {next(stream).mode for _ in range(100)}
    assert modes == {"verified"}
    assert {token.mode for token in client.generate(CHAT, max_tokens=4).tokens} == {"full"}
    with pytest.raises(StatusError) as caught:
        client.generate(CHAT, max_tokens=4, mode="fast")
    assert caught.value.code == "PERMISSION_DENIED"
    assert [process.pid for process in server.replicas()] == [replica.pid]
    server.deploy(server.config)
    assert until(lambda: client.model_info().default_mode == "verified")


def test_a_replica_that_dies_is_replaced_and_its_streams_end_with_a_status(server: Server, client: TideClient) -> None:
    assert until(lambda: haproxy_routes_to_the_replica(server)), "Serve's own proxy would answer INTERNAL"
    assert until(lambda: len(server.spares()) == 1)
    [replica], [spare] = server.replicas(), server.spares()
    stream = client.stream(CHAT, max_tokens=MANY_TOKENS, ignore_eos=True)
    tokens = iter(stream)
    with TideClient(server.address, retries=1000, resume=True) as patient:
        resumed = patient.stream(CHAT, max_tokens=RESUMED_TOKENS, ignore_eos=True, timeout_s=PATIENCE_S)
        for _ in range(6):
            next(tokens)
            next(resumed)
        waiting = HttpRequest(server, {**PROMPT, "max_tokens": MANY_TOKENS, "ignore_eos": True})
        assert until(lambda: client.exit_stats().num_running == 3)
        replica.kill()
        status, headers, body = waiting.answer()
        assert (status, headers["Content-Type"], headers["Retry-After"]) == (503, "application/json", "1")
        assert json.loads(body)["error"]["code"] == "replica_unavailable"
        with pytest.raises(StatusError) as caught:
            list(tokens)
        assert caught.value.code in ("CANCELLED", "UNAVAILABLE", "INTERNAL")
        assert caught.value.num_tokens >= 6
        assert until(server.is_healthy)
        assert [process.pid for process in server.replicas()] == [spare.pid], "it starts with its libraries imported"
        assert "Paris" in server.post(PROMPT)[1]["choices"][0]["text"]
        list(resumed)
        whole = client.generate(CHAT, max_tokens=RESUMED_TOKENS, ignore_eos=True, timeout_s=PATIENCE_S)
        assert resumed.answer.tokens != ()
        assert [token.id for token in resumed.answer.tokens] == [token.id for token in whole.tokens]
        assert resumed.answer.text == whole.text


class HttpRequest:
    """A completion that was asked for; its answer is read later."""

    def __init__(self, server: Server, body: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=PATIENCE_S)
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})

    def answer(self) -> tuple[int, Any, bytes]:
        with contextlib.closing(self._connection):
            reply = self._connection.getresponse()
            return reply.status, reply.headers, reply.read()


def haproxy_routes_to_the_replica(server: Server) -> bool:
    logs = server.folder.glob("ray/session_latest/logs/serve/*proxy*")
    text = "".join(file.read_text(errors="replace") for file in logs)
    return -1 < text.rfind("name='SERVE_REPLICA_") < text.rfind("graceful HAProxy reload")


def test_tokens_pass_through_haproxy(server: Server) -> None:
    assert server.haproxies()


@pytest.mark.parametrize("path", ["/-/routes", "/-/%72outes"])
def test_names_of_applications_are_not_shown(server: Server, path: str) -> None:
    status, answer = server.ask("GET", path)
    assert (status, answer["error"]["code"]) == (404, "path_not_found")


def test_a_haproxy_that_is_killed_is_replaced(server: Server) -> None:
    killed = server.haproxies()
    for process in killed:
        process.kill()
    assert until(lambda: {each.pid for each in server.haproxies()} - {each.pid for each in killed})
    assert until(server.is_healthy)
    assert "Paris" in server.post(PROMPT)[1]["choices"][0]["text"]


def test_a_second_one_stops_at_once_with_the_port_and_who_holds_it(server: Server) -> None:
    command = [Path(sys.executable).parent / "tide", "serve", server.folder / "config.yaml"]
    done = subprocess.run(command, env=server.environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if not is_of_another_session(line)]
    assert f"http_options.port: got {server.http_port}" in line
    assert "haproxy (pid " in line
    assert until(server.is_healthy)


def is_of_another_session(line: str) -> bool:
    """Other tests end sessions at the same time."""
    return "which a session that is gone" in line or line.startswith("waiting for the processes of a session")


def test_sigterm_to_its_group_ends_it_in_order_and_leaves_no_process(server: Server) -> None:
    assert len(server.others_of_session()) > 5
    num_before = len(server.log)
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.process.wait(timeout=STOP_S) == 0
    until(lambda: server.others_of_session() == [], STOP_S)
    assert server.others_of_session() == []
    assert not server.is_healthy()
    assert "Traceback" not in server.log[num_before:]
    assert "SIGTERM received" not in server.log[num_before:], "how Ray's processes end that nobody stops in order"
