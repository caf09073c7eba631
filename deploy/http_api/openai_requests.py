"""Request bodies over HTTP: OpenAI's fields, vLLM's extra fields and TIDE's own. No server here.

Values are not coerced. `ignored_fields.py` drops fields that change nothing before a body is checked; a field that
would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from deploy.http_api.chat_fields import ChatPrompt, Message
from deploy.http_api.ignored_fields import Body
from deploy.http_api.structured_fields import StructuredFields
from tide_core.errors import RequestError
from tide_core.request import Chat

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions. A chat's default is the server's limit."""
DEFAULT_TEMPERATURE = 1.0
MAX_COMPLETION_LOGPROBS = 20


class TideOptions(Body):
    """TIDE's own options. A misspelt one is refused: nobody else sends them, and it would be another contract."""

    closed: ClassVar[bool] = True

    mode: Literal["full", "verified", "bounded", "fast"] | None = None
    """The contract; default: the server's policy."""
    epsilon: float | None = None
    """For bounded: most tokens of the answer that full depth would not have chosen, as a share (0.05)."""
    margin: float | None = None
    """For bounded: how many nats less likely such a token may be than full depth's choice (0.2)."""
    threshold: float | None = None
    """Not for full: least score at which a token exits. Above 1 none does."""
    min_layers: int | None = None
    """No exit before this many layers."""
    exit_layers: bool = False
    """Return the exit layer of each token."""
    tokens: bool = False
    """Return id, text, exit layer, score, audit and gap of each token."""
    timeout_s: float | None = None
    """Seconds until the request ends with status 408."""


class StreamOptions(Body):
    unread: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """End the stream with a chunk that has the usage."""
    continuous_usage_stats: bool = False
    """With `include_usage`: every chunk has the usage so far."""


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Sampling(StructuredFields):
    """Fields of both kinds of completion. `SamplingParams` checks their ranges."""

    unread: ClassVar[frozenset[str]] = frozenset(
        {
            *("metadata", "store", "service_tier", "user", "safety_identifier", "prompt_cache_key"),
            *("prompt_cache_options", "prompt_cache_retention", "priority"),
            *("parallel_tool_calls", "reasoning_effort", "verbosity"),
            *("guided_decoding_backend", "guided_whitespace_pattern"),
        }
    )
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {"bad_words": ([],), "use_beam_search": (False,)}
    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"moderation", "bad_words", "allowed_token_ids", "use_beam_search", "logits_processors"}
    )

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_one_or_many)] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    """Choices of each prompt."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Extensions with vLLM's names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    """Most tokens of the prompt, its last ones; -1: as many as leave place for the answer."""
    stop_token_ids: list[int] | None = None
    tide: TideOptions | None = None

    @property
    def options(self) -> TideOptions:
        return self.tide or TideOptions()

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def usage_options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the reply counts or has the ids of the prompt."""
        return self.usage_options.continuous_usage_stats

    def params(self) -> dict[str, Any]:
        """Fields of `SamplingParams`; None for the server's default."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "a value", "stream: true as well")
        options = self.options
        return {
            "max_tokens": self.max_tokens,
            "temperature": DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM's older way to keep all
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": None if self.stop is None else tuple(self.stop),
            "stop_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "grammar": self.grammar,
            "logit_bias": None if self.logit_bias is None else _bias(self.logit_bias),
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "mode": options.mode,
            "epsilon": options.epsilon,
            "margin": options.margin,
            "threshold": options.threshold,
            "min_layers": options.min_layers,
        }


class Generation(Sampling):
    """Fields of both kinds of completion that show ids and the prompt."""

    prompt_logprobs: int | None = None
    """Return the log-probability of each token of the prompt, and of so many likeliest ones."""
    return_token_ids: bool | None = None
    """Return the ids of prompt and answer."""

    @property
    def needs_prompt_ids(self) -> bool:
        return bool(self.return_token_ids) or super().needs_prompt_ids

    def params(self) -> dict[str, Any]:
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs", self.prompt_logprobs, "stream: false with it")
        return {**super().params(), "prompt_logprobs": self.prompt_logprobs}


class CompletionRequest(Generation):
    """Body of POST /v1/completions."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **Sampling.neutral,
        "best_of": (1,),
        "suffix": ("",),
    }
    unsupported: ClassVar[frozenset[str]] = Sampling.unsupported | {"prompt_embeds"}

    prompt: str | list[int] | list[str] | list[list[int]]
    """Text or token ids, or a list of either."""
    logprobs: int | None = None
    echo: bool | None = None
    """Return the prompt before the answer, with its log-probabilities if `logprobs` is given."""

    @property
    def engine_prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt", "an empty list", "text or token ids, or a list of either")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def drops_output(self) -> bool:
        """Whether only the prompt is wanted: no token is allowed after it."""
        return bool(self.echo and self.max_tokens == 0)

    def params(self) -> dict[str, Any]:
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_COMPLETION_LOGPROBS:
            raise RequestError("logprobs", self.logprobs, f"an integer in 0..{MAX_COMPLETION_LOGPROBS}")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise RequestError("truncate_prompt_tokens", self.truncate_prompt_tokens, "no echo with it")
        scored = self.logprobs if self.echo else None
        if None not in (scored, self.prompt_logprobs) and scored != self.prompt_logprobs:
            raise RequestError("prompt_logprobs", self.prompt_logprobs, f"{scored}, as logprobs with echo")
        most = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        # The engine has no request without a token: one is made and dropped.
        return {
            **super().params(),
            "max_tokens": 1 if self.drops_output else most,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs if scored is None else scored,
        }


class ChatRequest(ChatPrompt, Generation):
    """Body of POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        **Sampling.neutral,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "documents": ([],),
    }
    unsupported: ClassVar[frozenset[str]] = Sampling.unsupported | {
        *("audio", "prediction", "web_search_options", "chat_template", "documents")
    }

    messages: list[Message] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = None
    """Goes before `max_tokens`, its older name."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def chat(self) -> Chat:
        return self.chat_of(self.messages)

    def params(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs", self.top_logprobs, "logprobs: true as well")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {**super().params(), "max_tokens": most, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class TokenizeRequest(ChatPrompt):
    """Body of POST /tokenize: exactly one of `prompt` and `messages`. The fields of a chat change its prompt as they do
    in a chat."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"chat_template"})

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=1000)
    add_special_tokens: bool | None = None
    """Whether a prompt begins with the beginning-of-text id, if the tokenizer puts one there; default true. Where it is
    false, the text of one special token alone, such as the `eos_token` of /tokenizer_info, gives its id."""
    return_token_strs: bool | None = None
    """Return the text of each token, too."""

    @property
    def engine_prompt(self) -> str | Chat:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "neither" if self.prompt is None else "both", "one of prompt and messages")
        if self.prompt is not None:
            return self.prompt
        return self.chat_of(self.messages or ())


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for name, value in given.items():
        if not name.isascii() or not name.isdigit() or len(name) > 9:
            raise RequestError("logit_bias", name, "token ids as keys")
        bias[int(name)] = value
    return bias
