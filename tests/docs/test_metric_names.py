"""A metric that a document names is one that the service, or a calibration, exports."""

from __future__ import annotations

import re

import pytest

from deploy.metrics import METRICS
from tests.docs.documents import Document, documents
from tools.reference.metrics import exported, job_metrics

NAME = re.compile(r"\b(?:ray_)?tide_[a-z0-9_]+\b")
NO_METRICS = {"tide_core", "tide_client", "tide_pb2", "tide_pb2_grpc", "tide_request_id"}
SERIES = {"histogram": ("_bucket", "_count", "_sum"), "counter": (), "gauge": ()}


def names() -> set[str]:
    """As the code has them, and as Prometheus gets them."""
    kinds = [(metric.name, metric.kind) for metric in METRICS] + [(name, kind) for name, kind, _, _ in job_metrics()]
    series = {f"{exported(name, kind)}{suffix}" for name, kind in kinds for suffix in ("", *SERIES[kind])}
    return series | {name for name, _ in kinds}


@pytest.mark.parametrize("document", documents(), ids=lambda document: document.path)
def test_metrics_that_are_named_exist(document: Document) -> None:
    assert set(NAME.findall(document.text)) - NO_METRICS - names() == set()
