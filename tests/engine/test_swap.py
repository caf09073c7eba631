"""Another artefact while requests run: they keep their exits, those after them have the new ones, nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.runners import HANG_S, Gate
from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tests.factories import make_engine
from tide_core.engine.assemble import with_artefact
from tide_core.engine.engine import Engine
from tide_core.engine.loop import FairLock
from tide_core.errors import ArtefactError, ConfigError, RequestError
from tide_core.request import RequestOutput, SamplingParams

PROMPT = [2, 3, 4, 5]
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("swap")
    return {"model": save_model(root / "m"), "artefact": save_artefact_for_it(root / "a")}


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """With a number of drafts as its parameter no cost table is measured, and a swap takes a moment."""
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    drafts = getattr(request, "param", None)
    settings: dict[str, Any] = {"artefact": "none", "max_model_len": 128, "kv_memory_gib": 0.05, "drafts": drafts}
    with Engine(str(folders["model"]), suffix_drafts=False, **settings) as engine:
        yield engine


async def rest(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


@pytest.mark.parametrize("engine", [2], indirect=True)
async def test_open_requests_keep_their_exits_and_later_ones_have_the_new(
    engine: Engine, folders: dict[str, Path]
) -> None:
    [alone] = engine.generate([PROMPT], PARAMS)
    with Gate(1).hold(engine):
        stream = engine.stream(PROMPT, PARAMS)
        first = await anext(stream)
        await asyncio.to_thread(engine.use_artefact, str(folders["artefact"]))
        assert engine.artefact_digest is not None
        assert engine._loop.num_open == 1
    [later] = await asyncio.to_thread(engine.generate, [PROMPT], PARAMS)
    outputs = [first, *await rest(stream)]
    tokens = [token for output in outputs for token in output.tokens]
    assert {token.mode for token in tokens} == {"full"}
    assert [token.token_id for token in tokens] == [token.token_id for token in alone.tokens]
    assert {token.mode for token in later.tokens} == {"verified"}
    assert [token.token_id for token in later.tokens] == [token.token_id for token in alone.tokens]


def test_a_change_of_the_artefact_takes_a_pool_as_large_as_the_first_and_measures_no_memory_again(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path))
    measured = iter([2**20])
    monkeypatch.setattr("tide_core.kv.memory.available_memory", lambda: next(measured))
    settings: dict[str, Any] = {"max_model_len": 64, "kv_memory_gib": "auto", "drafts": 2, "suffix_drafts": False}
    with Engine(str(folders["model"]), artefact="none", **settings) as engine:
        before = engine.config
        engine.use_artefact(str(folders["artefact"]))
        assert engine.config == replace(before, artefact=str(folders["artefact"]))


async def test_a_core_that_is_done_is_let_go_and_counts_go_on(engine: Engine, folders: dict[str, Path]) -> None:
    engine.generate([PROMPT], PARAMS)
    before = engine.stats()
    await asyncio.to_thread(engine.use_artefact, str(folders["artefact"]))
    engine.generate([PROMPT], PARAMS)
    after = engine.stats()
    assert after.num_output_tokens == before.num_output_tokens + 60
    assert after.exits["total_tokens"] == 120
    async with asyncio.timeout(HANG_S):
        while len(engine._loop._cores) > 1:
            await asyncio.sleep(0.01)
    assert engine._loop._cores == [engine._parts.core]


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_a_swap_shares_weights_tokenizer_and_grammars(engine: Engine, folders: dict[str, Path]) -> None:
    before = engine._parts
    places = [weight.data_ptr() for weight in before.runner.adapter.model.parameters()]
    for artefact in (str(folders["artefact"]), "none"):
        engine.use_artefact(artefact)
        after = engine._parts
        assert after.runner.cache is not before.runner.cache
        assert after.runner.adapter.model is before.runner.adapter.model
        assert [weight.data_ptr() for weight in after.runner.adapter.model.parameters()] == places
        assert after.tokenizer is before.tokenizer is engine.tokenizer
        assert after.grammars is before.grammars


async def test_the_pool_of_a_core_that_is_done_is_dropped(engine: Engine, folders: dict[str, Path]) -> None:
    engine.generate([PROMPT], PARAMS)
    pool = weakref.ref(engine._parts.runner.cache)
    await asyncio.to_thread(engine.use_artefact, str(folders["artefact"]))
    engine.generate([PROMPT], PARAMS)
    async with asyncio.timeout(HANG_S):
        while pool() is not None:
            gc.collect()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("engine", [2], indirect=True)
async def test_a_request_of_the_old_core_can_be_aborted_after_the_swap(
    engine: Engine, folders: dict[str, Path]
) -> None:
    with Gate(1).hold(engine):
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=120, ignore_eos=True), request_id="old")
        await anext(stream)
        await asyncio.to_thread(engine.use_artefact, str(folders["artefact"]))
        assert engine.abort("old")
    assert (await rest(stream))[-1].finish_reason == "abort"


def test_an_artefact_that_is_refused_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ArtefactError):
        engine.use_artefact(str(tmp_path / "nothing"))
    assert engine.artefact_digest is None
    assert len(engine.generate([PROMPT], PARAMS)[0].tokens) == 60


def test_exits_that_cannot_do_what_is_wanted_are_never_taken(engine: Engine, folders: dict[str, Path]) -> None:
    asked: list[str] = []

    def wanted(default_mode: str) -> SamplingParams:
        asked.append(default_mode)
        return SamplingParams(mode="verified", min_layers=99)

    with pytest.raises(RequestError, match="min_layers"):
        engine.use_artefact(str(folders["artefact"]), wanted)
    assert asked == ["verified"]
    assert engine.artefact_digest is None
    assert engine.config.artefact == "none"
    engine.use_artefact(str(folders["artefact"]), lambda default_mode: SamplingParams(mode="verified"))
    assert engine.artefact_digest is not None


def test_exits_can_be_taken_out_again(engine: Engine, folders: dict[str, Path]) -> None:
    engine.use_artefact(str(folders["artefact"]))
    engine.use_artefact("none")
    [answer] = engine.generate([PROMPT], PARAMS)
    assert {token.mode for token in answer.tokens} == {"full"}


def test_an_engine_around_a_model_that_was_handed_in_says_that_it_cannot() -> None:
    with make_engine() as engine, pytest.raises(ConfigError, match="loaded its model itself"):
        engine.use_artefact("none")


async def test_outputs_that_wait_are_read_as_one_piece(engine: Engine) -> None:
    stream = engine.stream(PROMPT, PARAMS)
    first = await anext(stream)
    while engine.stats().num_finished == 0:
        time.sleep(0.01)  # on the event loop, which reads nothing meanwhile
    outputs = await rest(stream)
    assert sum(len(output.tokens) for output in [first, *outputs]) == 60
    assert len(outputs) <= 2, "the engine counts an end before it delivers it, so the last may come by itself"
    assert outputs[-1].finished


def test_a_lock_that_is_asked_for_again_at_once_still_goes_round() -> None:
    for _ in range(20):
        lock, order = FairLock(), list[str]()

        def other(lock: FairLock = lock, order: list[str] = order) -> None:
            with lock:
                order.append("other")

        thread = threading.Thread(target=other)
        with lock:
            thread.start()
            while lock._asked < 2:  # until it waits
                time.sleep(0.001)
            order.append("greedy")
        with lock:
            order.append("greedy again")
        thread.join()
        assert order == ["greedy", "other", "greedy again"]


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_settings_name_the_artefact_in_use_and_not_one_that_was_refused(
    engine: Engine, folders: dict[str, Path], tmp_path: Path
) -> None:
    engine.use_artefact(str(folders["artefact"]))
    assert engine.config.artefact == str(folders["artefact"])
    with pytest.raises(ArtefactError):
        engine.use_artefact(str(tmp_path / "nothing"))
    assert engine.config.artefact == str(folders["artefact"])


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_a_swap_waits_for_its_turn_at_the_model(engine: Engine, folders: dict[str, Path]) -> None:
    swap = threading.Thread(target=engine.use_artefact, args=(str(folders["artefact"]),))
    lock = engine._loop.step_lock
    with lock:
        swap.start()
        while swap.is_alive() and lock._asked - lock._served < 2:
            time.sleep(0.001)
        assert swap.is_alive(), "it waits for the lock"
        assert engine.artefact_digest is None
    swap.join(HANG_S)
    assert engine.artefact_digest is not None


@pytest.mark.parametrize("engine", [2], indirect=True)
def test_swaps_come_one_after_another(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = [0], [0]

    def counted(*args: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.1)
        try:
            return with_artefact(*args)
        finally:
            running[0] -= 1

    monkeypatch.setattr("tide_core.engine.engine.with_artefact", counted)
    swaps = [threading.Thread(target=engine.use_artefact, args=(name,)) for name in ("none", str(folders["artefact"]))]
    for swap in swaps:
        swap.start()
    for swap in swaps:
        swap.join()
    assert most == [1]
    assert (engine.config.artefact == "none") == (engine.artefact_digest is None)


@pytest.mark.parametrize("engine", [2], indirect=True)
async def test_a_request_made_before_a_swap_runs_with_its_exits_even_if_their_core_was_let_go(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.use_artefact(str(folders["artefact"]))
    [before] = engine.generate([PROMPT], PARAMS)
    core, make, begun, made = engine._parts.core, engine._make_request, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        request = make(*args)
        begun.set()
        made.wait(HANG_S)
        return request

    monkeypatch.setattr(engine, "_make_request", slow)
    waits = asyncio.create_task(rest(engine.stream(PROMPT, PARAMS)))
    assert await asyncio.to_thread(begun.wait, HANG_S)
    await asyncio.to_thread(engine.use_artefact, "none")
    monkeypatch.setattr(engine, "_make_request", make)
    await asyncio.to_thread(engine.generate, [PROMPT], PARAMS)
    assert core not in engine._loop._cores
    made.set()
    outputs = await asyncio.wait_for(waits, HANG_S)
    tokens = [token for output in outputs for token in output.tokens]
    assert [token.exit_layer for token in tokens] == [token.exit_layer for token in before.tokens]


@pytest.mark.parametrize("engine", [2], indirect=True)
async def test_a_batch_keeps_the_exits_that_it_began_with(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.use_artefact(str(folders["artefact"]))
    monkeypatch.setattr(engine, "config", replace(engine.config, max_queued=1))
    answers = engine.generate_as_completed([PROMPT] * 3, PARAMS)
    _, first = next(answers)
    engine.use_artefact("none")
    for _, answer in answers:
        assert {token.mode for token in answer.tokens} == {"verified"}
        assert [token.exit_layer for token in answer.tokens] == [token.exit_layer for token in first.tokens]
