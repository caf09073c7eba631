"""Replies over HTTP: OpenAI's objects and events with TIDE's extra fields. No server here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from deploy.answer import Answer
from deploy.http_api.openai_requests import StreamOptions, TideOptions
from deploy.http_api.reply_objects import finite, logprob_object, tide_object, token_counts, token_name
from deploy.tools.call_parser import ToolParser
from tide_core.request import PromptToken, RequestOutput, TokenOutput, Usage

if TYPE_CHECKING:
    from tide_core.outputs.text import TextStream


class TokenTexts(Protocol):
    """What replies need of the tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def stream(self, prompt_ids: Sequence[int]) -> TextStream: ...


@dataclass(frozen=True, slots=True)
class Shown:
    """What a reply has besides OpenAI's fields, under vLLM's names."""

    token_ids: bool = False
    """Ids of prompt and answer."""
    prompt_logprobs: bool = False


@dataclass(slots=True)
class Choice:
    """Writes one answer as a choice of a completion."""

    answer: Answer
    tokenizer: TokenTexts
    index: int = 0
    prompt_text: str | None = None
    """Comes before the answer, where the client asked for an echo."""
    drops_output: bool = False
    """Whether the client asked for no token, only for the prompt."""
    shown: Shown = Shown()
    num_chars: int = 0
    """Characters of text written so far, for the offsets of completions."""
    num_tokens: int = 0
    """Tokens written so far."""
    usage: Usage | None = None
    """Known from the last output on."""
    echoes: bool = False
    """Whether the text begins with the prompt."""
    _began: bool = False

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer as one object."""
        tokens = self._taken(outputs)
        return self._object(self._with_prompt(_text(tokens)), tokens, outputs, _reason(outputs[-1]))

    def first_chunks(self) -> list[dict[str, Any]]:
        """Chunks before the first token of a stream."""
        return []

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """One output of a streamed answer, in one piece or more; the last piece of the answer has the finish reason."""
        tokens = self._taken([output])
        return [self._object(self._with_prompt(_text(tokens)), tokens, [output], _reason(output))]

    def _taken(self, outputs: Sequence[RequestOutput]) -> list[TokenOutput]:
        """The tokens of outputs, counted."""
        self.usage = outputs[-1].usage
        tokens = [] if self.drops_output else [token for output in outputs for token in output.tokens]
        self.num_tokens += len(tokens)
        return tokens

    def _with_prompt(self, text: str) -> str:
        """The text, the first time after the prompt."""
        if self.prompt_text is not None:
            self.echoes = True
        prompt, self.prompt_text = self.prompt_text or "", None
        return prompt + text

    def _object(
        self, text: str, tokens: Sequence[TokenOutput], outputs: Sequence[RequestOutput], reason: str | None
    ) -> dict[str, Any]:
        prompt = [token for output in outputs for token in output.prompt_logprobs]
        logprobs = self._lists(prompt if self.echoes else (), tokens)
        choice = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        fields = {} if self._began else self.prompt_fields(outputs)
        self._began = True
        return choice | self.id_fields(tokens) | fields

    def prompt_fields(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Ids and log-probabilities of the prompt, where they were asked for."""
        fields: dict[str, Any] = {}
        if self.shown.token_ids:
            fields["prompt_token_ids"] = self.answer.prompt  # encoded before the first output
        if self.shown.prompt_logprobs:
            tokens = [token for output in outputs for token in output.prompt_logprobs]
            fields["prompt_logprobs"] = [self._candidates(token) for token in tokens]
        return fields

    def id_fields(self, tokens: Sequence[TokenOutput]) -> dict[str, Any]:
        return {"token_ids": [token.token_id for token in tokens]} if self.shown.token_ids else {}

    def _candidates(self, token: PromptToken) -> dict[str, Any] | None:
        """As vLLM writes a token of the prompt: its log-probability and those of the likeliest, by id. Only the
        likeliest have a rank."""
        if token.logprob is None:
            return None
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top_logprobs, 1)}
        found = {token.token_id: token.logprob, **dict(token.top_logprobs)}
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": ranks.get(token_id),
                "decoded_token": self._name(token_id),
            }
            for token_id, logprob in found.items()
        }

    def _lists(self, prompt: Sequence[PromptToken], tokens: Sequence[TokenOutput]) -> dict[str, Any] | None:
        """Log-probabilities of the echoed prompt and of the answer, in columns."""
        if self.answer.params.logprobs is None:
            return None
        stream, offsets = self.tokenizer.stream(()) if prompt else None, []
        lengths = [] if stream is None else [len(stream.push(token.token_id)) for token in prompt]
        for length in (*lengths, *(len(token.text) for token in tokens)):
            offsets.append(self.num_chars)
            self.num_chars += length
        both: list[PromptToken | TokenOutput] = [*prompt, *tokens]
        return {
            "tokens": [self._name(token.token_id) for token in both],
            "token_logprobs": [finite(token.logprob) for token in both],
            "top_logprobs": [
                {self._name(token_id): logprob for token_id, logprob in token.top_logprobs} or None for token in both
            ],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        return token_name(self.tokenizer.token_bytes(token_id))


@dataclass(slots=True)
class ChatChoice(Choice):
    """Writes one answer as a choice of a chat."""

    parser: ToolParser | None = None
    """Looks for tool calls in the answer."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        tokens, reason = self._taken(outputs), _reason(outputs[-1])
        message: dict[str, Any] = {"role": "assistant", "content": _text(tokens), "refusal": None}
        if self.parser is not None:
            read = self.parser.whole(_text(tokens))
            message["content"] = read.content
            if read.calls:
                message |= {"content": read.content or None, "tool_calls": read.calls}
        return self._choice("message", message, tokens, self._ended(reason))

    def first_chunks(self) -> list[dict[str, Any]]:
        return [self._choice("delta", {"role": "assistant", "content": ""}, None, None)]

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        tokens, reason = self._taken([output]), _reason(output)
        text = _text(tokens)
        if self.parser is None:
            return [self._choice("delta", {"content": text} if text or reason is None else {}, tokens, reason)]
        deltas = [*self.parser.feed(text), *(self.parser.finish() if reason is not None else ())]
        values: list[dict[str, Any]] = [
            {"content": delta} if isinstance(delta, str) else {"tool_calls": [delta.chunk()]} for delta in deltas
        ]
        *earlier, last = values or [{}]  # text that may become a call is held back
        pieces = [self._choice("delta", value, None, None) for value in earlier]
        return [*pieces, self._choice("delta", last, tokens, self._ended(reason))]

    def _ended(self, reason: str | None) -> str | None:
        return reason if self.parser is None or reason is None else self.parser.finish_reason(reason)

    def _choice(
        self, kind: str, value: dict[str, Any], tokens: Sequence[TokenOutput] | None, reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if tokens is None else self._logprobs(tokens)
        choice = {"index": self.index, kind: value, "logprobs": logprobs, "finish_reason": reason}
        return choice if tokens is None else choice | self.id_fields(tokens)

    def _logprobs(self, tokens: Sequence[TokenOutput]) -> dict[str, Any] | None:
        if self.answer.params.logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._logprob(token.token_id, token.logprob),
                    "top_logprobs": [self._logprob(*top) for top in token.top_logprobs],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _logprob(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        return logprob_object(self.tokenizer.token_bytes(token_id), logprob)


@dataclass(slots=True)
class CompletionReply:
    """Writes the choices of one request as OpenAI objects."""

    choices: Sequence[Choice]
    model: str
    options: TideOptions
    n: int = 1
    """Choices of each prompt."""
    usage_options: StreamOptions = field(default_factory=StreamOptions)
    """Whether the stream ends in a chunk with the usage; then every other chunk has `usage: null`, or the usage so
    far."""
    created: int = field(default_factory=lambda: int(time.time()))

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def whole(self, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        """The answers to a request as one object; `tide` is in each choice if there are several."""
        written = [choice.whole(mine) for choice, mine in zip(self.choices, outputs, strict=True)]
        reply = self._object(self.object_name, written)
        if (usage := self.usage()) is not None:
            reply["usage"] = usage
        for choice, mine, place in zip(self.choices, outputs, written, strict=True):
            tokens = [token for output in mine for token in output.tokens]
            self._add_tide(reply if len(written) == 1 else place, choice, tokens, mine[-1])
        return reply

    def first_chunks(self) -> list[dict[str, Any]]:
        """Chunks before the first token of a stream."""
        first = [chunk for choice in self.choices for chunk in choice.first_chunks()]
        return [self._with_usage(self._object(self.chunk_name, [chunk])) for chunk in first]

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The chunks of one output of a streamed answer."""
        choice = self.choices[index]
        chunks = [self._with_usage(self._object(self.chunk_name, [piece])) for piece in choice.chunks(output)]
        self._add_tide(chunks[-1], choice, output.tokens, output)
        return chunks

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add the usage so far, or null, to a chunk that is not the last."""
        options = self.usage_options
        if options.include_usage:
            prompt = sum(choice.answer.num_prompt_tokens or 0 for choice in self.choices[:: self.n])
            output = sum(choice.num_tokens for choice in self.choices)
            chunk["usage"] = token_counts(prompt, output) if options.continuous_usage_stats else None
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._object(self.chunk_name, []), "usage": self.usage()}

    def usage(self) -> dict[str, Any] | None:
        """The tokens of all choices; each prompt counts once."""
        ended = [choice.usage for choice in self.choices if choice.usage is not None]
        if len(ended) < len(self.choices):
            return None
        first = ended[:: self.n]
        counts = token_counts(
            sum(usage.prompt_tokens for usage in first),
            sum(choice.num_tokens for choice in self.choices),
        )
        return {**counts, "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in first)}}

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.choices[0].answer.engine_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _add_tide(
        self, place: dict[str, Any], choice: Choice, tokens: Sequence[TokenOutput], output: RequestOutput
    ) -> None:
        """Add the requested fields of each token, and to the last chunk of a choice the totals of its answer."""
        usage = None if output.finish_reason is None else output.usage
        if tide := tide_object(self.options, choice.answer, tokens, usage):
            place["tide"] = tide


class ChatReply(CompletionReply):
    """Writes the choices of one request as OpenAI chat objects."""

    id_prefix = "chatcmpl"
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def whole(self, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        return super().whole(outputs) | self.choices[0].prompt_fields(outputs[0])

    def first_chunks(self) -> list[dict[str, Any]]:
        first, *others = super().first_chunks()
        return [first | self.choices[0].prompt_fields(()), *others]


def _reason(output: RequestOutput) -> str | None:
    return None if output.finish_reason is None else output.finish_reason.value


def _text(tokens: Sequence[TokenOutput]) -> str:
    return "".join(token.text for token in tokens)
