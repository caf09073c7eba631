"""What a retry asks for. Every attempt has an id of its own, and an answer that broke is resumed where that is exact.

A retry of a broken answer is one of two things:
- It continues: the prompt with the tokens so far, for the rest. That is exact where a token depends on nothing but the
  ids before it: one choice, greedy, in mode full or verified, without what counts output tokens apart from the prompt
  (penalties) or reads text across the break (stop strings, a schema or grammar, tools). It is as exact as the server's
  own preemption, which recomputes the same way.
- It replays: the same request from its start, with all its choices, where it is greedy or has a seed. Random numbers
  are made from the seed and the index of the output token, so a seeded answer cannot be continued as a new prompt.
Either way tokens that arrive again must be those that arrived before, or the stream fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from tide.v1 import tide_pb2 as pb
from tide_client.assembly import num_choices
from tide_client.results import Token

DEFAULT_MAX_TOKENS = 128
MAX_ID_CHARS = 128
CONTINUED_MODES = ("full", "verified")
STRUCTURES = ("json_schema", "regex", "grammar")


class Retry:
    """The requests of one stream."""

    def __init__(self, request: pb.GenerateRequest, *, resume: bool) -> None:
        self.request = request
        self._resume = resume
        self._num_retries = 0
        self._prompt_ids = list(request.prompt_ids.ids)

    def can_follow(self, tokens: Sequence[Token]) -> bool:
        """Whether an attempt may follow one that broke after these tokens."""
        params = self.request.sampling_params
        return not tokens or (self._resume and (params.temperature == 0 or params.HasField("seed")))

    def num_kept(self, tokens: Sequence[Token]) -> int:
        """How many of the tokens the next request has in its prompt; 0: it replays.

        The last token arrives again, since it may be the last of the answer; so do those after the last text, since
        their character is not complete."""
        params = self.request.sampling_params
        counts_output = params.presence_penalty or params.frequency_penalty
        reads_text = params.stop or params.choices or self.request.chat.tools or any(map(params.HasField, STRUCTURES))
        modes = {token.mode for token in tokens}
        if num_choices(self.request) > 1 or params.temperature or not modes <= set(CONTINUED_MODES):
            return 0
        if counts_output or reads_text:
            return 0
        return next((index for index in range(len(tokens) - 1, 0, -1) if tokens[index - 1].text), 0)

    def needs_ids(self, num_kept: int) -> pb.TokenizeRequest | None:
        """The call that gives the ids of the prompt, if the next request needs them and they are not known."""
        if num_kept == 0 or self._prompt_ids:
            return None
        if self.request.HasField("chat"):
            return pb.TokenizeRequest(chat=self.request.chat)
        return pb.TokenizeRequest(text=self.request.prompt)

    def take_ids(self, reply: pb.TokenizeResponse) -> None:
        self._prompt_ids = list(reply.ids)

    def next(self, kept: Sequence[Token]) -> pb.GenerateRequest:
        """The request of the next attempt, with `kept` in its prompt."""
        self._num_retries += 1
        request = with_own_id(self.request, self._num_retries)
        if kept:
            params = request.sampling_params
            max_tokens = params.max_tokens if params.HasField("max_tokens") else DEFAULT_MAX_TOKENS
            params.max_tokens = max_tokens - len(kept)
            if params.HasField("min_tokens"):
                params.min_tokens = max(0, params.min_tokens - len(kept))
            request.ClearField("prompt")
            request.ClearField("chat")
            request.prompt_ids.ids[:] = [*self._prompt_ids, *(token.id for token in kept)]
        return request


def with_own_id(request: pb.GenerateRequest, num_retries: int) -> pb.GenerateRequest:
    """A copy of the request for a retry. The attempt before may still be open on the server, which refuses a second
    request with its id."""
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    if request.request_id and num_retries:
        mark = f"~{num_retries + 1}"
        again.request_id = request.request_id[: MAX_ID_CHARS - len(mark)] + mark
    return again
