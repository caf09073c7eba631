"""Steps launched before the last was read, and prompts that no step waits for: rows get the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_parts, fixed_depths, poisoned
from tests.factories import random_prompts
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.in_flight import InFlightStep
from tide_core.request import SamplingParams

pytestmark = pytest.mark.gpu
HARDER = 0.3


def answers(prompts: Any, params: Any, *, lookahead: bool, steps: int = 1, **settings: Any) -> list[list[int]]:
    parts = exit_parts("qwen3", share=HARDER, device="cuda", **settings)
    if not lookahead:
        parts.runner.lookahead_steps = lambda: 0
    assert parts.runner.cycles is not None
    if steps > 1:  # or as many as it takes
        parts.runner.cycles.depths = fixed_depths(steps)
    with poisoned(parts) as engine:
        found = [engine.generate(prompts, params) for _ in range(2)]  # the second time all is captured
    parts.core.check_idle()
    assert all_ids(found[0]) == all_ids(found[1])
    return all_ids(found[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["full", "verified"])
@pytest.mark.parametrize(("max_rows", "steps"), [(1, 1), (3, 1), (8, 1), (8, 3)])
def test_rows_that_come_and_go_get_what_they_get_without_lookahead(
    max_rows: int, steps: int, mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookahead: list[int] = []
    num_cycles: list[int] = []
    launch = GraphCycles._launch

    def launched(self: GraphCycles, rows: Any, steps: int = 1) -> InFlightStep:
        lookahead.append(sum(row.previous >= 0 for row in rows))
        step = launch(self, rows, steps)
        num_cycles.append(step.num_cycles)
        return step

    prompts = [ids[: 5 + 3 * i] for i, ids in enumerate(random_prompts(12, 50))]
    params = [SamplingParams(max_tokens=9 + 5 * i, ignore_eos=True, mode=mode) for i in range(12)]
    expected = answers(prompts, params, lookahead=False, max_rows=1, dtype=dtype, prefix_caching=False)
    ends = [ids[-3] for ids in expected]
    params = [
        SamplingParams(max_tokens=9 + 5 * i, ignore_eos=True, mode=mode, stop_ids=(ends[i],) if i % 3 == 1 else ())
        for i in range(12)
    ]
    expected = [ids[: ids.index(ends[i]) + 1] if i % 3 == 1 else ids for i, ids in enumerate(expected)]
    monkeypatch.setattr(GraphCycles, "_launch", launched)
    found = answers(prompts, params, lookahead=True, steps=steps, max_rows=max_rows, dtype=dtype, prefix_caching=False)
    assert found == expected
    assert sum(map(bool, lookahead)) > len(lookahead) // 2
    assert max(num_cycles) >= steps
