"""An engine that answers from a script, with the calls the command line makes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from tide_core.config import EngineConfig
from tide_core.errors import RequestError
from tide_core.request import FinishReason, RequestOutput, SamplingParams, TokenOutput, Usage

USAGE = Usage(
    prompt_tokens=3,
    output_tokens=2,
    cached_tokens=1,
    layers_run=7,
    deep_passes=1,
    num_drafts=3,
    num_accepted=1,
    exits={4: 1, 1: 1},
    queue_s=0.1,
    first_token_s=0.2,
    total_s=0.5,
)


def outputs(texts: Sequence[str], reason: FinishReason = FinishReason.LENGTH) -> list[RequestOutput]:
    """One output per text, the last one with the reason."""
    tokens = [TokenOutput(100 + index, text, exit_layer=4) for index, text in enumerate(texts)]
    last = RequestOutput("r", tuple(tokens[-1:]), reason, USAGE)
    return [*(RequestOutput("r", (token,)) for token in tokens[:-1]), last]


class FakeEngine:
    """Answers each prompt with what `script` holds for it; an exception in the script is raised at its place."""

    model_name = "fake"

    def __init__(self, script: Sequence[Sequence[RequestOutput | BaseException]]) -> None:
        self._script = list(script)
        self.config = EngineConfig()
        self.settings: EngineConfig | None = None
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.refused: dict[Any, RequestError] = {}
        self.num_aborted = 0
        self.default_mode = "full"
        self.closed = False

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.closed = True

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(kernels="none", exits={"num_layers": 4})

    def make_request(self, prompt: Any, params: SamplingParams) -> SimpleNamespace:
        if (error := self.refused.get(str(prompt))) is not None:
            raise error
        return SimpleNamespace(prompt_ids=(1, 2, 3))

    def stream_blocking(self, prompt: Any, params: SamplingParams) -> Iterator[RequestOutput]:
        self.make_request(prompt, params)
        finished = False
        try:
            for item in self._next(prompt, params):
                if isinstance(item, BaseException):
                    raise item
                finished = item.finished
                yield item
        finally:
            self.num_aborted += not finished

    async def stream(self, prompt: Any, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        for output in self.stream_blocking(prompt, params):
            yield output

    def _next(self, prompt: Any, params: SamplingParams) -> Sequence[RequestOutput | BaseException]:
        self.prompts.append(prompt)
        self.params.append(params)
        return self._script[(len(self.prompts) - 1) % len(self._script)]
