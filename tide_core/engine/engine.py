"""The engine as users hold it: `generate`, `stream`, `abort`, `stats`.

with Engine("demo") as engine:
    for answer in engine.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(answer.text)
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tide_core import __version__
from tide_core.config import EngineConfig
from tide_core.engine.assemble import Parts, assemble, with_artefact
from tide_core.engine.loop import EngineLoop
from tide_core.engine.sinks import AnswerSink, AsyncSink, ThreadSink
from tide_core.errors import ConfigError, EngineBusyError, RequestError
from tide_core.exits.cost import DraftPlanner
from tide_core.request import (
    MODES,
    Chat,
    ExitPolicy,
    FinishReason,
    PromptToken,
    Request,
    RequestOutput,
    SamplingParams,
    TokenOutput,
    Usage,
)
from tide_core.stats import EngineStats, ModelFacts

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Chat
"""Text, token ids, or a chat: messages with `role` and `content`, or these with tools and options."""
Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or one for each."""

MAX_NAME_CHARS = 128
BUSY_S = 0.05
"""How long `generate` waits before it asks again for a place in a queue that others have filled."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one prompt."""

    request_id: str
    text: str
    tokens: tuple[TokenOutput, ...]
    finish_reason: FinishReason
    usage: Usage | None
    error: Exception | None = None
    prompt_logprobs: tuple[PromptToken, ...] = ()
    """Where they were asked for."""


class Engine:
    """A model, its KV pool and the thread that steps it."""

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        """`settings` are the fields of `EngineConfig`; an unknown one is refused by name."""
        self._start(assemble(EngineConfig.from_mapping({"model": model, **settings})))

    @classmethod
    def from_parts(cls, parts: Parts) -> Engine:
        """An engine over a core that is already built."""
        engine = cls.__new__(cls)
        engine._start(parts)
        return engine

    def _start(self, parts: Parts) -> None:
        self.config = config = parts.config
        self.max_model_len = parts.max_model_len
        self.model_name = parts.model_name
        self.tokenizer = parts.tokenizer
        self._parts = parts
        self._swapping = threading.Lock()
        self._loop = EngineLoop(parts.core, max_open=config.max_rows + config.max_queued)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[Completion]:
        """Answer all prompts, batched; answers in the order of the prompts. Parameters are for all, or one for each."""
        answers = dict(self.generate_as_completed(_as_list(prompts), params))
        return [answers[index] for index in range(len(answers))]

    def generate_as_completed(
        self, prompts: Sequence[Prompt], params: Params = None
    ) -> Iterator[tuple[int, Completion]]:
        """Answers with the index of their prompt, as they end. All prompts are checked before any is run.

        Leaving the loop early aborts what is still open."""
        parts, of_each = self._parts, zip(prompts, _for_each(prompts, params), strict=True)
        requests = [self._named(index, prompt, mine, parts) for index, (prompt, mine) in enumerate(of_each)]
        index_of = {request.request_id: index for index, request in enumerate(requests)}
        sink, still_open, num_taken = AnswerSink(), set[str](), 0
        try:
            while num_taken < len(requests) or still_open:
                patience = None
                if next_ones := requests[num_taken : num_taken + self.config.max_queued - len(still_open)]:
                    try:
                        taken = self._loop.submit(next_ones, sink, parts.core)
                    except EngineBusyError:
                        if not still_open:
                            raise
                        taken = 0
                    still_open.update(request.request_id for request in next_ones[:taken])
                    num_taken += taken
                    if taken < len(next_ones):
                        patience = BUSY_S  # others fill the queue
                ended = sink.get(patience)
                if ended is not None:
                    last, tokens = ended
                    still_open.remove(last.request_id)
                    yield index_of[last.request_id], _completion(last, tokens)
        finally:
            for request_id in still_open:
                self.abort(request_id)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        reserved: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come; the last one has a finish reason. Leaving the loop early aborts the request.

        `reserved`: the request uses one of the places that the caller reserved, so a full queue does not refuse it."""
        parts = self._parts
        request = await asyncio.to_thread(
            self._make_request, prompt, params or SamplingParams(), parts, request_id, cache_salt
        )
        sink = AsyncSink(asyncio.get_running_loop())
        self._loop.submit([request], sink, parts.core, reserved=reserved)
        finished = False
        try:
            while not finished:
                output = await sink.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(request.request_id)

    def reserve(self, wanted: int) -> int:
        """Reserve up to `wanted` of the `max_rows + max_queued` places for requests to come, one after another in each;
        returns how many. Raises EngineBusyError if none is free. The caller must `release` them."""
        return self._loop.reserve(wanted)

    def release(self, num_places: int) -> None:
        """Give reserved places back."""
        self._loop.release(num_places)

    def stream_blocking(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[RequestOutput]:
        """`stream` for a program without an event loop."""
        parts = self._parts
        request = self._make_request(prompt, params or SamplingParams(), parts, request_id)
        sink = ThreadSink()
        self._loop.submit([request], sink, parts.core)
        finished = False
        try:
            while not finished:
                output = sink.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever phase it is; False if no such request is open."""
        return self._loop.abort(_checked_name("request_id", request_id))

    def stats(self) -> EngineStats:
        core, blocks = self._parts.core, self._parts.core.scheduler.blocks
        num_running = core.scheduler.num_running
        planner = self._parts.planner
        return EngineStats(
            num_running=num_running,
            num_waiting=max(0, self._loop.num_open - num_running),
            num_finished=core.counters.num_finished,
            num_steps=core.counters.num_steps,
            num_prompt_tokens=core.counters.num_prompt_tokens,
            num_output_tokens=core.counters.num_output_tokens,
            num_preemptions=core.scheduler.num_preemptions,
            blocks_total=blocks.num_blocks,
            blocks_owned=blocks.num_owned,
            max_blocks_owned=core.counters.max_blocks_owned,
            kernels=self._parts.kernels.name,
            dead=self._loop.dead,
            last_step_age_s=time.monotonic() - self._loop.last_beat,
            artefact=self._parts.artefact_digest,
            exits=core.exits.summary(),
            audits=core.judge.snapshots(),
            judged=core.judge.totals.copy(),
            num_audits_dropped=core.judge.num_dropped,
            **({} if planner is None else _plan_stats(planner)),
        )

    def forget_audits(self) -> None:
        """Drop what audits of mode fast have found: an operator's way back after an alarm. Another artefact does so,
        too."""
        self._parts.core.judge.forget()

    @property
    def artefact_digest(self) -> str | None:
        """Of the exits in use; None without any."""
        return self._parts.artefact_digest

    @property
    def default_mode(self) -> str:
        """Of requests that name none."""
        return self._parts.default_mode

    def describe(self) -> ModelFacts:
        """What is served, for people and clients."""
        parts = self._parts
        adapter = parts.runner.adapter
        modes: tuple[str, ...] = ("full",)
        if parts.checkpoints or parts.suffix_drafts:
            modes = MODES if parts.checkpoints else ("full", "verified", "bounded")
        return ModelFacts(
            name=self.model_name,
            architecture=type(adapter.model).__name__,
            num_layers=adapter.num_layers,
            vocab_size=adapter.vocab_size,
            max_model_len=self.max_model_len,
            dtype=self.config.dtype,
            device=str(adapter.device),
            version=__version__,
            checkpoint_layers=tuple(checkpoint.layer for checkpoint in parts.checkpoints)
            if parts.fast is None
            else parts.fast.layers,
            modes=modes,
            artefact=parts.artefact_digest,
        )

    def check_params(self, params: SamplingParams) -> None:
        """Refuse what no request of this engine could be asked for, such as a mode it does not have."""
        _check_params(params, self._parts)

    def use_artefact(self, artefact: str, wanted: Callable[[str], SamplingParams] | None = None) -> None:
        """Take the exits of another folder, or `auto`, or `none`, for requests to come; open ones keep theirs.

        `wanted` gives parameters that must be possible with them, from the default mode with them. While requests of
        both are open, the KV pool exists twice. If the exits cannot be taken, all stays as it was."""
        with self._swapping:
            parts = self._parts
            if parts.source is None:
                raise ConfigError("artefact", artefact, "an engine that loaded its model itself")
            # Settings in force have the size of the first pool: `auto` would divide what it left.
            config = replace(self.config, artefact=artefact)
            fresh = with_artefact(config, parts.source, lambda: self._loop.step_lock)
            if wanted is not None:
                _check_params(wanted(fresh.default_mode), fresh)
            fresh.core.take_over_counts(parts.core)
            self._loop.use(fresh.core)
            self._parts, self.config = fresh, fresh.config

    def close(self) -> None:
        """Stop; open requests end with reason abort."""
        self._loop.close()

    def make_request(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, cache_salt: str = ""
    ) -> Request:
        """Check a prompt and its parameters against this model and pool; raises RequestError by field."""
        return self._make_request(prompt, params, self._parts, request_id, cache_salt)

    def prompt_ids(self, prompt: Prompt) -> Sequence[int]:
        """The ids that a prompt stands for."""
        return self._prompt_ids(prompt, self._parts.runner.adapter.vocab_size)

    def max_answer_tokens(self, num_prompt: int) -> int:
        """Most tokens that may follow a prompt of that length; below 1 if it is too long."""
        pool = self._parts.core.scheduler.blocks
        return min(self.max_model_len, pool.num_blocks * pool.block_size) - num_prompt

    def _make_request(
        self, prompt: Prompt, params: SamplingParams, parts: Parts, request_id: str | None, cache_salt: str = ""
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise RequestError("params", type(params).__name__, "SamplingParams")
        request_id = uuid.uuid4().hex if request_id is None else _checked_name("request_id", request_id)
        if cache_salt != "":
            _checked_name("cache_salt", cache_salt)
        adapter = parts.runner.adapter
        vocab_size = adapter.vocab_size
        params.check_ids(vocab_size)
        policy = self._policy(params, parts, cache_salt)
        prompt_ids = self._prompt_ids(prompt, vocab_size)
        self._check_length(len(prompt_ids), params.max_tokens)
        return Request(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            eos_ids=adapter.eos_ids,
            cache_salt=cache_salt,
            policy=policy,
            mask=None if params.grammar is None else parts.grammars.matcher(params.grammar),
        )

    def _policy(self, params: SamplingParams, parts: Parts, cache_salt: str) -> ExitPolicy:
        """The policy of a request. A contract of mode fast that was found broken for its tenant is served as
        verified."""
        policy = parts.policy(params)
        if policy.skips_layers and parts.core.judge.is_alarmed(cache_salt, policy.epsilon):
            policy = parts.policy(replace(params, mode="verified", epsilon=None, margin=None))
        return policy

    def _named(self, index: int, prompt: Prompt, params: SamplingParams, parts: Parts) -> Request:
        try:
            return self._make_request(prompt, params, parts, None)
        except RequestError as error:
            raise RequestError(f"prompts[{index}].{error.field}", error.value, error.expected) from error

    def _prompt_ids(self, prompt: Prompt, vocab_size: int) -> Sequence[int]:
        if not isinstance(prompt, (str, Sequence, Chat)) or isinstance(prompt, bytes) or not prompt:
            raise RequestError("prompt", prompt, "non-empty text, token ids, or chat messages")
        ids: Sequence[object]
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, Chat) or isinstance(prompt[0], Mapping):
            ids = self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        else:
            ids = prompt
        # Ids of the tokenizer are checked too: some have tokens that their model has no embedding for.
        for index, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise RequestError(f"prompt[{index}]", token_id, f"a token id in 0..{vocab_size - 1}")
        return ids  # type: ignore[return-value]

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        if num_prompt == 0:
            raise RequestError("prompt", "", "text of at least one token")
        pool = self._parts.core.scheduler.blocks
        for limit, what in (
            (self.max_model_len, "the model length"),
            (pool.num_blocks * pool.block_size, "the KV pool"),
        ):
            if num_prompt >= limit:
                raise RequestError("prompt", f"{num_prompt} tokens", f"fewer than {what} of {limit} tokens")
            if num_prompt + max_tokens > limit:
                expected = f"at most {limit - num_prompt}: {what} of {limit} tokens less {num_prompt} of the prompt"
                raise RequestError("max_tokens", max_tokens, expected)


def _check_params(params: SamplingParams, parts: Parts) -> None:
    """Refuse what no request to these parts could be asked for."""
    params.check_ids(parts.runner.adapter.vocab_size)
    parts.policy(params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or many: a string, a list of ids or a list of messages is one."""
    if isinstance(prompts, (str, Chat)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError("prompts", type(prompts).__name__, "text, token ids, messages, or a list of these")
    if prompts and isinstance(prompts[0], (int, Mapping)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _for_each(prompts: Sequence[Prompt], params: Params) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError("params", f"{len(params)} of them", f"one, or one for each of the {len(prompts)} prompts")
    return params


def _plan_stats(planner: DraftPlanner) -> dict[str, Any]:
    return {
        "predicted_gain": planner.last.gain,
        "num_plans": planner.num_plans,
        "num_full_plans": planner.num_full,
    }


def _checked_name(field: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME_CHARS or not value.isprintable():
        raise RequestError(field, value, f"1..{MAX_NAME_CHARS} printable characters")
    return value


def _completion(output: RequestOutput, tokens: tuple[TokenOutput, ...]) -> Completion:
    assert output.finish_reason is not None
    text = "".join(token.text for token in tokens)
    ended = output.finish_reason, output.usage, output.error
    return Completion(output.request_id, text, tokens, *ended, output.prompt_logprobs)
