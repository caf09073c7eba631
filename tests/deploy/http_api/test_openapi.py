"""The OpenAPI document matches the server, and no request, valid or not, makes the server fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck

from deploy.config.args import Limits
from deploy.http_api.api import build_api
from deploy.http_api.openapi import BODIES
from deploy.service import Service
from tests.deploy.in_process import Http, make_service
from tests.engine.exit_engines import exit_engine

SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
    "derandomize": True,
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    engine = exit_engine()
    yield Service(engine, model="tiny", limits=Limits(max_tokens=16))
    engine.close()


@pytest.fixture(scope="module")
def api(service: Service) -> FastAPI:
    return build_api(service, playground=True)


def test_no_request_makes_the_server_fail(api: FastAPI, service: Service) -> None:
    """Requests that the document allows, and others that it does not."""
    import schemathesis
    from schemathesis import GenerationMode

    def check(case: schemathesis.Case) -> None:
        response = case.call(app=api)
        statuses[response.status_code // 100] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert service.num_open == 0

    statuses: Counter[int] = Counter()
    schema: Any = schemathesis.openapi.from_dict(api.openapi())
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == sum(len(path) for path in api.openapi()["paths"].values())
    for operation in operations:
        for mode in GenerationMode if operation.body else [GenerationMode.POSITIVE]:
            cases = operation.as_strategy(generation_mode=mode)
            hypothesis.settings(max_examples=15, **SETTINGS)(hypothesis.given(cases)(check))()
    assert statuses.keys() >= {2, 4}, "some were answered, and some refused"


def test_every_body_is_described_with_every_field_that_is_read(api: FastAPI) -> None:
    document = api.openapi()
    for path, model in BODIES.items():
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        described = document["components"]["schemas"][reference.rsplit("/", 1)[-1]]
        assert set(described["properties"]) == set(model.model_fields)
        assert described["additionalProperties"] is True
    assert document["components"]["schemas"]["TideOptions"]["additionalProperties"] is False


async def test_the_document_is_served() -> None:
    other = make_service()
    reply = await Http(other).ask("GET", "/openapi.json")
    other.engine.close()
    assert reply.json["info"]["title"] == "TIDE Serve"
