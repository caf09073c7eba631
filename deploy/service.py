"""The operations of the server over one engine. The HTTP and gRPC APIs translate to and from them.

A request: the caller's key → policy and limits → the engine → outputs until its end → metrics and a log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from deploy.answer import CALLER, DEADLINE, Answer, Call, checked_id
from deploy.config.args import Limits
from deploy.config.policy import LivePolicy
from deploy.failures import NotServedError, QuotaError
from deploy.keys import Caller, KeyRing
from deploy.quota import Quotas
from tide_core.errors import ConfigError, EngineDeadError, RequestError
from tide_core.request import Chat, FinishReason, RequestOutput, SamplingParams, Usage

if TYPE_CHECKING:
    from tide_core.engine.engine import Engine, Prompt

ABORT_AGAIN_S = 0.05


class Observer(Protocol):
    """Observes requests, such as the metrics."""

    def on_output(self, answer: Answer, output: RequestOutput) -> None: ...

    def on_end(self, answer: Answer, reason: str) -> None: ...

    def on_ignored_fields(self, count: int) -> None: ...


class Service:
    """One engine, the policy in force, and the open requests."""

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        other_names: Sequence[str] = (),
        limits: Limits | None = None,
        keys: KeyRing | None = None,
        policy: LivePolicy | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.engine, self.model = engine, model
        self.names = (model, *other_names)
        """The names by which requests may ask for the model; answers have the first."""
        self.limits = limits or Limits()
        self.keys = keys or KeyRing()
        self.policy = policy or LivePolicy()
        self.policy_refused: str | None = None
        """Why the policy that was deployed last is not the one in force, if it is not."""
        self.abort_elsewhere: Callable[[str, str], Awaitable[bool]] | None = None
        """Asks the other replicas to abort a request, by its caller's name and its id."""
        self._observer = observer
        self._own_artefact = engine.config.artefact
        self._by_id: dict[tuple[str, str], Sequence[Answer]] = {}
        """The answers of each request that has not ended, by its caller's name and its id."""
        self._open: dict[str, Answer] = {}
        """The answers that run, by their engine id."""
        self._open_lock = threading.Lock()
        """Held where `_open` changes, and where another thread reads it."""
        self._quotas = Quotas()

    def begin(self, call: Call, caller: Caller) -> Answer:
        """Check a call. Nothing runs before `outputs` is read."""
        self.check_model(call.model)
        given = {**call.params, "max_tokens": self.limits.max_tokens} if call.fill_context else call.params
        params = self.policy.params(given, caller, self.natural_mode)
        self.limits.check(params)
        self.check_size(call.prompt)
        if call.keep_last is not None and call.keep_last < 1 and call.keep_last != -1:
            raise RequestError("truncate_prompt_tokens", call.keep_last, "a number of tokens, or -1")
        engine_id = uuid.uuid4().hex
        return Answer(
            request_id=engine_id if call.request_id is None else checked_id(call.request_id),
            engine_id=engine_id,
            caller=caller,
            params=params,
            prompt=call.prompt,
            timeout_s=self.limits.timeout_s(call.timeout_s),
            fill_context=call.fill_context,
            count_prompt=call.count_prompt,
            keep_last=call.keep_last,
        )

    def check_model(self, name: str | None) -> None:
        """Refuse a request for a model that is not served; None asks for whatever is."""
        if name is not None and name not in self.names:
            raise NotServedError("model", name, " or ".join(self.names))

    @contextlib.contextmanager
    def held(self, answers: Sequence[Answer]) -> Iterator[None]:
        """Hold the id of one request while its answers run; raises if another open request of the caller has it.
        `abort` then ends all of them, also those that have not begun."""
        name = (answers[0].caller.name, answers[0].request_id)
        if name in self._by_id:
            raise RequestError("request_id", name[1], "one that none of your open requests has")
        self._by_id[name] = answers
        try:
            yield
        finally:
            del self._by_id[name]

    def enter(self, caller: Caller, wanted: int, num_requests: int) -> int:
        """Take up to `wanted` places in the engine and of the caller's key for answers to come; returns how many, or
        raises if there is none. `leave` gives them back."""
        num_places = self.engine.reserve(wanted)
        allowed = 0
        try:
            allowed = self._quotas.enter(caller, num_places, num_requests)
        finally:
            self.engine.release(num_places - allowed)
        return allowed

    def leave(self, caller: Caller, num_places: int) -> None:
        self.engine.release(num_places)
        self._quotas.leave(caller, num_places)

    async def outputs(self, answer: Answer, *, in_place: bool = False) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one answer, the last one with a finish reason; or an error. `in_place`: it uses a place that
        was taken before.

        Closing the generator aborts the answer."""
        with contextlib.ExitStack() as stack:
            known = self._by_id.get((answer.caller.name, answer.request_id), ())
            if not any(one is answer for one in known):
                stack.enter_context(self.held([answer]))
            if answer.ended_by == CALLER:  # before it began
                self._end(answer, FinishReason.ABORT.value)
                yield RequestOutput(answer.engine_id, (), FinishReason.ABORT, Usage(0, 0))
                return
            if not in_place:
                try:
                    self._quotas.enter(answer.caller)
                except QuotaError as error:
                    self.refused(answer, error)
                    raise
                stack.callback(self._quotas.leave, answer.caller)
            with self._open_lock:
                self._open[answer.engine_id] = answer
            loop = asyncio.get_running_loop()
            left_s = answer.started_at + answer.timeout_s - time.monotonic()  # a choice may start after others
            timer = loop.call_later(max(left_s, 0.0), self._expire, answer)
            reason = "cancelled"
            try:
                if answer.fill_context or answer.count_prompt or answer.keep_last is not None:
                    await self._encode(answer)
                if answer.params.mode != "full":
                    answer.artefact = self.engine.artefact_digest  # of the exits that this stream starts with
                stream = self.engine.stream(
                    answer.prompt,
                    answer.params,
                    request_id=answer.engine_id,
                    cache_salt=answer.caller.salt,
                    reserved=in_place,
                )
                async with contextlib.aclosing(stream):
                    async for output in stream:
                        answer.raise_if_failed(output)
                        self._record(answer, output)
                        if output.finish_reason is not None:
                            reason = output.finish_reason.value
                        yield output
            except Exception as error:
                reason = type(error).__name__
                raise
            finally:
                timer.cancel()
                answer.ended_by = answer.ended_by or "end"  # a timer callback that is already queued does nothing
                with self._open_lock:
                    del self._open[answer.engine_id]
                self._end(answer, reason)

    def refused(self, answer: Answer, error: Exception) -> None:
        """An answer ended before it began."""
        self._end(answer, type(error).__name__)

    def _end(self, answer: Answer, reason: str) -> None:
        if self._observer is not None:
            self._observer.on_end(answer, reason)
        answer.log_end(reason)

    def note_ignored(self, count: int) -> None:
        """A body had fields that nobody knows."""
        if self._observer is not None:
            self._observer.on_ignored_fields(count)

    async def whole(self, answer: Answer) -> list[RequestOutput]:
        async with contextlib.aclosing(self.outputs(answer)) as outputs:
            return [output async for output in outputs]

    def abort(self, request_id: str, caller: Caller) -> bool:
        """Abort a request of this caller, with all its choices; False if there is none with this id."""
        return self.abort_of(caller.name, checked_id(request_id))

    def abort_of(self, caller_name: str, request_id: str) -> bool:
        answers = self._by_id.get((caller_name, request_id), ())
        for answer in answers:
            answer.ended_by = answer.ended_by or CALLER
            self._abort(answer)
        return bool(answers)

    async def abort_anywhere(self, request_id: str, caller: Caller) -> bool:
        """The same, whichever replica has the request."""
        if self.abort(request_id, caller):
            return True
        return self.abort_elsewhere is not None and await self.abort_elsewhere(caller.name, request_id)

    @property
    def natural_mode(self) -> str:
        """Of requests for which neither client nor policy names one."""
        return self.engine.default_mode

    def modes_for(self, caller: Caller) -> list[str]:
        """The modes that this caller may use."""
        return [mode for mode in self.engine.describe().modes if mode in self.policy.modes and mode in caller.modes]

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def tokens_in_flight(self) -> int:
        """Most tokens that open requests may still generate."""
        return sum(answer.params.max_tokens - answer.num_tokens for answer in self._answers())

    @property
    def longest_wait_s(self) -> float:
        """How long the oldest of the requests that have no token yet has waited; 0 if all have one."""
        started = [answer.started_at for answer in self._answers() if answer.first_at is None]
        return max(0.0, time.monotonic() - min(started)) if started else 0.0

    def _answers(self) -> list[Answer]:
        """The open requests, from any thread."""
        with self._open_lock:
            return list(self._open.values())

    def check_size(self, prompt: Prompt) -> None:
        """Refuse text that cannot fit in the context whatever its tokens are, before time is spent on finding them."""
        messages = prompt.messages if isinstance(prompt, Chat) else prompt
        if isinstance(prompt, str):
            num_chars = len(prompt)
        elif messages and isinstance(messages[0], Mapping):
            written = [
                (each["content"], each.get("tool_calls")) for each in cast(Sequence[Mapping[str, Any]], messages)
            ]
            num_chars = _num_chars([written, prompt.tools if isinstance(prompt, Chat) else ()])
        else:
            return  # token ids
        tokens, per_token = self.engine.max_answer_tokens(0), self.engine.tokenizer.max_token_chars
        if num_chars > tokens * per_token:
            expected = f"at most {tokens * per_token}: {tokens} tokens of at most {per_token} characters each"
            raise RequestError("prompt", f"{num_chars} characters", expected)

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        self.check_size(prompt)
        if isinstance(prompt, str) and not add_special_tokens:
            return await asyncio.to_thread(self.engine.tokenizer.encode, prompt, add_special_tokens=False)
        return list(await asyncio.to_thread(self.engine.prompt_ids, prompt))

    async def text_of(self, prompt: str | list[int]) -> str:
        """The text of a prompt, for an echo."""
        return prompt if isinstance(prompt, str) else await self.detokenize(prompt)

    async def detokenize(self, ids: list[int]) -> str:
        return await asyncio.to_thread(self.engine.tokenizer.decode, ids)

    async def apply(self, policy: LivePolicy) -> None:
        """Apply a policy to new requests; if it is bad, nothing changes. It is checked against the exits that it names
        before they replace those in use."""
        wanted = self._own_artefact if policy.artefact is None else policy.artefact

        def default_params(natural_mode: str) -> SamplingParams:
            return policy.params({}, Caller(), natural_mode)

        try:
            if wanted != self.engine.config.artefact:
                await asyncio.to_thread(self.engine.use_artefact, wanted, default_params)
            else:
                self.engine.check_params(default_params(self.natural_mode))
        except RequestError as error:
            raise ConfigError(f"user_config.{error.field}", error.value, error.expected) from error
        if policy.audit_epoch != self.policy.audit_epoch:
            self.engine.forget_audits()
        self.policy = policy

    def check(self) -> None:
        """Raise if the engine is dead, or has work and has ended no step for too long."""
        stats = self.engine.stats()
        if stats.dead:
            raise EngineDeadError("the engine loop has stopped")
        if stats.last_step_age_s > self.limits.stuck_after_s:
            raise EngineDeadError(f"no engine step has ended for {stats.last_step_age_s:.0f} s")

    async def _encode(self, answer: Answer) -> None:
        """Encode and count the prompt; where asked for, keep its end alone, and set `max_tokens` to what fits in the
        context after it, up to the limit."""
        ids = await self.tokenize(answer.prompt)
        if answer.keep_last is not None:
            longest = self.engine.max_answer_tokens(1 if answer.fill_context else answer.params.max_tokens)
            ids = ids[-(max(1, longest) if answer.keep_last == -1 else answer.keep_last) :]
        answer.prompt, answer.num_prompt_tokens = ids, len(ids)
        if answer.fill_context:
            most = max(1, min(self.limits.max_tokens, self.engine.max_answer_tokens(len(ids))))
            answer.params = replace(answer.params, max_tokens=most)

    def _record(self, answer: Answer, output: RequestOutput) -> None:
        if self._observer is not None:
            self._observer.on_output(answer, output)
        answer.record(output)
        prompt = 0 if output.usage is None else output.usage.prompt_tokens
        self._quotas.spend(answer.caller, len(output.tokens) + prompt)

    def _expire(self, answer: Answer) -> None:
        """Abort a request that reached its deadline."""
        if answer.ended_by is None:
            answer.ended_by = DEADLINE
            self._abort(answer)

    def _abort(self, answer: Answer) -> None:
        """Abort an open request; retry a little later if the engine does not have it yet."""
        if answer.engine_id in self._open and not self.engine.abort(answer.engine_id):
            asyncio.get_running_loop().call_later(ABORT_AGAIN_S, self._abort, answer)


def _num_chars(value: object) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 0
