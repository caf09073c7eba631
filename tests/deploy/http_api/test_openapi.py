"""The OpenAPI document matches the server, and no request, valid or not, makes the server fail."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck

from deploy.config.args import Limits
from deploy.http_api.api import build_api
from deploy.http_api.openapi import BODIES
from deploy.service import Service
from tests.deploy.in_process import Http, make_service
from tests.engine.exit_engines import exit_engine

engine = exit_engine()
service = Service(engine, model="tiny", limits=Limits(max_tokens=16))
api = build_api(service, playground=True)
schema = schemathesis.openapi.from_dict(api.openapi())


@pytest.fixture(scope="module", autouse=True)
def _close_at_the_end() -> Any:
    yield
    engine.close()


@schema.parametrize()
@hypothesis.settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True
)
def test_no_request_makes_the_server_fail(case: schemathesis.Case) -> None:
    response = case.call(app=api)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert service.num_open == 0


def test_every_body_is_described_with_every_field_that_is_read() -> None:
    document = api.openapi()
    for path, model in BODIES.items():
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        described = document["components"]["schemas"][reference.rsplit("/", 1)[-1]]
        assert set(described["properties"]) == set(model.model_fields)
        assert described["additionalProperties"] is False


async def test_the_document_is_served() -> None:
    other = make_service()
    reply = await Http(other).ask("GET", "/openapi.json")
    other.engine.close()
    assert reply.json["info"]["title"] == "TIDE Serve"
