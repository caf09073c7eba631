"""One cluster for all tests of the job, and one run without a fault that they compare with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.job.cluster import Cluster, started
from tests.job.runs import Bench, Job


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with started(num_cpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def bench(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(cluster, tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="package")
def reference(bench: Bench) -> Job:
    """Of two workers, from nothing to the artefact, with nothing in its way."""
    job = bench.job(workers={"count": 2})
    bench.done(job)
    return job
