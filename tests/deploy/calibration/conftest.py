from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.deploy.calibration.fake_cluster import Cluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster that is not there."""
    from tests.deploy.calibration.fake_cluster import Cluster  # it takes seconds to import, and few tests want it

    made = Cluster()
    made.install(monkeypatch)
    return made
