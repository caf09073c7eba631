"""Links of the documents lead somewhere, in a checkout as in the site."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import pytest
import yaml

from tests.docs.documents import ROOT, Document, documents

ALERTS = ROOT / "k8s" / "observability" / "alerts.yaml"


@pytest.mark.parametrize("document", documents(), ids=lambda document: document.path)
def test_links_lead_to_files_and_headings_that_exist(document: Document) -> None:
    dead = []
    for link in document.links:
        if "://" in link:
            continue
        place, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(document.path), place)) if place else document.path
        if not (ROOT / path).exists() or (anchor and anchor not in Document(path).anchors):
            dead.append(link)
    assert dead == []


@pytest.mark.skipif(not ALERTS.exists(), reason="there are no alerts")
def test_every_alert_has_its_place_in_the_runbook() -> None:
    rules: Any = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    urls = {rule["annotations"]["runbook_url"] for group in rules["spec"]["groups"] for rule in group["rules"]}
    assert urls
    for url in urls:
        path, _, anchor = url.partition("#")
        assert anchor in Document(path).anchors, url


def test_the_runbook_has_the_anchors_that_others_may_have_kept() -> None:
    kept = {"engine-dead", "audit-bound-broken", "queue-growth", "kv-exhaustion", "exit-rate-drift", "no-replica"}
    assert kept | {"error-ratio", "slow-first-token"} <= Document("docs/runbook.md").anchors


def test_no_document_names_a_folder_of_somebody() -> None:
    for document in documents():
        assert not re.search(r"/(?:root|work|home/(?!me\b))[/\w]", document.text), document.path
