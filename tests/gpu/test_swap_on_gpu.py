"""Another artefact on a CUDA device: graphs are captured for it between the steps of requests that run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tide_core.engine.engine import Engine
from tide_core.request import SamplingParams

pytestmark = pytest.mark.gpu
PROMPT = [2, 3, 4, 5]


async def test_streams_that_run_are_whole_and_the_new_exits_are_lossless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    model, artefact = save_model(tmp_path / "m"), save_artefact_for_it(tmp_path / "a")
    params = SamplingParams(max_tokens=240, ignore_eos=True)

    async def read(engine: Engine, begun: asyncio.Event | None = None) -> list[tuple[int, str]]:
        outputs = []
        async for output in engine.stream(PROMPT, params):
            outputs.append(output)
            if begun is not None:
                begun.set()
        assert sum(output.finished for output in outputs) == 1
        return [(token.token_id, token.mode) for output in outputs for token in output.tokens]

    settings = {"device": "cuda", "artefact": "none", "kv_memory_gib": 0.25, "suffix_drafts": False}
    with Engine(str(model), **settings) as engine:
        alone = await read(engine)
        begun = [asyncio.Event() for _ in range(3)]
        during = [asyncio.create_task(read(engine, event)) for event in begun]
        for event in begun:
            await event.wait()
        await asyncio.to_thread(engine.use_artefact, str(artefact))
        after = await read(engine)
        assert [await task for task in during] == [alone] * 3
        assert [token_id for token_id, _ in after] == [token_id for token_id, _ in alone]
        assert {mode for _, mode in alone} == {"full"}
        assert {mode for _, mode in after} == {"verified"}
