"""What a request is and what comes back for it. No torch here: these types cross every layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from tide_core.errors import RequestError

MODES = ("full", "verified", "bounded", "fast")
GRAMMARS = ("json_schema", "regex", "choice", "grammar", "lark")
DEFAULT_EPSILON, DEFAULT_MARGIN = 0.05, 0.2
MAX_THRESHOLD = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_GRAMMAR_CHARS = 2**18


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's chat template writes."""

    messages: Sequence[Mapping[str, Any]]
    """Objects with `role` and `content`; where the template knows them also `tool_calls`, `tool_call_id`, `name`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the model may call, as OpenAI writes them."""
    add_generation_prompt: bool = True
    """End where the assistant's answer begins."""
    continue_final_message: bool = False
    """End inside the last message, which the answer continues."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must be. The engine compiles it when the request is made."""

    kind: str
    """json_schema, regex, choice (a JSON list of texts), lark, or grammar (Lark or GBNF)."""
    text: str
    field: str = field(default="grammar", compare=False)
    """The field of the request that it came from, for errors."""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise RequestError("grammar", self.kind, f"one of {', '.join(GRAMMARS)}")
        if not isinstance(self.text, str) or not 1 <= len(self.text) <= MAX_GRAMMAR_CHARS:
            raise RequestError(self.field, f"{len(self.text)} characters", f"1..{MAX_GRAMMAR_CHARS}")


class TokenMask(Protocol):
    """A grammar while it is followed."""

    masked_at: int
    """The number of output tokens after which none of the likeliest tokens fits; -1 if that has not been seen."""
    misfits: float
    """Share of the latest tokens that full depth chose and that did not fit."""

    def allowed(self, output_ids: Sequence[int]) -> Any:
        """Which tokens may follow these: an array [V] of booleans."""
        ...

    def write(self, output_ids: Sequence[int], words: Any, drafts: Sequence[int] = ()) -> None:
        """What may follow these and some drafts as bits, the first token in the lowest one, into an array of
        [ceil(V / 32)] 32-bit words. A list that is given again may only have grown."""
        ...

    def num_allowed(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """How many of `token_ids` may follow one after another, before the end of the text."""
        ...

    def num_fitting(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """How many of `token_ids` may follow one after another, the end of the text included."""
        ...

    def must_end(self, output_ids: Sequence[int]) -> bool:
        """Whether nothing but the end of the text may follow."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. Checked at birth; ids are checked against the model by the engine."""

    max_tokens: int = 128
    """Most tokens to generate."""
    min_tokens: int = 0
    """Fewest tokens before an end-of-text or stop id may be chosen."""
    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtract once from the logit of every token already generated."""
    frequency_penalty: float = 0.0
    """Subtract from the logit of a token for each time it was generated."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a number added to its logit."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch (float32, one machine). None draws one.

    In modes with exits and a temperature this holds for a fixed number of drafts: which tokens are drafted decides
    which random numbers are used, and the number of drafts follows the load unless it is set."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it unless `include_stop_str_in_output`."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the text."""
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the text of the stop id, is the end of the text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-text ids."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    grammar: Grammar | None = None
    """What the text must be."""
    logprobs: int | None = None
    """None: no log-probabilities. k: that of the chosen token and of the k likeliest."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt, given those before it. The whole prompt then runs at full depth: it reads
    no prefix cache, and none of its tokens exits."""
    mode: str | None = None
    """The contract: full, verified, bounded or fast. None: verified where the engine has an artefact or suffix drafts,
    else full."""
    epsilon: float | None = None
    """For bounded: most tokens of an answer that full depth would not have chosen, as a share; 0.05 if not given. For
    fast: the share that its certified contract allows, in the mean over answers; that of the loosest if not given."""
    margin: float | None = None
    """For bounded: how many nats less likely such a token may be than full depth's own choice; 0.2 if not given."""
    threshold: float | None = None
    """Least router score of a draft (verified, bounded) or of an exit (fast); above 1 nothing leaves early. None:
    calibrated."""
    min_layers: int = 0
    """No exit before this many layers have run."""

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens, "max_tokens")
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "true or false")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError("grammar", type(self.grammar).__name__, "a Grammar")
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_budget(self.mode, self.epsilon, self.margin)
        _check_exits(self.mode, self.threshold, self.min_layers)
        _check_stop(self.stop)
        _check_stop_ids(self.stop_ids)
        _check_logit_bias(self.logit_bias)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether other logits than the model's are asked for before a token is chosen."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )

    def check_ids(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have."""
        for name, ids in (("stop_ids", self.stop_ids), ("logit_bias", tuple(self.logit_bias))):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(name, token_id, f"token ids in 0..{vocab_size - 1}")


class Audit(StrEnum):
    """How a token compares with full depth."""

    VERIFIED = "verified"
    """It is the full-depth token: it ran all layers, or the deep pass agreed before it was emitted."""
    AGREED = "agreed"
    """No token has it: of mode fast whole answers are judged, not tokens."""
    DISAGREED = "disagreed"
    """Full depth would have chosen another token: kept within the budget of mode bounded."""
    UNAUDITED = "unaudited"
    """Emitted at its exit; no deep layer saw it."""


class FinishReason(StrEnum):
    """Why a request ended; every request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Budget:
    """Which tokens that full depth would not have chosen mode bounded may emit. `exits.accept` has the rule."""

    epsilon: float
    """Most of them, as a share of the tokens of the answer, at every moment."""
    margin: float
    """Most nats by which one is less likely than full depth's choice."""


@dataclass(frozen=True, slots=True)
class ExitPolicy:
    """What the contract of a request means at each checkpoint layer, shallow to deep. What every step reads of every
    row is computed once."""

    mode: str = "full"
    draft_thresholds: tuple[float, ...] = ()
    """Least score at which a token is drafted from the checkpoint, and in mode fast emitted at the exit; infinite where
    the request may not leave."""
    budget: Budget | None = None
    """Of mode bounded."""
    epsilon: float | None = None
    """Of mode fast, the certified contract: most tokens of an answer that full depth would have chosen otherwise, as a
    share, in the mean over answers. None: the thresholds are not certified."""
    may_exit: bool = field(init=False, repr=False, compare=False)
    """Whether it may be drafted from any checkpoint."""
    skips_layers: bool = field(init=False, repr=False, compare=False)
    """Whether tokens that exit never run the deep layers."""
    last_exit: int = field(init=False, repr=False, compare=False)
    """The index of the deepest exit where it may leave; -1 if there is none."""

    def __post_init__(self) -> None:
        open_exits = [index for index, threshold in enumerate(self.draft_thresholds) if threshold <= 1.0]
        object.__setattr__(self, "may_exit", bool(open_exits))
        object.__setattr__(self, "last_exit", open_exits[-1] if open_exits else -1)
        object.__setattr__(self, "skips_layers", self.mode == "fast")

    def asks(self, index: int, *, feeds: bool) -> bool:
        """Whether the head of an exit runs: the row may leave there, or, where it `feeds` the next exit, behind it."""
        return index <= self.last_exit and (feeds or self.draft_thresholds[index] <= 1.0)


NO_EXITS = ExitPolicy()


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted request: ids checked against the model, parameters checked. What every step reads of every row is
    computed once."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """The seed in use: that of the parameters, or the one drawn at submission."""
    eos_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    """Prefix-cache blocks are shared only between requests of one salt."""
    policy: ExitPolicy = NO_EXITS
    mask: TokenMask | None = field(default=None, repr=False, compare=False)
    """Follows its grammar."""
    scores_from: int | None = None
    """Internal: where an answer that is judged begins in the prompt, which is scored from there on. Nobody waits for
    such a request (`engine.judge`)."""
    end_ids: frozenset[int] = field(init=False, repr=False, compare=False)
    """Ids that end the text and are not part of it."""
    adjusts_logits: bool = field(init=False, repr=False, compare=False)
    """Whether it has a bias, penalties or fewest tokens."""
    may_copy: bool = field(init=False, repr=False, compare=False)
    """Whether it may have suffix drafts: it asks for no least score and no least layer, which they do not have."""
    informs_planner: bool = field(init=False, repr=False, compare=False)
    """Whether the acceptance of its drafts predicts that of other requests."""

    def __post_init__(self) -> None:
        params = self.params
        end_ids = frozenset((*params.stop_ids, *(() if params.ignore_eos else self.eos_ids)))
        object.__setattr__(self, "end_ids", end_ids)
        object.__setattr__(self, "adjusts_logits", params.changes_logits)
        usual = params.threshold is None and not params.logit_bias and self.mask is None
        usual = usual and not self.policy.skips_layers
        object.__setattr__(self, "informs_planner", usual)
        object.__setattr__(self, "may_copy", params.threshold is None and params.min_layers == 0)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token and how it came about."""

    token_id: int
    text: str
    """Text released with this token; the texts of all tokens join to the output."""
    exit_layer: int
    """Layers that had run when the token was proposed: those of its checkpoint if it left there, else all."""
    logprob: float | None = None
    """Of the full-depth distribution; of the exit's own for a token that is unaudited."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    score: float | None = None
    """The router's, where one was asked."""
    audit: Audit = Audit.VERIFIED
    mode: str = "full"
    """The contract in force: a request for bounded with a temperature is served as verified."""
    gap: float | None = None
    """Of a token that the budget of mode bounded kept: by how many nats full depth's choice was likelier, penalties and
    the like included. None for all others."""


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of the prompt under the model at full depth."""

    token_id: int
    logprob: float | None = None
    """Given the tokens before it; None for the first. -inf for a token that the model rules out."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(id, log-probability) of the likeliest tokens in its place, best first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and times of one request, in tokens and seconds."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    num_preemptions: int = 0
    layers_run: int = 0
    """Layers run for output tokens and drafts, summed over tokens; exit heads are not counted."""
    deep_passes: int = 0
    """Passes through the deepest layers that output tokens came from."""
    num_drafts: int = 0
    num_accepted: int = 0
    """Drafts that became output."""
    num_differing: int = 0
    """Output tokens that full depth would not have chosen, kept by the budget of mode bounded."""
    exits: Mapping[int, int] = field(default_factory=dict)
    """Output tokens by exit layer."""
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def layers_per_token(self) -> float:
        return self.layers_run / self.output_tokens if self.output_tokens else 0.0

    @property
    def tokens_per_deep_pass(self) -> float:
        return self.output_tokens / self.deep_passes if self.deep_passes else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of drafts that became output; None without drafts."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A piece of a request's answer. Exactly one piece per request has a `finish_reason`."""

    request_id: str
    tokens: tuple[TokenOutput, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    """Present on the last piece."""
    error: Exception | None = None
    """Present when the reason is `error`."""
    prompt_logprobs: tuple[PromptToken, ...] = ()
    """Where they were asked for: all tokens of the prompt, on the first piece. A request that ends before its first
    token has those that had run by then."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


def _integer(name: str, value: object, low: int, high: int, high_name: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(name, value, f"an integer in {low}..{high_name or high}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not (low < value if above else low <= value) or value > high:  # type: ignore[operator]
        raise RequestError(name, value, f"a finite number {'above' if above else 'from'} {low} up to {high}")


def _check_budget(mode: object, epsilon: object, margin: object) -> None:
    for name, value, limit, expected in (
        ("epsilon", epsilon, 1.0, "a number above 0 and below 1"),
        ("margin", margin, math.inf, "a finite number above 0"),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < limit:
            raise RequestError(name, value, expected)
        if mode != "bounded" and (mode != "fast" or name != "epsilon"):
            takes = "mode bounded or fast" if name == "epsilon" else "mode bounded"
            raise RequestError(name, value, f"{takes} with it; the mode is {mode or 'not given'}")


def _check_exits(mode: object, threshold: object, min_layers: object) -> None:
    if mode is not None and mode not in MODES:
        raise RequestError("mode", mode, f"one of {', '.join(MODES)}")
    if threshold is not None:
        _number("threshold", threshold, 0.0, MAX_THRESHOLD)
        if mode == "full":
            raise RequestError("threshold", threshold, "none: full depth has no exits")
    _integer("min_layers", min_layers, 0, 2**16)


def _check_stop(stop: tuple[str, ...]) -> None:
    if not isinstance(stop, tuple) or len(stop) > MAX_STOP_STRINGS:
        raise RequestError("stop", stop, f"a tuple of at most {MAX_STOP_STRINGS} strings")
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError("stop", text, f"strings of 1..{MAX_STOP_CHARS} characters")


def _check_stop_ids(stop_ids: tuple[int, ...]) -> None:
    if not isinstance(stop_ids, tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in stop_ids):
        raise RequestError("stop_ids", stop_ids, "a tuple of token ids")


def _check_logit_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        raise RequestError("logit_bias", bias, f"a mapping of at most {MAX_LOGIT_BIAS} token ids to numbers")
    for token_id, value in bias.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError("logit_bias", token_id, "integer token ids as keys")
        _number(f"logit_bias[{token_id}]", value, -100.0, 100.0)
