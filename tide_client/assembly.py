"""Assembles an answer from its stream: tokens in order, pieces of calls, one end for each choice."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tide.v1 import tide_pb2 as pb
from tide_client.errors import BrokenStreamError, TideClientError, count
from tide_client.results import Answer, Delta, Token, answer_of, token_of
from tide_client.tools import ToolCall


@dataclass(slots=True)
class _Choice:
    """One of the choices, as far as it has arrived."""

    index: int
    tokens: list[Token] = field(default_factory=list)
    again: deque[Token] = field(default_factory=deque)
    """Tokens that a resumed stream has to send again."""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    num_units: int = 0
    """Characters of content and arguments, and beginnings of calls, that have arrived."""
    num_again: int = 0
    """As many of them are left to arrive again."""
    answer: Answer | None = None

    def restart(self, num_kept: int) -> None:
        self.again, self.num_again, self.answer = deque(self.tokens[num_kept:]), self.num_units, None

    def new_piece(self, message: pb.Delta) -> Delta | None:
        """The part of a piece that has not arrived before. A call that is sent again has another id: the first one
        stays."""
        if not message.HasField("tool_call"):
            content = self._new(message.content)
            self.content += content
            return Delta(self.index, content) if content else None
        call = message.tool_call
        begins = bool(call.id) and self._new("+") != ""
        if begins:
            self.calls.append(ToolCall(call.id, call.name, ""))
        arguments = self._new(call.arguments)
        if not begins and not arguments:
            return None
        if call.index >= len(self.calls):
            raise BrokenStreamError(f"call {call.index} goes on before it began")
        known = self.calls[call.index]
        self.calls[call.index] = replace(known, arguments=known.arguments + arguments)
        call_id, name = (call.id, call.name) if begins else (None, None)
        return Delta(self.index, "", call.index, call_id, name, arguments)

    def _new(self, text: str) -> str:
        num_known = min(self.num_again, len(text))
        self.num_again -= num_known
        self.num_units += len(text) - num_known
        return text[num_known:]


class AnswerBuilder:
    """Assembles the answer to one request: tokens in order, then the complete answer or a failure. Tokens received
    before a failure are returned before it is raised; every later call raises it again."""

    def __init__(self, n: int = 1, *, reads_calls: bool = False) -> None:
        """`n` choices. `reads_calls`: the server sends content and calls apart from the tokens."""
        self.request_id = ""
        self.tokens: list[Token] = []
        """All that were received, as they came."""
        self.is_over = False
        """No more tokens will arrive."""
        self._num_choices = n
        self._choices: dict[int, _Choice] = {}
        """Those of which something has arrived."""
        self._reads_calls = reads_calls
        self._received: deque[Token] = deque()
        self._pieces: deque[Delta] = deque()
        self._answer: Answer | None = None
        self._failure: TideClientError | None = None
        self._next_chunk = 0
        self._num_kept = 0

    @classmethod
    def of(cls, request: pb.GenerateRequest) -> AnswerBuilder:
        return cls(num_choices(request), reads_calls=reads_calls(request))

    @property
    def is_whole(self) -> bool:
        return self._answer is not None

    @property
    def answer(self) -> Answer:
        if self._failure is not None:
            raise self._failure
        if self._answer is None:
            raise TideClientError(
                f"there is no answer yet: {count(len(self.tokens))} received, the final message is missing"
            )
        return self._answer

    def next_token(self) -> Token | None:
        """The next received token; None if there is none yet. Raises the failure after all tokens."""
        if self._received:
            return self._received.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def next_delta(self) -> Delta | None:
        """The same for pieces of content and of calls."""
        if self._reads_calls and self._pieces:
            return self._pieces.popleft()
        while not self._reads_calls and self._received:
            token = self._received.popleft()
            if token.text:
                return Delta(token.choice, token.text)
        if self._failure is not None:
            raise self._failure
        return None

    def take(self, chunk: pb.GenerateChunk) -> None:
        """Add a message of a gRPC stream; a missing or repeated chunk fails the stream."""
        try:
            self._take(chunk)
        except BrokenStreamError as failure:
            self.fail(failure)

    def _take(self, chunk: pb.GenerateChunk) -> None:
        if self.is_whole or chunk.sequence != self._next_chunk:
            expected = "nothing" if self.is_whole else str(self._next_chunk)
            raise BrokenStreamError(f"chunk {chunk.sequence} came where {expected} was next")
        self._next_chunk += 1
        self.request_id = chunk.request_id
        if chunk.choice >= self._num_choices:
            raise BrokenStreamError(f"choice {chunk.choice} came where {self._num_choices} were asked for")
        choice = self._choice(chunk.choice)
        if choice.answer is not None:
            raise BrokenStreamError(f"choice {chunk.choice} goes on after its final message")
        tokens = [token_of(token, chunk.choice) for token in chunk.tokens]
        while tokens and choice.again:
            token, before = tokens.pop(0), choice.again.popleft()
            if token.id != before.id:
                raise BrokenStreamError(f"the resumed answer has token {token.id} where {before.id} was received")
        self.add(tokens)
        self._pieces += [piece for delta in chunk.deltas if (piece := choice.new_piece(delta)) is not None]
        if chunk.HasField("final"):
            self._end(choice, chunk)

    def _end(self, choice: _Choice, chunk: pb.GenerateChunk) -> None:
        if choice.again:
            raise BrokenStreamError(f"the resumed answer ended {count(len(choice.again))} early")
        # A server that knows no tools sends no pieces; one that does loses no text in them.
        text = choice.content if choice.num_units else "".join(token.text for token in choice.tokens)
        answer = answer_of(chunk.request_id, text, choice.tokens, chunk.final, choice.calls)
        choice.answer = _joined(answer, self._num_kept)
        answers = {index: one.answer for index, one in self._choices.items() if one.answer is not None}
        if len(answers) == self._num_choices:
            first, *others = (answers[index] for index in sorted(answers))
            self.complete(replace(first, others=tuple(others)))

    def add(self, tokens: Sequence[Token]) -> None:
        self.tokens += tokens
        self._received += tokens
        for token in tokens:
            self._choice(token.choice).tokens.append(token)

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice(index))

    def complete(self, answer: Answer) -> None:
        """The final message arrived."""
        self._answer = answer

    def end(self) -> None:
        """The stream ended. Without a final message this is a failure."""
        if not self.is_whole:
            self.fail(BrokenStreamError(f"the stream ended after {count(len(self.tokens))} without a final message"))
        self.is_over = True

    def fail(self, failure: TideClientError) -> None:
        self._failure, self.is_over = failure, True

    def restart(self, num_kept: int) -> None:
        """Expect chunk 0 again, for a retried call whose prompt ends with the first `num_kept` tokens. The others must
        arrive again, and are not returned twice; so must choices that had ended."""
        self._next_chunk, self._num_kept = 0, num_kept
        for choice in self._choices.values():
            choice.restart(num_kept)


def num_choices(request: pb.GenerateRequest) -> int:
    """Choices that a request asks for. A number that the server refuses counts as one."""
    return max(1, request.n) if request.HasField("n") else 1


def reads_calls(request: pb.GenerateRequest) -> bool:
    """Whether the server looks for calls in the answers."""
    return bool(request.chat.tools) and request.tool_choice.mode != pb.TOOL_MODE_NONE


def _joined(answer: Answer, num_kept: int) -> Answer:
    """The answer with the tokens that the last attempt had in its prompt counted as what they are. Times, passes and
    drafts are those of the last attempt."""
    if num_kept == 0:
        return answer
    usage = replace(
        answer.usage,
        prompt_tokens=answer.usage.prompt_tokens - num_kept,
        completion_tokens=answer.usage.completion_tokens + num_kept,
    )
    per_layer = Counter(token.exit_layer for token in answer.tokens)
    return replace(answer, usage=usage, exits=replace(answer.exits, tokens_per_layer=dict(sorted(per_layer.items()))))
