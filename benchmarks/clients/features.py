"""The features in the table and what registers a check of one. Nothing here imports a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FEATURES = {
    "models": "list of models",
    "chat": "a chat, whole",
    "stream": "the same text streamed",
    "second-turn": "the message that came, sent back as it is",
    "stop": "stop strings",
    "choices": "`n` choices",
    "logprobs": "log-probabilities of an answer",
    "usage": "usage at the end of a stream",
    "completion": "a completion, whole and streamed",
    "prompts": "a list of prompts",
    "echo": "`echo` with log-probabilities, no new token",
    "tools-auto": "tools that the model may call",
    "tools-required": "a forced tool call, whole and streamed",
    "tool-result": "the result of a tool sent back",
    "schema": "an answer by JSON schema",
    "responses": "the Responses API, whole and streamed",
    "errors": "refusals as the client's own exceptions",
    "embeddings": "refused by name: no such endpoint",
    "timeout": "the client's own timeout, and the service goes on",
    "loglikelihood": "score of a multiple-choice task",
    "generate": "score of a generated answer, by completions",
    "generate-chat": "score of a generated answer, by chats",
    "load": "load of completions, streamed",
    "load-chat": "load of chats, streamed",
}
"""What a client can ask for, and how the table says it."""


@dataclass(frozen=True)
class Service:
    """Where a check finds the service."""

    url: str
    model: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


Run = Callable[[Service], object]


class Checks:
    """The checks of one client. A check fails by an exception; a result that is not None is shown as a remark."""

    def __init__(self, distribution: str) -> None:
        self.distribution = distribution
        """Name of the package, as it is installed."""
        self.by_feature: dict[str, Run] = {}

    def __call__(self, feature: str) -> Callable[[Run], Run]:
        if feature not in FEATURES or feature in self.by_feature:
            raise ValueError(f"{feature}: not a feature, or checked twice")

        def register(run: Run) -> Run:
            self.by_feature[feature] = run
            return run

        return register


def expect(truth: object, what: object) -> None:
    """Fail with what came."""
    if not truth:
        raise AssertionError(what)
