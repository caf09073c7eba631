"""A policy that is refused: the last good one stays, and a replica that starts comes up with it."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.app import TideServer
from deploy.artefact_source import ArtefactSource
from deploy.config.last_good import KEPT, others, remember
from deploy.config.policy import LivePolicy
from deploy.spare import Spares
from tide_core.errors import ConfigError

Server = TideServer.func_or_class  # type: ignore[attr-defined]


class Store:
    def __init__(self, *policies: dict[str, Any]) -> None:
        self.policies = list(policies)
        self.refused: str | None = None

    def read(self) -> list[dict[str, Any]]:
        return list(self.policies)

    def write(self, policies: list[dict[str, Any]]) -> None:
        self.policies = policies

    def note_refused(self, reason: str | None) -> None:
        self.refused = reason


class Replica:
    """The part of a replica that takes a policy, over a service that refuses some artefacts."""

    reconfigure, _replace_policy, _follow = Server.reconfigure, Server._replace_policy, Server._follow
    _apply, _apply_last_good, _begin_tasks = Server._apply, Server._apply_last_good, Server._begin_tasks
    _note_refused = Server._note_refused

    def __init__(self, store: Store, *corrupt: str) -> None:
        self._policies, self._configured = store, False
        self._meter = SimpleNamespace(config_refused=None)
        self.service: Any = SimpleNamespace(apply=self._take, policy_refused=None)
        self._corrupt = corrupt
        self._artefacts, self._following = ArtefactSource("none"), None
        self._changing, self._args = asyncio.Lock(), SimpleNamespace(follow_s=3600.0)
        self._spares = Spares()
        self.in_force: str | None = None

    async def _take(self, policy: LivePolicy) -> None:
        if policy.artefact in self._corrupt:
            raise ConfigError("artefact", policy.artefact, "a sound one")
        self.in_force = policy.artefact

    @property
    def refused(self) -> Any:
        assert self._meter.config_refused == self.service.policy_refused == self._policies.refused
        return self._meter.config_refused


async def test_a_policy_that_is_applied_is_kept_for_replicas_to_come() -> None:
    store = Store()
    replica = Replica(store)
    await replica.reconfigure({"artefact": "a"})
    await replica.reconfigure({"artefact": "b"})
    assert store.policies == [{"artefact": "b"}, {"artefact": "a"}]


async def test_a_running_replica_keeps_its_policy_when_another_is_refused_and_says_why() -> None:
    store = Store()
    replica = Replica(store, "bad")
    await replica.reconfigure({"artefact": "good"})
    await replica.reconfigure({"artefact": "bad"})
    assert replica.in_force == "good"
    assert "bad" in replica.refused
    assert store.policies == [{"artefact": "good"}]
    await replica.reconfigure({"artefact": "good"})
    assert replica.refused is None


async def test_a_replica_that_starts_with_a_refused_policy_comes_up_with_the_last_good_one_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store({"artefact": "good"}, {"artefact": "older"})
    replica = Replica(store, "bad")
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        await replica.reconfigure({"artefact": "bad"})
    assert replica.in_force == "good"
    assert "bad" in replica.refused
    assert "user_config is refused, the last good one stays in force" in caplog.text
    assert store.policies == [{"artefact": "good"}, {"artefact": "older"}]


async def test_a_policy_that_only_other_replicas_could_take_is_passed_over() -> None:
    replica = Replica(Store({"artefact": "elsewhere"}, {"artefact": "good"}), "bad", "elsewhere")
    await replica.reconfigure({"artefact": "bad"})
    assert replica.in_force == "good"


@pytest.mark.parametrize("kept", [[], [{"artefact": "bad"}], [{"artefact": "worse"}], [{"unknown": 1}]])
async def test_a_replica_for_which_there_is_no_good_one_does_not_start(kept: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="bad"):
        await Replica(Store(*kept), "bad", "worse").reconfigure({"artefact": "bad"})


def test_few_policies_are_kept_each_once_the_newest_first() -> None:
    store = Store()
    for number in (1, 2, 3, 1, 4, 5, 5):
        remember(store, {"min_layers": number})
    assert store.policies == [{"min_layers": number} for number in (5, 4, 1, 3)]
    assert len(store.policies) == KEPT
    assert {"min_layers": 1} not in others(store, {"min_layers": 1})
