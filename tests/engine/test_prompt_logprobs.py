"""Log-probabilities of the prompt: those of the library's own forward, whatever the way the prompt takes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import all_ids, easy_model, exit_layers, exit_parts, poisoned
from tests.factories import make_engine, make_parts, make_request, random_prompts
from tests.kernels.twin import engine_kernels
from tests.tiny_models import tiny_model
from tide_core.engine import assemble
from tide_core.engine.engine import Engine
from tide_core.engine.sinks import AsyncSink
from tide_core.errors import RequestError
from tide_core.execution import prompt_logprobs, runner
from tide_core.execution.graphs.cycle import GraphCycles
from tide_core.execution.graphs.prompts import GraphPrompts
from tide_core.exits.propose import Exits, Proposal
from tide_core.outputs.tokenizer import TextStream
from tide_core.request import FinishReason, PromptToken, RequestOutput, SamplingParams, TokenOutput

FULL, VERIFIED, BOUNDED = {"mode": "full"}, {"threshold": 0.0}, {"mode": "bounded", "epsilon": 0.02}
FAST = {"mode": "fast", "threshold": 0.0}
"""With a threshold of 0 whatever may exit does."""
NUM_LIKELIEST = 3


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "prompt_logprobs": NUM_LIKELIEST, **changes})


def check(tokens: Sequence[PromptToken], prompt: list[int], model: Any = None, k: int = NUM_LIKELIEST) -> None:
    """All tokens of the prompt, each once, with the log-probabilities that the library gives them."""
    with torch.inference_mode():
        expected = (model or tiny_model("llama"))(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert [token.token_id for token in tokens] == prompt
    assert tokens[0] == PromptToken(prompt[0], None, ())
    for token, row in zip(tokens[1:], expected, strict=False):
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=2e-4)
        assert [i for i, _ in token.top_logprobs] == row.topk(k).indices.tolist()
        assert [v for _, v in token.top_logprobs] == pytest.approx(row.topk(k).values.tolist(), abs=2e-4)


def as_numbers(tokens: Sequence[PromptToken]) -> list[float]:
    return [number for token in tokens[1:] for number in (token.logprob or 0.0, *(v for _, v in token.top_logprobs))]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt_projected"])
def test_they_are_those_of_the_librarys_own_forward(family: str) -> None:
    [prompt] = random_prompts(1, 150)
    with make_engine(family, max_batch_tokens=256) as engine:
        [answer] = engine.generate([prompt], params())
        [plain] = engine.generate([prompt], params(prompt_logprobs=None))
    check(answer.prompt_logprobs, prompt, tiny_model(family))
    assert plain.prompt_logprobs == ()
    assert all_ids([answer]) == all_ids([plain])


def test_each_row_lists_as_many_as_it_asks_for_and_its_mates_pay_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(4, 13)
    wanted = [params(prompt_logprobs=k, logprobs=2) for k in (None, 0, 20, None)]
    with make_engine() as engine:
        answers = engine.generate(prompts, wanted)
        monkeypatch.setattr(runner, "with_prompt_logprobs", None)  # nothing of it runs for rows that do not ask
        alone = engine.generate(prompts, params(prompt_logprobs=None, logprobs=2))
    assert [len(answer.prompt_logprobs) for answer in answers] == [0, 13, 13, 0]
    check(answers[1].prompt_logprobs, prompts[1], k=0)
    check(answers[2].prompt_logprobs, prompts[2], k=20)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_prompt_that_runs_in_chunks_has_every_token_once(budget: int) -> None:
    prompts = [random_prompts(1, length, seed=length)[0] for length in (1, 2, 7, 8, 9, 26)]
    with make_engine(max_batch_tokens=budget, max_rows=budget) as engine:
        answers = engine.generate(prompts, params())
    for answer, prompt in zip(answers, prompts, strict=True):
        check(answer.prompt_logprobs, prompt)


@pytest.mark.parametrize("mode", [FULL, VERIFIED, BOUNDED, FAST], ids=str)
def test_they_are_those_of_full_depth_in_every_mode(mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode fast with exits of prompts, too: the row's own prompt does not exit, its mate's does."""
    scored: list[int] = []
    propose = Exits.propose

    def watched(self: Exits, index: int, parts: Any, *args: Any, each: bool = False) -> Proposal:
        scored.extend([len(parts)] if each else [])
        return propose(self, index, parts, *args, each=each)

    monkeypatch.setattr(Exits, "propose", watched)
    prompts = [*random_prompts(2, 21), random_prompts(1, 1)[0]]
    wanted = [params(**mode), params(prompt_logprobs=None, **mode), params(**mode)]
    with Engine.from_parts(exit_parts(prompt_exits=True)) as engine:
        answers = engine.generate(prompts, wanted)
    for answer, prompt in zip((answers[0], answers[2]), (prompts[0], prompts[2]), strict=True):
        check(answer.prompt_logprobs, prompt, easy_model())
    assert scored == ([1] if mode is FAST else [])
    if mode in (VERIFIED, FAST):
        assert min(exit_layers(answers[0])) < 4, "its output still exits"


@pytest.mark.parametrize("num_steps", [1, 2, 4, 6])
@pytest.mark.parametrize("mode", [FULL, FAST], ids=str)
def test_a_preemption_leaves_no_token_out_and_gives_none_twice(mode: dict[str, Any], num_steps: int) -> None:
    """The prompt needs four steps: the row loses its blocks within it, at its end and while it decodes."""
    [prompt] = random_prompts(1, 29)
    parts = exit_parts(max_batch_tokens=8, block_size=4)
    engine = Engine.from_parts(parts)
    request = engine.make_request(prompt, params(max_tokens=12, **mode))
    engine.close()
    core, outputs = parts.core, []
    core.add(request)
    for _ in range(num_steps):
        outputs += core.step()
    [row] = core.scheduler.running
    core.scheduler._preempt(row)
    while core.has_work:
        outputs += core.step()
    first, *later = outputs
    check(first.prompt_logprobs, prompt, easy_model())
    assert not any(output.prompt_logprobs for output in later)
    assert outputs[-1].usage.num_preemptions == 1
    core.check_idle()


def test_they_are_whole_when_the_pool_is_too_small_for_all_rows() -> None:
    prompts = random_prompts(6, 10)
    parts = make_parts(block_size=4, max_batch_tokens=16)
    parts.core.scheduler.blocks = type(parts.core.scheduler.blocks)(12, 4)
    with Engine.from_parts(parts) as engine:
        answers = engine.generate(prompts, params(max_tokens=12))
        assert engine.stats().num_preemptions > 0
    for answer, prompt in zip(answers, prompts, strict=True):
        check(answer.prompt_logprobs, prompt)


def test_a_prompt_in_the_prefix_cache_runs_whole() -> None:
    [prompt] = random_prompts(1, 40)
    with make_engine() as engine:
        engine.generate([prompt], params(prompt_logprobs=None))
        [answer] = engine.generate([prompt], params())
        [after] = engine.generate([prompt], params(prompt_logprobs=None))
    check(answer.prompt_logprobs, prompt)
    assert (answer.usage.cached_tokens, after.usage.cached_tokens) == (0, 32)  # type: ignore[union-attr]


def test_logits_exist_for_a_few_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    [prompt] = random_prompts(1, 200)
    parts, sizes = make_parts(max_batch_tokens=256), []
    head = parts.runner.adapter.head
    monkeypatch.setattr(parts.runner.adapter, "head", lambda states: sizes.append(len(states)) or head(states))
    with Engine.from_parts(parts) as engine:
        [answer] = engine.generate([prompt], params(max_tokens=1))
    check(answer.prompt_logprobs, prompt)
    assert sorted(sizes) == [1, 199 % prompt_logprobs.MAX_TOKENS, *[prompt_logprobs.MAX_TOKENS] * 3]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Engines made from now on have graphs, of the kernels' twin: (first id, start) of the rows of each launch."""
    seen: dict[str, list[tuple[int, int]]] = {"cycles": [], "prompts": []}

    def count(kind: Any, name: str) -> None:
        start = kind.start

        def counted(self: Any, rows: Any, **how: Any) -> Any:
            seen[name] += [(row.request.prompt_ids[0], row.start) for row in rows]
            return start(self, rows, **how)

        monkeypatch.setattr(kind, "start", functools.wraps(start)(counted))

    count(GraphCycles, "cycles")
    count(GraphPrompts, "prompts")
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: engine_kernels())
    return seen


@pytest.mark.parametrize("mode", [FULL, VERIFIED], ids=str)
def test_graphs_decode_such_a_row_and_leave_its_prompt_to_the_plain_path(
    mode: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    prompts = [[20, *random_prompts(1, 20)[0]], [21], [22, *random_prompts(1, 20, seed=1)[0]], [23]]
    wanted = [params(max_tokens=12, prompt_logprobs=k, **mode) for k in (NUM_LIKELIEST, NUM_LIKELIEST, None, None)]
    with poisoned(exit_parts(kernels="reference")) as engine:
        plain = engine.generate(prompts, wanted)
    launched = request.getfixturevalue("launched")
    with poisoned(exit_parts()) as engine:
        answers = engine.generate(prompts, wanted)
    assert all_ids(answers) == all_ids(plain)
    for answer, other, prompt in zip(answers[:2], plain[:2], prompts[:2], strict=True):
        check(answer.prompt_logprobs, prompt, easy_model())
        assert as_numbers(answer.prompt_logprobs) == pytest.approx(as_numbers(other.prompt_logprobs), abs=1e-4)
    assert {first for first, _ in launched["prompts"]} == {22}
    assert {first for first, _ in launched["cycles"]} == {20, 21, 22, 23}
    assert all(start >= 21 for first, start in launched["cycles"] if first == 20)
    assert (21, 0) not in launched["cycles"]
    assert (23, 0) in launched["cycles"]


@pytest.mark.parametrize("stop", [(), ("never there",)], ids=["ids alone", "stop strings"])
def test_the_first_piece_has_them_and_no_other(stop: tuple[str, ...]) -> None:
    [prompt] = random_prompts(1, 20)
    with make_engine(max_batch_tokens=8) as engine:
        first, *later = engine.stream_blocking(prompt, params(stop=stop))
    check(first.prompt_logprobs, prompt)
    assert len(first.tokens) == 1
    assert later
    assert not any(output.prompt_logprobs for output in later)


def test_pieces_that_a_slow_reader_gets_as_one_keep_them() -> None:
    prompt = (PromptToken(5), PromptToken(6, -1.0))

    async def joined() -> RequestOutput:
        sink = AsyncSink(asyncio.get_running_loop())
        sink.put([RequestOutput("r", (TokenOutput(1, "a", 4),), prompt_logprobs=prompt)])
        sink.put([RequestOutput("r", (TokenOutput(2, "b", 4),), FinishReason.LENGTH)])
        return await sink.get()

    output = asyncio.run(joined())
    assert (output.prompt_logprobs, len(output.tokens), output.finish_reason) == (prompt, 2, FinishReason.LENGTH)


@pytest.mark.parametrize(("num_steps", "num_scored"), [(0, 0), (1, 9), (2, 17), (3, 20)])
def test_an_abort_gives_what_has_run(num_steps: int, num_scored: int) -> None:
    """Also where the first token is pending, which was decided and not emitted yet."""
    [prompt] = random_prompts(1, 20)
    core = make_parts(max_batch_tokens=8).core
    core.add(make_request(prompt, prompt_logprobs=NUM_LIKELIEST))
    for _ in range(num_steps):
        core.advance(lambda outputs: None)
    last = core.abort("r")
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT
    assert len(last.tokens) == (num_steps == 3)
    assert [token.token_id for token in last.prompt_logprobs] == prompt[:num_scored]
    if num_scored:
        check(last.prompt_logprobs, prompt[:num_scored])


def test_logits_that_are_not_finite_end_the_row_alone_with_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = random_prompts(2, 20)
    parts = make_parts(max_batch_tokens=8)
    compute = prompt_logprobs.prompt_logprobs

    def broken(logits: torch.Tensor, token_ids: Sequence[int], k: int) -> Any:
        return compute(logits * torch.nan if bad[12] in token_ids else logits, token_ids, k)

    monkeypatch.setattr(prompt_logprobs, "prompt_logprobs", broken)
    with Engine.from_parts(parts) as engine:
        mate, failed = engine.generate([good, bad], params())
    check(mate.prompt_logprobs, good)
    assert failed.finish_reason is FinishReason.ERROR
    assert "numerical_error" in str(failed.error)
    assert failed.tokens == ()
    assert [token.token_id for token in failed.prompt_logprobs] == bad[: len(failed.prompt_logprobs)]
    assert 0 < len(failed.prompt_logprobs) <= 12


@pytest.mark.parametrize("value", [-1, 21, True, 1.0, "3"])
def test_a_number_that_cannot_be_listed_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_logprobs.*an integer in 0\.\.20"):
        SamplingParams(prompt_logprobs=value)


def test_a_text_that_cannot_be_made_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    [prompt] = random_prompts(1, 20)

    def failing(self: TextStream, token_id: int) -> str:
        raise UnicodeError("no text")

    monkeypatch.setattr(TextStream, "push", failing)
    with make_engine() as engine:
        [answer] = engine.generate([prompt], params())
    assert "no text" in str(answer.error)
    check(answer.prompt_logprobs, prompt)
