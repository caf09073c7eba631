"""A run that is kept in an object store: nothing is shared between the workers but the store."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.live import ROOT, free_ports
from deploy.artefact_source import ArtefactSource
from deploy.object_store import location, open_store, put
from deploy.published import CURRENT, Publication
from deploy.weights import fetch_model
from tests.evaluation.on_disk import save_model
from tests.exits.artefact.artefact_factory import make_artefact
from tests.job.cluster import START_S, STORE_CREDENTIALS, until_gone
from tests.job.runs import Bench, Job, pieces
from tide_core.exits.artefact.artefact import load_artefact

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]

EMULATOR = ROOT / "build" / "emulator-venv" / "bin" / "moto_server"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty bucket."""
    if not EMULATOR.exists():
        pytest.skip("needs the object store emulator: make emulator")
    [port] = free_ports(1)
    with (tmp_path / "emulator.log").open("wb") as log:
        process = subprocess.Popen([EMULATOR, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                asked = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(asked, timeout=60).close()
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "emulator.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield f"s3://bucket/runs?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process; those of the cluster are its own. The emulator stores unsigned files wrongly."""
    for name, value in STORE_CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("credentials")
def test_a_run_in_an_object_store_survives_its_driver_and_gives_the_artefact_of_a_run_in_a_folder(
    bench: Bench, reference: Job, store: str
) -> None:
    place = location(store, "published")
    alone = bench.job(storage=store, publish=place)
    job = bench.job(storage=store, publish=place, name=alone.settings["name"], workers={"count": 2})
    gate = bench.gate(alone, "shards/train-00003.safetensors")
    first = bench.start(alone, gates=True)
    worker = first.until_waiting(gate)
    first.kill()
    until_gone(worker)
    gate.open()
    ended = bench.done(job)
    assert "dataset: done before" in ended.err
    assert 0 < len(pieces(ended.err)) < len(reference.shards("shards")), "of the shards, those that were missing"
    assert job.artefact.digest == reference.artefact.digest
    assert ended.digest == reference.artefact.digest[:16]
    folder = ArtefactSource(location(place, CURRENT), bench.root / "cache").local(None).folder
    assert load_artefact(folder, None).digest == reference.artefact.digest, "and a service finds it published"


@pytest.mark.usefixtures("credentials")
def test_weights_are_fetched_from_an_object_store_once_and_a_version_of_an_artefact_can_be_gone_back_to(
    store: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model")
    files, root = open_store(location(store, "models", "mine"))
    for path in model.iterdir():
        put(files, f"{root}/{path.name}", path.read_bytes())
    url = location(store, "models", "mine")
    fetched = fetch_model(url, tmp_path / "models")
    assert fetch_model(url, tmp_path / "models") == fetched
    assert (fetched / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()

    publication = Publication(location(store, "published"))
    source = ArtefactSource(location(store, "published", CURRENT), tmp_path / "cache")
    assert source.local(None).folder == "auto", "nothing is published yet"
    first, second = (make_artefact(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two")))
    for folder in (first, second):
        publication.publish(folder, "run")
    publication.point("previous", "me")
    assert source.has_moved(None)
    assert load_artefact(source.local(None).folder, None).digest == load_artefact(first, None).digest
    assert [move.by for move in publication.moves()] == ["run", "run", "me"]
