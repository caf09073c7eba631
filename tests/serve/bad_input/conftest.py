"""One live service of two tiny models for every case; after each of them the next request must be fine."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from benchmarks.common.live import Server, serving, wait_until_healthy
from tests.serve.bad_input.requests import AUTH, BODY, becomes_idle
from tests.serve.tiny import tiny_config
from tide.v1 import tide_pb2_grpc


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_config(tmp_path_factory.mktemp("tiny")), health="/full/health") as server:
        wait_until_healthy(server)
        yield server


@pytest.fixture(scope="package")
def stub(server: Server) -> Iterator[tide_pb2_grpc.TideServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield tide_pb2_grpc.TideServiceStub(channel)


@pytest.fixture(autouse=True)
def _the_next_request_is_fine(server: Server) -> Iterator[None]:
    yield
    assert server.post(BODY, headers=AUTH)[0] == 200
    assert becomes_idle(server)
