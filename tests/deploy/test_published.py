"""Published artefacts: versions that never change, a pointer that moves, and a service that follows it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy import app, published
from deploy.artefact_source import ArtefactSource
from deploy.config.policy import LivePolicy
from deploy.published import Publication
from deploy.spare import Spares
from tests.exits.artefact.artefact_factory import make_artefact
from tide_core.errors import ArtefactError, ConfigError
from tide_core.exits.artefact.artefact import load_artefact

Server = app.TideServer.func_or_class  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("artefacts")
    return make_artefact(root / "one", seed=1), make_artefact(root / "two", seed=2)


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that all nodes see, and a URL."""
    return f"{tmp_path}/published" if request.param == "folder" else f"file://{tmp_path}/published"


def digest_of(folder: Path) -> str:
    return load_artefact(folder, None).digest


def test_a_published_artefact_is_a_version_and_the_pointer_names_it(
    place: str, artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    assert Publication(place).pointer() is None
    pointer = Publication(place).publish(artefacts[0], "run demo")
    assert pointer == Publication(place).pointer()
    assert (pointer.digest, pointer.previous, pointer.by) == (digest_of(artefacts[0]), None, "run demo")
    folder = Publication(place).local(pointer.digest, tmp_path / "cache")
    assert digest_of(folder) == pointer.digest
    assert {path.name for path in folder.iterdir()} == {path.name for path in artefacts[0].iterdir()}


def test_another_version_leaves_the_first_as_it_was_and_the_pointer_can_be_moved_back(
    place: str, artefacts: tuple[Path, Path]
) -> None:
    publication = Publication(place)
    first = publication.publish(artefacts[0], "run a")
    second = publication.publish(artefacts[1], "run b")
    assert sorted(publication.versions()) == sorted([first.digest, second.digest])
    assert second.previous == first.digest
    back = publication.point("previous", "me")
    assert (back.digest, back.previous) == (first.digest, second.digest)
    again = publication.point(second.digest[:12], "me")
    assert again.digest == second.digest
    assert [(move.digest, move.by) for move in publication.moves()] == [
        (first.digest, "run a"),
        (second.digest, "run b"),
        (first.digest, "me"),
        (second.digest, "me"),
    ]


def test_a_version_that_is_there_is_never_written_again(
    place: str, artefacts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Publication(place).publish(artefacts[0], "run a")
    monkeypatch.setattr(published, "put", lambda *_: pytest.fail("written again"))
    Publication(place).publish(artefacts[0], "run a")


@pytest.mark.parametrize("at", ["heads.safetensors", "manifest.json"])
def test_a_publication_that_was_cut_off_is_no_version_and_moves_nothing(
    place: str, artefacts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    put, publication = published.put, Publication(place)
    publication.publish(artefacts[0], "run a")

    def dies(store: Any, target: str, raw: bytes) -> None:
        if target.endswith(at):
            raise OSError("the job was killed")
        put(store, target, raw)

    with monkeypatch.context() as patch:
        patch.setattr(published, "put", dies)
        with pytest.raises(OSError, match="killed"):
            publication.publish(artefacts[1], "run b")
    assert publication.versions() == [digest_of(artefacts[0])]
    assert [move.by for move in publication.moves()] == ["run a"]
    publication.publish(artefacts[1], "run b, again")
    assert len(publication.versions()) == 2


@pytest.mark.parametrize("version", ["previous", "abc", "0" * 64, ""])
def test_a_version_that_is_not_there_is_refused_with_those_that_are(
    place: str, artefacts: tuple[Path, Path], version: str
) -> None:
    pointer = Publication(place).publish(artefacts[0], "run a")
    with pytest.raises(ArtefactError, match="previous|" + pointer.digest[:16]):
        Publication(place).point(version, "me")
    assert Publication(place).pointer() == pointer


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"digest": "../../etc", "previous": null, "by": "", "at": ""}'])
def test_a_pointer_that_nobody_here_wrote_is_refused(place: str, tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "current.json").write_bytes(raw)
    with pytest.raises(ArtefactError, match="a pointer"):
        Publication(place).pointer()


def test_files_that_are_not_those_of_the_version_are_refused(
    place: str, artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    pointer = Publication(place).publish(artefacts[0], "run a")
    version = tmp_path / "published" / "versions" / pointer.digest
    shutil.rmtree(version)
    shutil.copytree(artefacts[1], version)
    with pytest.raises(ArtefactError, match="its files are those of"):
        Publication(place).local(pointer.digest, tmp_path / "cache")
    assert not (tmp_path / "cache" / "artefacts" / pointer.digest).exists()


def test_a_version_is_downloaded_once(artefacts: tuple[Path, Path], tmp_path: Path) -> None:
    place = f"file://{tmp_path}/published"
    pointer = Publication(place).publish(artefacts[0], "run a")
    first = Publication(place).local(pointer.digest, tmp_path / "cache")
    shutil.rmtree(tmp_path / "published" / "versions")
    assert Publication(place).local(pointer.digest, tmp_path / "cache") == first
    assert [path.name for path in (tmp_path / "cache" / "artefacts").iterdir()] == [pointer.digest]


def test_credentials_in_a_place_are_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Publication("s3://me:hunter2@bucket/published")
    assert "hunter2" not in str(caught.value)


def test_the_command_publishes_shows_and_goes_back(place: str, artefacts: tuple[Path, Path]) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(published.app, list(words))
        assert done.exit_code == 0, done.output
        return done.stdout

    run("publish", str(artefacts[0]), place, "--by", "me")
    run("publish", str(artefacts[1]), place)
    one, two = (digest_of(each) for each in artefacts)
    assert f"* {two}" in run("show", place)
    assert run("point", place, "previous") == f"current: {one} (before: {two})\n"
    shown = run("show", place)
    assert f"* {one}" in shown
    assert f"  {two}" in shown
    assert f"nothing -> {one[:16]}  by me" in shown
    assert CliRunner().invoke(published.app, ["point", place, "nonsense"]).exit_code == 2


# The service.


@pytest.mark.parametrize("setting", ["auto", "none", "/artefacts/mine"])
def test_what_the_engine_knows_is_left_to_it(setting: str) -> None:
    artefact = ArtefactSource("auto").local(setting)
    assert (artefact.folder, artefact.pinned) == (setting, None)
    assert not ArtefactSource("auto").has_moved(setting)


def test_the_url_of_an_artefact_is_a_copy_of_it_that_never_changes(
    artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(artefacts[0], tmp_path / "store" / "mine")
    source = ArtefactSource("none", tmp_path / "cache")
    first = source.local(f"file://{tmp_path}/store/mine").folder
    shutil.rmtree(tmp_path / "store" / "mine")
    shutil.copytree(artefacts[1], tmp_path / "store" / "mine")
    second = source.local(f"file://{tmp_path}/store/mine").folder
    assert (digest_of(Path(first)), digest_of(Path(second))) == (digest_of(artefacts[0]), digest_of(artefacts[1]))


def test_a_replica_starts_with_what_the_model_has_where_nothing_is_published_yet(
    place: str, artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    source = ArtefactSource(f"{place}/current.json", tmp_path / "cache")
    assert source.first(lambda folder: folder) == "auto"
    assert not source.has_moved(None)
    Publication(place).publish(artefacts[0], "run a")
    assert source.has_moved(None)
    assert digest_of(Path(source.local(None).folder)) == digest_of(artefacts[0])
    assert not source.has_moved(None)


def test_a_replica_that_starts_takes_the_version_before_one_that_is_refused(
    place: str, artefacts: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in artefacts:
        Publication(place).publish(folder, "run")
    refused = digest_of(artefacts[1])

    def load(folder: str) -> str:
        if digest_of(Path(folder)) == refused:
            raise ArtefactError("artefact", folder, "one of this model")
        return folder

    source = ArtefactSource(f"{place}/current.json", tmp_path / "cache")
    with caplog.at_level(logging.ERROR):
        assert digest_of(Path(source.first(load))) == digest_of(artefacts[0])
    assert refused[:16] in caplog.text


class Replica:
    """The part of a replica that follows a pointer, over a service that refuses one version."""

    reconfigure, _replace_policy, _follow = Server.reconfigure, Server._replace_policy, Server._follow
    _apply, _apply_last_good, _begin_tasks = Server._apply, Server._apply_last_good, Server._begin_tasks
    _note_refused = Server._note_refused

    def __init__(self, source: ArtefactSource, refused: str = "") -> None:
        self._artefacts, self._following, self._changing = source, None, asyncio.Lock()
        self._args = SimpleNamespace(follow_s=0.01)
        self._spares = Spares()
        self._policies: Any = SimpleNamespace(
            read=lambda: list(self.kept), write=self._keep, note_refused=lambda reason: None
        )
        self._configured, self._refused = False, refused
        self._meter = SimpleNamespace(config_refused=None, on_artefact_move=lambda result: self.moves.append(result))
        self.service: Any = SimpleNamespace(apply=self._swap, policy_refused=None)
        self.kept: list[dict[str, Any]] = []
        self.moves: list[str] = []
        self.digests: list[str] = []

    def _keep(self, policies: list[dict[str, Any]]) -> None:
        self.kept = policies

    async def _swap(self, policy: LivePolicy) -> None:
        assert policy.artefact is not None
        digest = digest_of(Path(policy.artefact))
        if digest == self._refused:
            raise ConfigError("artefact", policy.artefact, "one of this model")
        self.digests.append(digest)

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not reached():
                await asyncio.sleep(0.01)

    async def looks(self, times: int) -> None:
        """Until it has looked at the pointer so many times from now on."""
        seen, has_moved = 0, self._artefacts.has_moved

        def counted(setting: str | None) -> bool:
            nonlocal seen
            seen += 1
            return has_moved(setting)

        self._artefacts.has_moved = counted  # type: ignore[method-assign]
        await self.until(lambda: seen > times)

    async def close(self) -> None:
        assert self._following is not None
        self._following.cancel()


@pytest.mark.parametrize("own", [True, False], ids=["engine", "user_config"])
async def test_the_service_takes_what_is_published_and_goes_back_with_the_pointer(
    place: str, artefacts: tuple[Path, Path], tmp_path: Path, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = (digest_of(each) for each in artefacts)
    Publication(place).publish(artefacts[0], "run a")
    setting = f"{place}/current.json"
    replica = Replica(ArtefactSource(setting if own else "none", tmp_path / "cache"))
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        await replica.reconfigure({} if own else {"artefact": setting})
        Publication(place).publish(artefacts[1], "run b")
        await replica.until(lambda: len(replica.digests) == 2)
        Publication(place).point("previous", "me")
        await replica.until(lambda: len(replica.moves) == 2)
    await replica.close()
    assert replica.digests == [one, two, one]
    assert replica.moves == ["taken", "taken"]
    assert f"{one[:16]} -> {two[:16]}, by run b" in caplog.text
    assert f"{two[:16]} -> {one[:16]}, by me" in caplog.text


async def test_a_version_that_is_refused_is_reported_once_and_one_that_follows_is_taken(
    place: str, artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = (digest_of(each) for each in artefacts)
    Publication(place).publish(artefacts[0], "run a")
    replica = Replica(ArtefactSource("none", tmp_path / "cache"), refused=two)
    await replica.reconfigure({"artefact": f"{place}/current.json"})
    Publication(place).publish(artefacts[1], "run b")
    await replica.until(lambda: bool(replica.moves))
    assert replica.service.policy_refused is not None
    await replica.looks(3)
    assert replica.moves == ["refused"], "not once for each look at the pointer"
    Publication(place).point("previous", "me")
    await replica.until(lambda: len(replica.moves) == 2)
    await replica.close()
    assert replica.digests == [one, one]
    assert (replica.moves[1], replica.service.policy_refused) == ("taken", None)


async def test_a_replica_that_starts_while_the_pointer_is_bad_comes_up_with_the_last_good_version(
    place: str, artefacts: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = (digest_of(each) for each in artefacts)
    Publication(place).publish(artefacts[0], "run a")
    given = {"artefact": f"{place}/current.json", "modes": ["full", "verified"]}
    first = Replica(ArtefactSource("none", tmp_path / "cache"))
    await first.reconfigure(given)
    await first.close()
    assert one in json.dumps(first.kept), "by its version, not by the pointer"
    Publication(place).publish(artefacts[1], "run b")
    second = Replica(ArtefactSource("none", tmp_path / "cache"), refused=two)
    second.kept = first.kept
    await second.reconfigure(given)
    await second.close()
    assert second.digests == [one]
    assert second.service.policy_refused is not None
